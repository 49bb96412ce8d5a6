"""What tinylm sample does with an encoder-decoder: a target for each source."""

import math
from typing import TYPE_CHECKING, Any

from tinylm.commands.model import OpenModel
from tinylm.commands.sampling import Request, known_part
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.inference.translate import Found
    from tinylm.model.encoder_decoder import EncoderDecoder

DRAWING = ("top_k", "top_p", "min_p", "repeat_penalty", "num_samples")


def write_targets(console: Console, network: "EncoderDecoder", opened: OpenModel, request: Request) -> int:
    """Print a target a line for each line of the prompt, in order; returns how many tokens they have.

    The best that a search finds, or with a temperature one drawn at random.
    """
    from tinylm.inference.translate import draw_targets, find_targets

    prompt, settings = request.prompt, request.settings
    reading, printing = request.options.prompt, request.options.printing
    if reading.prompt is None and reading.prompt_file is None:
        raise UsageError("There is no source; give one with --prompt, or one a line with --prompt-file.")
    tokenizer = opened.tokenizer
    drawn = settings.temperature is not None and settings.temperature > 0
    stream = ("stream",) if printing.stream else ()
    useless = (*stream, "separator", "cache", "draft", "compile")
    request.refuse(*useless, because="A target is found with a cache, and printed once it is whole")
    if drawn:
        request.refuse(
            "beams", "length_penalty", because="With a --temperature, targets are drawn and not searched for"
        )
    else:
        request.refuse(*DRAWING, because="A search finds the same target every time, unless there is a --temperature")
    texts = prompt.text.split("\n") if prompt.text or prompt.place else []
    names = [
        f"Source {number} of {prompt.place}" if prompt.place else f"Source {number}"
        for number, _ in enumerate(texts, start=1)
    ]
    if prompt.place and len(texts) == 1:
        names = [prompt.place]
    lines = [
        known_part(console, text.strip(), tokenizer, reading.unknown, name).strip()
        for text, name in zip(texts, names, strict=True)
    ]
    sources = [[int(i) for i in tokenizer.encode(line)] for line in lines]
    _check_lengths(console, dict(zip(names, sources, strict=True)), network.context, reading.strict)
    sources = [source[: network.context - 1] for source in sources]
    most = min(settings.max_tokens, network.context)
    if drawn:
        console.note(f"Seed {settings.seed}.")
        sampling = settings.sampling(0.0)
        targets = draw_targets(
            network,
            sources,
            tokenizer.end_of_text,
            sampling,
            settings.num_samples,
            settings.seed,
            request.first,
            max_tokens=most,
        )
    else:
        targets = find_targets(
            network, sources, tokenizer.end_of_text, request.options.search.search(), max_tokens=most
        )
    each = settings.num_samples if drawn else 1
    written = 0
    for line, found in zip((line for line in lines for _ in range(each)), targets, strict=True):
        target = tokenizer.decode(found.tokens)
        stops = [place for stop in settings.stop if (place := target.find(stop)) >= 0]
        target = target[: min(stops)] if stops else target
        written += len(found.tokens)
        if console.as_json:
            reason = "stop" if stops else "end" if found.ended else "length"
            console.record(request.record(**_record(line, target, found, settings.seed, reason)))
        else:
            console.result((f"{line}\t" if printing.echo else "") + target.replace("\n", " "))
    return written


def _check_lengths(console: Console, sources: dict[str, list[int]], context: int, strict: bool) -> None:
    for name, source in sources.items():
        if len(source) + 1 > context:
            message = f"{name} has {len(source)} tokens, and the model reads {context - 1}"
            if strict:
                raise UsageError(f"{message}; shorten it, or leave out --strict to read its beginning.")
            console.warn(f"{message}: the rest is left out.")


def _record(line: str, target: str, found: "Found", seed: int, reason: str) -> dict[str, Any]:
    return {
        "prompt": line,
        "text": target,
        "tokens": len(found.tokens),
        "seed": seed,
        "finish_reason": reason,
        **({} if math.isnan(found.score) else {"score": found.score}),
    }
