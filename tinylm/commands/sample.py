"""tinylm sample: text from a model."""

import secrets
import time
from typing import TYPE_CHECKING

import typer

from tinylm.checks import one_of
from tinylm.commands.compiling import choose_code, compiled_decoder
from tinylm.commands.fill_masks import fill_masks
from tinylm.commands.groups import typed, with_groups
from tinylm.commands.model import AdapterPaths, ModelPath, OpenModel, choose_where, open_model
from tinylm.commands.options import MachineOptions, OutputOptions
from tinylm.commands.prompts import read_prompts
from tinylm.commands.sampling import Request, SampleOptions
from tinylm.commands.write_on import write_on
from tinylm.commands.write_targets import write_targets
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.inference.compiled import CompiledDecoder


EXAMPLES = r"""Examples:

tinylm sample -p "Once upon a time" -n 400
    Continue a text with the newest model.

tinylm sample -m checkpoints/book -t 0.5 --seed 1
    A model by name; repeatable.

tinylm sample -f prompts.jsonl --json
    Answer many prompts, such as
    {"prompt": "The sea", "max_tokens": 50}.

tinylm sample --num-samples 9 --no-echo --stop '\n' --separator '\n'
    A list, one line per sample.
"""


@with_groups
def sample(
    invocation: typer.Context,
    model: ModelPath = None,
    adapter: AdapterPaths = None,
    *,
    options: SampleOptions,
    machine: MachineOptions,
    output: OutputOptions,
) -> None:
    """Generate text from a prompt."""
    console = output.console()
    speed = options.speed
    one_of("unknown", options.prompt.unknown, ("error", "skip"))
    one_of("quantize", speed.quantize, ("none", "int8"))
    one_of("draft", speed.draft, ("auto", "ngram", "none"))
    one_of("compile", speed.compile, ("auto", "on", "off"))
    separator = options.printing.between()
    seed = secrets.randbits(32) if options.seed.seed is None else options.seed.seed
    prompts = read_prompts(options.prompt, options.settings(seed))
    options.search.search()  # raises for a value out of range
    named = list(dict.fromkeys(one.adapter for one in prompts if one.adapter is not None))
    if named and adapter:
        raise UsageError("--adapter is for all prompts, and some lines name their own; leave it out.")

    from tinylm.device import DTYPES
    from tinylm.inference.arrange import arrange
    from tinylm.model.decoder import Decoder

    device, dtype = choose_where(console, machine)
    opened = open_model(console, model, adapter or named, device)
    opened.network.to(DTYPES[dtype])
    int8 = speed.quantize == "int8"
    samples = max(one.settings.num_samples for one in prompts)
    tokens = sum(one.settings.max_tokens for one in prompts)
    code = choose_code(opened, speed.compile, int8=int8, tokens=tokens, samples=samples, cache=speed.cache)
    arrange(opened.network, int8, packed=code is None)
    compiled = None
    if code is not None:
        assert isinstance(opened.network, Decoder)
        compiled = compiled_decoder(console, opened.network, code, speed.compile)
        if compiled is None:
            arrange(opened.network, int8)
    chosen = typed(invocation, *vars(options).values())
    joined = isinstance(opened.network, Decoder) and not console.as_json
    begun = time.monotonic()
    written = first = 0
    for number, one in enumerate(prompts):
        data = opened.config.data
        if named:
            data = opened.use_only(None if one.adapter is None else named.index(one.adapter))
        if number and joined:
            console.result(separator, end="")
        has_seed = "seed" in one.keys  # then its text does not depend on the prompts before it
        written += _answer(console, opened, Request(one, options, 0 if has_seed else first, data, chosen), compiled)
        if not has_seed:
            first += one.settings.num_samples * (1 + one.text.count("\n"))
    if joined:
        console.result("")
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
