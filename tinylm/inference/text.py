"""Text around the generator: where a prompt begins, and a stream of text that stops where it is told to."""

from collections.abc import Sequence

from tinylm.config import DataConfig
from tinylm.text.tokenizer import StreamDecoder, Tokenizer


def start_tokens(tokenizer: Tokenizer, data: DataConfig | None, prompt: Sequence[int]) -> list[int]:
    """What the model is shown for a prompt. For an empty one, the end of text, after which a document begins.

    A model that was trained on a single document never saw that token; it is shown a line end, if it knows one.
    """
    if prompt:
        return list(prompt)
    if (data is not None and data.documents > 1) or tokenizer.unknown("\n"):
        return [tokenizer.end_of_text]
    return [int(i) for i in tokenizer.encode("\n")]


class TextStream:
    """One sample's text as its tokens come. What could be the beginning of a stop text is held back until it is not.

    `finish_reason` is `stop` once a stop text has appeared, `end` at the end of text, and `length` until then.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder: StreamDecoder = tokenizer.stream_decoder()
        self._end_of_text = tokenizer.end_of_text
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.tokens = 0
        self.finish_reason = "length"

    @property
    def finished(self) -> bool:
        return self.finish_reason != "length"

    def push(self, token: int) -> str:
        """The text that is certain now."""
        if token == self._end_of_text:
            self.finish_reason = "end"
            return self._release(self._held + self._decoder.finish())
        self.tokens += 1
        return self._release(self._held + self._decoder.push(token))

    def finish(self) -> str:
        """What is left when no more tokens come."""
        if self.finished:
            return ""
        text = self._release(self._held + self._decoder.finish())
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held = ""
            self.finish_reason = "stop"
            return text[: min(found)]
        keep = 0 if self.finish_reason == "end" else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
