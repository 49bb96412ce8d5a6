"""A corpus of conversations, each rendered by a chat template into a document."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from tinylm.text.answer_spans import ChatFormat, ScoredText
from tinylm.text.chat import KEYS, Conversation, read_conversations
from tinylm.text.chat_template import is_named
from tinylm.text.compression import Progress, no_progress
from tinylm.text.corpus import Corpus, CorpusStats, Stream, scan_stream
from tinylm.text.readers import is_parquet, parquet_columns
from tinylm.text.tokenizer import LITERAL

MAX_NOTED_KEYS = 100


@dataclass(frozen=True)
class ChatCorpus(Corpus):
    """A corpus of conversations. Each file is JSONL, a JSON array or Parquet. `chat` renders them.

    In the stream, a document is the text of a conversation without its special tokens.
    """

    chat: ChatFormat | None = None
    # Set by `scan`, per conversation: whether it has a special token's text.
    _with_literal_tokens: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    _unused: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)

    kind: ClassVar[str] = "chat"
    detects_json: ClassVar[bool] = True

    @property
    def train_on(self) -> str:
        """The part of the text that is scored: see ChatFormat."""
        assert self.chat is not None
        return self.chat.train_on

    def conversations(self, progress: Progress = no_progress) -> Iterator[Conversation]:
        """Yield the conversations of all files. `progress` receives the number of bytes read from the disk.

        Conversations with a message that `drop_unknown` leaves empty are skipped. Raises UsageError as
        `read_conversations` does.
        """
        for file in self.files:
            for conversation in read_conversations(file, self.encoding, progress):
                self._note_keys(conversation)
                kept = conversation if self.drop_unknown is None else conversation.map_contents(self.drop_unknown)
                if kept is not None:
                    yield kept

    def _note_keys(self, conversation: Conversation) -> None:
        assert self.chat is not None
        for key in conversation.unused:
            if len(self._unused) < MAX_NOTED_KEYS:
                self._unused[key] = None
        for key in sorted(set().union(*conversation.messages) - {"role", "content", "weight"} - self._unused.keys()):
            if len(self._unused) < MAX_NOTED_KEYS and not is_named(key, self.chat.template.source):
                self._unused[key] = None

    @property
    def unused_keys(self) -> list[str]:
        """The keys and columns without effect: in no layout of conversations, and not named by the template."""
        columns = [name for file in self.files if is_parquet(file) for name in parquet_columns(file)]
        return list(dict.fromkeys([*self._unused, *(name for name in columns if name not in KEYS)]))

    def examples(self, progress: Progress = no_progress) -> Iterator[ScoredText]:
        """Yield the text of each conversation with its scored spans.

        Raises UsageError as `conversations` and `ChatFormat.render` do.
        """
        assert self.chat is not None
        return self.chat.render_each(self.conversations(progress))

    def selected_examples(self, selected: Iterable[bool]) -> Iterator[ScoredText]:
        """Yield the examples of the conversations for which `selected` has True; as `examples`."""
        assert self.chat is not None
        return self.chat.render_each(itertools.compress(self.conversations(), selected))

    def _drop_unknown(self, parts: Iterable[str]) -> Iterable[str]:
        return parts if self.drop_unknown is None else map(self.drop_unknown, parts)

    def _documents(self, progress: Progress) -> Iterator[tuple[str, Iterable[str]]]:
        assert self.chat is not None
        for example in self.examples(progress):
            yield "", self.chat.ordinary_text(example.text)

    def scan(self, progress: Progress = no_progress) -> CorpusStats:
        """As `Corpus.scan`. The fingerprint is a hash of the texts with special tokens and of the scored spans."""
        assert self.chat is not None
        chat, digest = self.chat, hashlib.sha256()
        self._with_literal_tokens.clear()

        def stream() -> Stream:
            for example in self.examples(progress):
                if self._with_literal_tokens:
                    yield None
                spans = [(span.start, span.stop) for span in example.spans]
                digest.update(json.dumps([example.text, spans]).encode())
                self._with_literal_tokens.append(LITERAL in example.text)
                yield from filter(None, self._drop_unknown(chat.ordinary_text(example.text)))

        stats = scan_stream(stream())
        return replace(stats, documents=len(self._with_literal_tokens), fingerprint=digest.hexdigest())

    @property
    def n_with_literal_tokens(self) -> int:
        """The number of conversations, in the last scan, that contain the text of a special token as ordinary text."""
        return sum(self._with_literal_tokens)
