"""tinylm sample: text from a model."""

import secrets
import time
from typing import TYPE_CHECKING

import typer

from tinylm.commands.compiling import choose_code, compiled_decoder
from tinylm.commands.fill_masks import fill_masks
from tinylm.commands.groups import typed, with_groups
from tinylm.commands.model import AdapterPaths, ModelPath, OpenModel, choose_where, open_model
from tinylm.commands.options import MachineOptions, OutputOptions, SeedOptions
from tinylm.commands.sampling import (
    ChoiceOptions,
    LengthOptions,
    PromptOptions,
    Request,
    SearchOptions,
    SpeedOptions,
    read_prompts,
)
from tinylm.commands.write_on import BETWEEN_SAMPLES, write_on
from tinylm.commands.write_targets import write_targets
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.inference.compiled import CompiledDecoder


@with_groups
def sample(
    invocation: typer.Context,
    model: ModelPath = None,
    adapter: AdapterPaths = None,
    *,
    prompt: PromptOptions,
    choice: ChoiceOptions,
    search: SearchOptions,
    length: LengthOptions,
    speed: SpeedOptions,
    seed: SeedOptions,
    machine: MachineOptions,
    output: OutputOptions,
) -> None:
    """Write text with a model, beginning from a prompt."""
    console = output.console()
    if length.max_tokens < 1 or length.num_samples < 1:
        raise UsageError("--max-tokens and --num-samples must be 1 or more.")
    if speed.quantize not in ("none", "int8"):
        raise UsageError(f"--quantize is {speed.quantize!r}; it must be one of: none, int8.")
    if speed.draft not in ("auto", "ngram", "none"):
        raise UsageError(f"--draft is {speed.draft!r}; it must be one of: auto, ngram, none.")
    if speed.compile not in ("auto", "on", "off"):
        raise UsageError(f"--compile is {speed.compile!r}; it must be one of: auto, on, off.")
    prompts = read_prompts(prompt)
    choice.sampling(0.0)  # these say now what is out of range
    search.search()
    named = list(dict.fromkeys(one.adapter for one in prompts if one.adapter is not None))
    if named and adapter:
        raise UsageError("--adapter is for all prompts, and some lines name their own; leave it out.")

    from tinylm.device import DTYPES
    from tinylm.inference.arrange import arrange
    from tinylm.model.decoder import Decoder

    device, dtype = choose_where(console, machine)
    opened = open_model(console, model, adapter or named, device)
    opened.network.to(DTYPES[dtype])
    int8, samples, tokens = speed.quantize == "int8", length.num_samples, length.max_tokens * len(prompts)
    code = choose_code(opened, speed.compile, int8=int8, tokens=tokens, samples=samples, cache=speed.cache)
    arrange(opened.network, int8, packed=code is None)
    compiled = None
    if code is not None:
        assert isinstance(opened.network, Decoder)
        compiled = compiled_decoder(console, opened.network, code, speed.compile)
        if compiled is None:
            arrange(opened.network, int8)
    chosen_seed = secrets.randbits(32) if seed.seed is None else seed.seed
    chosen = typed(invocation, prompt, choice, search, length, speed)
    begun = time.monotonic()
    written = first = 0
    for number, one in enumerate(prompts):
        data = opened.config.data
        if named:
            data = opened.use_only(None if one.adapter is None else named.index(one.adapter))
        if number and not console.as_json and isinstance(opened.network, Decoder):
            console.result(BETWEEN_SAMPLES.strip("\n"))
        request = Request(
            one, prompt, choice, search, length, chosen_seed, speed.cache, speed.draft, first, data, chosen
        )
        written += _answer(console, opened, request, compiled)
        first += length.num_samples * (1 + one.text.count("\n"))
    seconds = time.monotonic() - begun
    console.note(f"{written} tokens in {seconds:.2f} s, {written / max(seconds, 1e-9):.0f} a second.")


def _answer(console: Console, opened: OpenModel, request: Request, compiled: "CompiledDecoder | None") -> int:
    """Do with a prompt what the model is for; returns how many tokens were written."""
    from tinylm.model.decoder import Decoder
    from tinylm.model.encoder import Encoder
    from tinylm.model.encoder_decoder import EncoderDecoder

    match opened.network:
        case Decoder() as decoder:
            return write_on(console, decoder, opened, request, compiled)
        case Encoder() as encoder:
            return fill_masks(console, encoder, opened, request)
        case EncoderDecoder() as translator:
            return write_targets(console, translator, opened, request)
        case _:
            raise UsageError(f"{opened.path} is of a kind that tinylm sample does not know.")
