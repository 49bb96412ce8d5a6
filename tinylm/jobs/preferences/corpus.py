"""Preferences: a prompt with a chosen and a rejected answer, read from JSON or Parquet, and encoded.

A preference is two conversations, one after the other, of which only the answers are scored.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from tinylm.config.validation import describe_value
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.chat.corpus import ChatCorpus
from tinylm.text.batches import Batch
from tinylm.text.chat import Conversation, parse_conversation, parse_message
from tinylm.text.readers import REFUSED, refuse_keys
from tinylm.text.scored_tokens import ScoredTokens
from tinylm.text.token_files import Tokens

ANSWERS = ("chosen", "rejected")
CHAT_KEYS = ("messages", "conversations", "completion", "instruction", "output")  # of conversations, without answers


@dataclass(frozen=True)
class PreferenceBatch(Batch):
    """A batch of preferences: in each row, texts 1 and 2 are the chosen and the rejected one, and so on."""

    @property
    def n_targets(self) -> int:
        """Number of preferences."""
        assert self.segments is not None
        return int(self.segments.amax(dim=1).sum()) // 2


class PreferenceTokens(ScoredTokens):
    """The preferences in an array of codes, of which conversations 2 i and 2 i + 1 are those of preference i.

    Raises TinyLMError for an odd number of conversations.
    """

    batch_type = PreferenceBatch

    def __init__(self, tokens: Tokens) -> None:
        super().__init__(tokens)
        if len(self) % 2:
            raise TinyLMError(f"The encoded text is damaged: its {len(self)} conversations are not pairs.")

    @functools.cached_property
    def _first_difference(self) -> np.ndarray:
        """The index of the first token in which the two texts of each preference differ, (P,).

        It is the shorter length if one begins with the other, and the largest int64 if they are equal.
        """
        found = np.full(len(self) // 2, np.iinfo(np.int64).max)
        for index in range(len(found)):
            chosen, rejected = (self.tokens(2 * index + side)[0] for side in range(2))
            shorter = min(len(chosen), len(rejected))
            differing = np.flatnonzero(chosen[:shorter] != rejected[:shorter])
            if len(differing):
                found[index] = differing[0]
            elif len(chosen) != len(rejected):
                found[index] = shorter
        return found

    def examples(self, context: int) -> np.ndarray:
        """The conversations of each preference that can be trained on, (M, 2): both have a target in the context, and
        they differ there.
        """
        usable = self.has_target(context).reshape(-1, 2).all(axis=1) & (self._first_difference <= context)
        return 2 * np.flatnonzero(usable)[:, np.newaxis] + np.arange(2)

    def require_examples(self, context: int, name: str) -> None:
        if not len(self.examples(context)):
            raise UsageError(
                f"No {name} preference has two different answers that begin within the context of {context} tokens."
            )

    def describe_left_out(self, context: int, name: str) -> list[str]:
        sentences = []
        total, lengths = len(self) // 2, self.lengths.reshape(-1, 2).max(axis=1)
        equal = self._first_difference > lengths.max(initial=0)
        if equal.any():
            sentences.append(
                f"{int(equal.sum()):,} of {total:,} {name} preferences are left out: both answers are equal."
            )
        unscored = (self.first_scored == self.lengths).reshape(-1, 2).any(axis=1) & ~equal
        if unscored.any():
            sentences.append(
                f"{int(unscored.sum()):,} of {total:,} {name} preferences are left out: nothing in an answer is scored."
            )
        if cut := int((lengths - 1 > context).sum()):
            lost = total - int(equal.sum()) - int(unscored.sum()) - len(self.examples(context))
            sentences.append(
                f"{cut:,} of {total:,} {name} preferences are cut to the context of {context} tokens (the longest has "
                f"{lengths.max() - 1}); {lost:,} of them lose an answer, or what differs, and are left out."
            )
        return sentences


@dataclass(frozen=True)
class PreferenceCorpus(ChatCorpus):
    """A corpus of preferences. Each file is JSONL, a JSON array or Parquet."""

    kind: ClassVar[str] = "preferences"
    documents_per_record: ClassVar[int] = 2
    min_split: ClassVar[float] = 2  # the loss goes to zero in any case, and so would the answers
    keys: ClassVar[tuple[str, ...]] = ("prompt", *ANSWERS, "system", "tools", *REFUSED)

    @classmethod
    def has_keys_of(cls, keys: set[str]) -> bool:
        # A long first object may have further keys than those that were read
        return keys.issuperset(ANSWERS) or (not keys.isdisjoint(ANSWERS) and keys.isdisjoint(CHAT_KEYS))

    @classmethod
    def parse(cls, record: Any, location: str) -> tuple[Conversation, ...]:
        return parse_preference(record, location)


def parse_preference(record: Any, location: str) -> tuple[Conversation, Conversation]:
    """The conversations with the chosen and with the rejected answer of a JSON object.

    The prompt is a text or a list of messages, and so is each answer. An answer that is a list may begin with the
    messages of the prompt; without a `prompt`, it is the messages that both lists begin with.

    Raises UsageError, with the location, for anything else, for answers to different questions, and as
    `parse_conversation`.
    """
    if not isinstance(record, dict):
        raise UsageError(f"{location}: expected an object with 'chosen', but found {describe_value(record)}.")
    record = {key: value for key, value in record.items() if value is not None}
    refuse_keys(record, REFUSED, location)
    for key in ANSWERS:
        if key not in record:
            raise UsageError(f"{location}: there is no {key!r}; a preference has a 'prompt', 'chosen' and 'rejected'.")
    chosen, rejected = (_messages(record[key], "assistant", f"{location}, {key!r}") for key in ANSWERS)
    if "prompt" in record:
        prompt = _messages(record["prompt"], "user", f"{location}, 'prompt'")
    elif isinstance(record["chosen"], str) or isinstance(record["rejected"], str):
        raise UsageError(f"{location}: there is no 'prompt', to which 'chosen' and 'rejected' are answers.")
    else:
        equal = [one == other for one, other in zip(chosen[:-1], rejected[:-1], strict=False)]
        prompt = chosen[: (*equal, False).index(False)]
    if not any(message["role"] == "user" for message in prompt):
        raise UsageError(f"{location}: the prompt has no message of the user; both answers need the same question.")
    sides = (
        _conversation(record, prompt, chosen, f"{location}, 'chosen'"),
        _conversation(record, prompt, rejected, f"{location}, 'rejected'"),
    )
    for one, other in zip(*(side.messages for side in sides), strict=False):
        if one != other:  # what follows may differ too: it answers the answers
            if not one["role"] == other["role"] == "assistant":
                raise UsageError(
                    f"{location}: 'chosen' and 'rejected' answer different messages, "
                    f"{describe_value(one['content'])} and {describe_value(other['content'])}; give both the same "
                    "prompt."
                )
            break
    return sides


def _messages(value: Any, role: str, location: str) -> list[dict[str, Any]]:
    entries = [{"role": role, "content": value}] if isinstance(value, str) else value
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{location} is {describe_value(value)}; it must be a text or a list of messages.")
    return [parse_message(entry, f"{location}, message {number}") for number, entry in enumerate(entries, start=1)]


def _conversation(record: dict[str, Any], prompt: list[Any], answer: list[Any], location: str) -> Conversation:
    """The prompt, whose answers are not scored, with an answer, which may repeat it."""
    repeats = answer[: len(prompt)] == prompt
    if not repeats and answer[0]["role"] in ("system", "user"):
        raise UsageError(f"{location}: its messages do not begin with those of the prompt; repeat all, or none.")
    answer = answer[len(prompt) :] if repeats else answer
    unscored = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in prompt]
    others = {name: record[name] for name in ("system", "tools") if name in record}
    conversation = parse_conversation({"messages": [*unscored, *answer], **others}, location)
    if not answer or conversation.messages[-1]["role"] != "assistant":
        raise UsageError(f"{location}: there is no answer of the assistant at the end, after the prompt.")
    if prompt[-1]["role"] == "assistant" and answer[0]["role"] == "assistant":
        raise UsageError(
            f"{location}: the prompt ends with an answer of the assistant, and another one follows; write the "
            "beginning of an answer into 'chosen' and into 'rejected'."
        )
    return replace(
        conversation, is_preference=True, unused=tuple(name for name in record if name not in PreferenceCorpus.keys)
    )
