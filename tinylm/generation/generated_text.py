"""The record of one generated text."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """A text that was generated for a prompt.

    prompt: the prompt, without skipped characters; of a chat, the rendered conversation; of a translation, the source.
    text: the generated text, without the prompt.
    tokens: number of generated tokens, without an end token.
    seed: the seed that gives this text as the only sample of the prompt.
    finish_reason: `stop` (a stop sequence), `end` (an end token, or the text that ends an answer in a chat) or
        `length` (`max_tokens`).
    score: length-normalised log-likelihood of a target found by beam search; otherwise `None`.
    """

    prompt: str
    text: str
    tokens: int
    seed: int
    finish_reason: str
    score: float | None = None
