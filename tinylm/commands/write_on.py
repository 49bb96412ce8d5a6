"""What tinylm sample does with a decoder: text that goes on from a prompt."""

from typing import TYPE_CHECKING

from tinylm.commands.model import OpenModel
from tinylm.commands.sampling import Request, known_part
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.model.decoder import Decoder

TEMPERATURE = 0.8
BETWEEN_SAMPLES = "\n---\n"


def write_on(console: Console, network: "Decoder", opened: OpenModel, request: Request) -> int:
    """Print what a decoder writes on from a prompt; returns how many tokens that is."""
    from tinylm.inference.generator import generate
    from tinylm.inference.sampler import Sampler
    from tinylm.inference.text import TextStream, start_tokens

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
    for row in range(length.num_samples):
        sampler.observe(row, ids)
    streams = [TextStream(tokenizer, length.stop or []) for _ in range(length.num_samples)]
    texts = [""] * length.num_samples
    streaming = length.stream is not False and length.num_samples == 1 and not console.as_json
    if streaming and echo:
        console.result(text, end="")
    for tokens in generate(network, [start] * length.num_samples, sampler, length.max_tokens, request.cache):
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
