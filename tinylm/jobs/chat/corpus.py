"""A corpus of conversations, each rendered by a chat template into a document, and its encoding."""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from tinylm.errors import UsageError
from tinylm.text.chat import KEYS, Conversation, parse_conversation
from tinylm.text.chat_format import ChatFormat, ScoredText
from tinylm.text.corpus import CorpusStats, RecordCorpus, Stream, scan_stream
from tinylm.text.files import Progress, no_progress
from tinylm.text.parallel_encoding import Encoding, record_batches
from tinylm.text.readers import is_parquet, parquet_columns, records
from tinylm.text.scored_tokens import CODES_PER_ID, FIRST, SCORED, ScoredTokens
from tinylm.text.tokenizer import LITERAL, Tokenizer

MAX_NOTED_KEYS = 100
EXAMINED_CONVERSATIONS = 256  # in which characters of the chat template are looked for


@dataclass(frozen=True)
class ChatCorpus(RecordCorpus):
    """A corpus of conversations. Each file is JSONL, a JSON array or Parquet. `chat` renders them.

    In the stream, a document is the text of a conversation without its special tokens.
    """

    chat: ChatFormat = field(kw_only=True)
    # Set by `scan`, per conversation: whether it has a special token's text.
    _with_literal_tokens: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    _unused: dict[str, None] = field(default_factory=dict, init=False, repr=False, compare=False)

    kind: ClassVar[str] = "chat"
    keys: ClassVar[tuple[str, ...]] = KEYS

    @classmethod
    def has_keys_of(cls, keys: set[str]) -> bool:
        """Whether JSON objects with the keys of conversations are records of this kind."""
        return True

    @property
    def rendering(self) -> ChatFormat:
        return self.chat

    def written_by_template(self, alphabet: str, unknown: str) -> str:
        """The characters of `unknown` that the first conversations have outside of the contents of messages."""
        known = next((character for character in alphabet if character not in unknown and not character.isspace()), "")
        table = str.maketrans(dict.fromkeys(unknown, known))
        replaced = replace(self, drop_unknown=lambda text: text.translate(table))
        examples = itertools.islice(replaced.examples(), EXAMINED_CONVERSATIONS)
        written = {character for example in examples for character in "".join(self.chat.ordinary_text(example.text))}
        return "".join(character for character in unknown if character in written)

    def conversations(self, progress: Progress = no_progress) -> Iterator[Conversation]:
        """Yield the conversations of all files. `progress` receives the number of bytes read from the disk.

        Records with a message that `drop_unknown` leaves empty are skipped. Raises UsageError as `parse` and `records`
        do.
        """
        source = self.chat.template.source
        for file in self.files:
            for location, record in records(file, self.encoding, self.keys, progress):
                kept: list[Conversation] = []
                for conversation in self.parse(record, location):
                    noted = {"role", "content", "weight", *conversation.unused, *self._unused}
                    others = sorted(set().union(*conversation.messages) - noted)
                    unnamed = [key for key in others if not re.search(rf"\b{re.escape(key)}\b", source)]
                    for key in (*conversation.unused, *unnamed):
                        if len(self._unused) < MAX_NOTED_KEYS:
                            self._unused[key] = None
                    known = conversation if self.drop_unknown is None else conversation.map_contents(self.drop_unknown)
                    kept += [] if known is None else [known]
                if len(kept) == self.documents_per_record:
                    yield from kept
                else:
                    self._leave_out(location)

    @classmethod
    def parse(cls, record: Any, location: str) -> tuple[Conversation, ...]:
        """The `documents_per_record` conversations of a JSON value. Errors as for `parse_conversation`."""
        return (parse_conversation(record, location),)

    @property
    def unused_keys(self) -> list[str]:
        """The keys and columns without effect: in no layout of conversations, and not named by the template."""
        columns = [name for file in self.files if is_parquet(file) for name in parquet_columns(file)]
        return list(dict.fromkeys([*self._unused, *(name for name in columns if name not in self.keys)]))

    def examples(self, progress: Progress = no_progress) -> Iterator[ScoredText]:
        """Yield the text of each conversation with its scored spans.

        Raises UsageError as `conversations` and `ChatFormat.render` do.
        """
        return self.chat.render_each(self.conversations(progress))

    def selected_examples(self, selected: Iterable[bool]) -> Iterator[ScoredText]:
        # Other conversations are not rendered
        return self.chat.render_each(itertools.compress(self.conversations(), selected))

    def _documents(self, progress: Progress) -> Iterator[Iterable[str]]:
        for example in self.examples(progress):
            yield self.chat.ordinary_text(example.text)

    def _scan(self, progress: Progress) -> CorpusStats:
        """The fingerprint is a hash of the texts with special tokens and of the scored spans."""
        chat, digest = self.chat, hashlib.sha256()
        self._with_literal_tokens.clear()

        def stream() -> Stream:
            for example in self.examples(progress):
                if self._with_literal_tokens:
                    yield None
                spans = [(span.start, span.stop) for span in example.spans]
                digest.update(json.dumps([example.text, spans]).encode())
                self._with_literal_tokens.append(LITERAL in example.text)
                parts = chat.ordinary_text(example.text)
                yield from parts if self.drop_unknown is None else filter(None, map(self.drop_unknown, parts))

        stats = scan_stream(stream())
        return replace(stats, documents=len(self._with_literal_tokens), fingerprint=digest.hexdigest())

    @property
    def n_with_literal_tokens(self) -> int:
        """The number of conversations, in the last scan, that contain the text of a special token as ordinary text."""
        return sum(self._with_literal_tokens)


def encode_example(example: ScoredText, tokenizer: Tokenizer) -> np.ndarray:
    """The codes of a rendered conversation: (N,) of uint32. A token is scored if it starts inside a span.

    Raises UsageError for characters without an id, and TinyLMError if the `tokenizers` library fails.
    """
    ids, starts = tokenizer.encode_with_special(example.text)
    codes = CODES_PER_ID * ids.astype(np.uint32)
    for span in example.spans:
        first, last = np.searchsorted(starts, [span.start, span.stop])
        codes[first:last] |= SCORED
    codes[:1] |= FIRST
    return codes


def _encode_batch(examples: list[ScoredText], tokenizer: Tokenizer) -> np.ndarray:
    return np.concatenate([encode_example(example, tokenizer) for example in examples])


CHAT_ENCODING = Encoding(record_batches, _encode_batch, CODES_PER_ID, has_special=True)


class ChatTokens(ScoredTokens):
    """The conversations in an array of codes."""

    def require_examples(self, context: int, name: str) -> None:
        if self.has_target(context).any():
            return
        if (self.first_scored == self.lengths).all():
            raise UsageError(f"Nothing is scored in the {name} conversations: none has an answer of the assistant.")
        least = int(self.first_scored[self.first_scored < self.lengths].min())
        raise UsageError(
            f"No {name} conversation has a scored token within the context of {context} tokens; the first scored "
            f"token comes after {least} others."
        )

    def describe_left_out(self, context: int, name: str) -> list[str]:
        sentences = []
        unscored = int((self.first_scored == self.lengths).sum())
        if unscored:
            sentences.append(
                f"{unscored:,} of {len(self):,} {name} conversations are left out: nothing in them is scored."
            )
        if cut := int((self.lengths - 1 > context).sum()):
            lost = len(self) - unscored - int(self.has_target(context).sum())
            sentences.append(
                f"{cut:,} of {len(self):,} {name} conversations are cut to the context of {context} tokens (the "
                f"longest has {self.lengths.max() - 1}); {lost:,} of them lose all answers and are left out."
            )
        return sentences
