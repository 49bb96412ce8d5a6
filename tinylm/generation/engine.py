"""The interface of the engines that generate tokens, with the windows of a text and the seeds of its random streams.

Imports no torch, whose import takes most of the start-up time.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol

from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import EncodedPrompt


class Candidate(NamedTuple):
    """A token id and the natural logarithm of its probability in the model's distribution (temperature 1)."""

    id: int
    logprob: float


class Token(NamedTuple):
    """A generated token of one row, that is, one sample.

    id: `None` at the end of a row whose end token llama.cpp does not report; torch yields end tokens, and goes on until
    its caller stops it. logprob: see Candidate. candidates: the likeliest tokens at its
    position, the likeliest first. Both are given if the request asks for them.
    """

    row: int
    id: int | None
    logprob: float | None = None
    candidates: Sequence[Candidate] = ()


class Engine(Protocol):
    """Computes and samples the tokens that continue prompts."""

    def generate(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int
    ) -> Generator[Token]:
        """Yield the next tokens of each prompt, one row per prompt, at most `config.max_tokens` per row.

        llama.cpp needs all prompts to be equal; torch takes different ones.

        Continues past the context length at a constant amortised cost per token, in windows (`window`) in which a BOS
        token stays first. first_stream: number of the random stream of the first row.
        """
        ...

    def sample_seed(self, config: GenerationConfig, first_stream: int, row: int) -> int:
        """The seed with which this row is generated as the only one."""
        return sample_seed(config.seed, first_stream + row)

    def close(self) -> None:
        """End llama.cpp, if it runs; otherwise it ends with the process. `generate` starts it again."""
        return


def window_start(length: int, context: int) -> int:
    """Index of the first token in the context window of a text of `length` tokens.

    0 while the context has room for the text and its next token. After that, the start advances by half a context at a
    time, so that a cache is reused for half a context of tokens, and positions stay in the range of training.
    """
    room, hop = max(1, context - 1), max(1, context // 2)
    return max(0, -(-(length - room) // hop)) * hop


def window(text: list[int], context: int, kept_id: int | None) -> list[int]:
    """The context window of a text, see `window_start`. If the text begins with `kept_id`, the window does as well."""
    kept = int(text[0] == kept_id)
    return text[:kept] + text[window_start(len(text), context) + kept :]


def sample_seed(seed: int, stream: int) -> int:
    """The seed with which the sample of the random stream (seed, stream) is generated alone, in stream 0.

    `seed` itself for stream 0; otherwise a number below 2^53, which every reader of JSON keeps exactly.
    """
    return mix(seed, stream) >> 10 if stream else seed


def mix(seed: int, number: int) -> int:
    """Mix both numbers by SplitMix64 (Steele et al. 2014) to 63 bits that are independent for adjacent numbers."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1
