"""What tinylm sample does with a decoder: text that goes on from a prompt."""

from typing import TYPE_CHECKING

from tinylm.commands.model import OpenModel
from tinylm.commands.sampling import Request, known_part
from tinylm.console import Console
from tinylm.errors import TinyLMError, UsageError

if TYPE_CHECKING:
    from tinylm.inference.compiled import CompiledDecoder
    from tinylm.inference.generator import Draft
    from tinylm.model.decoder import Decoder

TEMPERATURE = 0.8
MOST_GUESSES = 6
DRAFT_FROM = 512  # tokens, which earn back what reading the training text costs


def write_on(
    console: Console, network: "Decoder", opened: OpenModel, request: Request, compiled: "CompiledDecoder | None"
) -> int:
    """Print what a decoder, or its compiled form, generates from a prompt; returns the number of tokens.

    Samples are joined by the separator; no line end follows the last one.
    """
    from tinylm.inference.generator import generate, generate_from_draft
    from tinylm.inference.sampler import Sampler
    from tinylm.inference.text import TextStream, start_tokens
    from tinylm.inference.threads import WakingDecoder, thread_pace

    request.refuse("beams", "length_penalty", because="This model writes on from a prompt, and searches for no target")
    settings, printing, prompt = request.settings, request.options.printing, request.prompt
    tokenizer, echo = opened.tokenizer, printing.echo is not False
    text = known_part(console, prompt.text, tokenizer, request.options.prompt.unknown, prompt.name)
    ids = [int(i) for i in tokenizer.encode(text)] if text else []
    if len(ids) > network.context:
        message = f"{prompt.name} has {len(ids)} tokens, and the model sees {network.context} at a time"
        if request.options.prompt.strict:
            raise UsageError(f"{message}; shorten it, or leave out --strict to keep its tail.")
        console.warn(f"{message}: it goes on from the tail.")
    console.note(f"Seed {settings.seed}.")
    start = start_tokens(tokenizer, request.data, ids)
    sampling = settings.sampling(TEMPERATURE)
    device, rows = network.device, settings.num_samples
    sampler = Sampler(sampling, settings.seed, rows, device, tokenizer.vocab_size, request.first)
    for row in range(rows):
        sampler.observe(row, ids)
    streams = [TextStream(tokenizer, settings.stop) for _ in range(rows)]
    texts = [""] * rows
    streaming = printing.stream is not False and rows == 1 and not console.as_json
    if streaming and echo:
        console.result(text, end="")
    draft = None if compiled and request.options.speed.draft == "auto" else _draft(network, opened, request)
    writer = WakingDecoder(network, thread_pace(console), compiled)
    steps = (
        generate(writer, [start] * rows, sampler, settings.max_tokens, request.options.speed.cache)
        if draft is None
        else generate_from_draft(writer, start, sampler, settings.max_tokens, draft, MOST_GUESSES)
    )
    for tokens in steps:
        for row, (stream, token) in enumerate(zip(streams, tokens, strict=True)):
            if not stream.finished:
                piece = stream.push(token)
                texts[row] += piece
                if streaming and piece:
                    console.result(piece, end="")
        if all(stream.finished for stream in streams):
            break
    for row, stream in enumerate(streams):
        rest = stream.finish()
        texts[row] += rest
        if streaming and rest:
            console.result(rest, end="")
    if console.as_json:
        for written, stream in zip(texts, streams, strict=True):
            console.record(
                request.record(
                    prompt=text,
                    text=written,
                    tokens=stream.tokens,
                    seed=settings.seed,
                    finish_reason=stream.finish_reason,
                )
            )
    elif not streaming:
        console.result(printing.between().join((text if echo else "") + written for written in texts), end="")
    return sum(stream.tokens for stream in streams)


def _draft(network: "Decoder", opened: OpenModel, request: Request) -> "Draft | None":
    """What guesses ahead, where it pays; raises UsageError where it was asked for and cannot be had."""
    from tinylm.inference.draft import NGramDraft
    from tinylm.text.prepare import has_tokens, reopen_part

    wanted = request.options.speed.draft
    at_hand = request.data is not None and has_tokens(opened.path, request.data, opened.tokenizer)
    pays = request.settings.max_tokens >= DRAFT_FROM and at_hand
    if wanted == "none" or (wanted == "auto" and not pays):
        return None
    obstacle = None
    if request.settings.num_samples > 1:
        obstacle = "it is for one sample at a time"
    elif not request.options.speed.cache:
        obstacle = "it needs the cache"
    elif any(window is not None for window in network.windows):
        obstacle = "layers with --local-window cannot take a wrong guess back"
    elif request.data is None:
        obstacle = "the model has no training text of its own"
    else:
        try:
            # A damaged text makes worse guesses, which the model corrects, so that its hash need not be computed again.
            return NGramDraft(reopen_part(opened.path, request.data, opened.tokenizer, "train", trust_times=True))
        except TinyLMError as error:
            obstacle = str(error).removesuffix(".")
    if wanted == "ngram":
        raise UsageError(f"--draft ngram is not possible: {obstacle}; leave it out.")
    return None
