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
BETWEEN_SAMPLES = "\n---\n"


def write_on(
    console: Console, network: "Decoder", opened: OpenModel, request: Request, compiled: "CompiledDecoder | None"
) -> int:
    """Print what a decoder, or its compiled form, writes on from a prompt; returns how many tokens that is."""
    from tinylm.inference.generator import generate, generate_from_draft
    from tinylm.inference.sampler import Sampler
    from tinylm.inference.text import TextStream, start_tokens
    from tinylm.inference.threads import WakingDecoder, thread_pace

    request.refuse("beams", "length_penalty", because="This model writes on from a prompt, and searches for no target")
    length, seed = request.length, request.seed
    tokenizer, echo = opened.tokenizer, length.echo is not False
    text = known_part(console, request.prompt.text, tokenizer, request.prompt_options.unknown)
    ids = [int(i) for i in tokenizer.encode(text)] if text else []
    if len(ids) > network.context:
        message = f"The prompt has {len(ids)} tokens, and the model sees {network.context} at a time"
        if request.prompt_options.strict:
            raise UsageError(f"{message}; shorten it, or leave out --strict to keep its tail.")
        console.warn(f"{message}: it goes on from the tail.")
    console.note(f"Seed {seed}.")
    start = start_tokens(tokenizer, request.data, ids)
    sampling = request.choice.sampling(TEMPERATURE)
    device, rows = network.device, length.num_samples
    sampler = Sampler(sampling, seed, rows, device, tokenizer.vocab_size, request.first)
    for row in range(rows):
        sampler.observe(row, ids)
    streams = [TextStream(tokenizer, length.stop or []) for _ in range(rows)]
    texts = [""] * rows
    streaming = length.stream is not False and rows == 1 and not console.as_json
    if streaming and echo:
        console.result(text, end="")
    draft = None if compiled and request.draft == "auto" else _draft(network, opened, request)
    writer = WakingDecoder(network, thread_pace(console), compiled)
    steps = (
        generate(writer, [start] * rows, sampler, length.max_tokens, request.cache)
        if draft is None
        else generate_from_draft(writer, start, sampler, length.max_tokens, draft, MOST_GUESSES)
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
        if streaming:
            console.result(rest)
    if console.as_json:
        for written, stream in zip(texts, streams, strict=True):
            console.record(
                request.record(
                    prompt=text,
                    text=written,
                    tokens=stream.tokens,
                    seed=seed,
                    finish_reason=stream.finish_reason,
                )
            )
    elif not streaming:
        console.result(BETWEEN_SAMPLES.join((text if echo else "") + written for written in texts))
    return sum(stream.tokens for stream in streams)


def _draft(network: "Decoder", opened: OpenModel, request: Request) -> "Draft | None":
    """What guesses ahead, where it pays; raises UsageError where it was asked for and cannot be had."""
    from tinylm.inference.draft import NGramDraft
    from tinylm.text.prepare import reopen_tokens

    at_hand = request.data is not None and (opened.path / request.data.token_folder).exists()
    pays = request.length.max_tokens >= DRAFT_FROM and at_hand
    if request.draft == "none" or (request.draft == "auto" and not pays):
        return None
    obstacle = None
    if request.length.num_samples > 1:
        obstacle = "it is for one sample at a time"
    elif not request.cache:
        obstacle = "it needs the cache"
    elif any(window is not None for window in network.windows):
        obstacle = "layers with --local-window cannot take a wrong guess back"
    elif request.data is None:
        obstacle = "the model has no training text of its own"
    else:
        try:
            return NGramDraft(reopen_tokens(opened.path, request.data, opened.tokenizer).train)
        except TinyLMError as error:
            obstacle = str(error)
    if request.draft == "ngram":
        raise UsageError(f"--draft ngram is not possible: {obstacle}; leave it out.")
    return None
