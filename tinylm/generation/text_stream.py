"""Incremental decoding of generated tokens to text, with stop sequences."""

from collections.abc import Sequence

from tinylm.text.decoding import stream_decoder
from tinylm.text.tokenizer import Tokenizer


class TextStream:
    """Decodes the tokens of one sample. Text that may start a stop sequence is buffered until the match fails.

    finish_reason: `stop` after a stop sequence, `end` after an end token or an end text, otherwise `length`.
    tokens: number of tokens so far, without an end token.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        end_ids: frozenset[int] = frozenset(),
        end_texts: Sequence[str] = (),
        context: Sequence[int] = (),
    ) -> None:
        """end_ids: tokens that end the text, besides those of the tokenizer. end_texts: stop sequences that the model
        writes for lack of an end token. context: the ids before the sample.
        """
        self._decoder = stream_decoder(tokenizer, context)
        self._stop_ids = tokenizer.stop_ids | end_ids
        self._stops = {stop: "stop" for stop in stops if stop} | dict.fromkeys(end_texts, "end")  # with their reasons
        self._buffer = ""
        self.tokens = 0
        self.finish_reason = "length"

    @property
    def finished(self) -> bool:
        """Whether a stop sequence, an end token or an end text has ended the text."""
        return self.finish_reason != "length"

    def push(self, token: int | None) -> str:
        """Decode a token; `None` is an end token. Returns the new text that is final; the rest is buffered."""
        if token is None or token in self._stop_ids:
            self.finish_reason = "end"
            return self._release(self._buffer + self._decoder.finish())
        self.tokens += 1
        return self._release(self._buffer + self._decoder.decode([token]))

    def finish(self) -> str:
        """End the text after the last token. Returns the remaining text, including the buffered text."""
        if self.finished:
            return ""
        text = self._release(self._buffer + self._decoder.finish())
        rest, self._buffer = self._buffer, ""
        return text + rest

    def _release(self, text: str) -> str:
        """The part of `text` (buffered and new) that is final, cut at a stop sequence. The rest is buffered."""
        found = [(index, reason) for stop, reason in self._stops.items() if (index := text.find(stop)) >= 0]
        if found:
            self._buffer = ""
            index, self.finish_reason = min(found)
            return text[:index]
        keep = 0 if self.finish_reason == "end" else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._buffer = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest proper prefix of `stop` that is a suffix of `text`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
