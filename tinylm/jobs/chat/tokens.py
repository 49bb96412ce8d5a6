"""Encoded conversations: which can be trained on, and their texts with what is scored."""

import itertools

import numpy as np

from tinylm.errors import UsageError
from tinylm.jobs.job import MarkedText
from tinylm.text.scored_tokens import ScoredTokens
from tinylm.text.tokenizer import Tokenizer


class ChatTokens(ScoredTokens):
    """The conversations in an array of codes."""

    def require_examples(self, context: int, name: str) -> None:
        """Raise UsageError if there is no example in the context. name: such as "training"."""
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
        """Sentences about conversations that are cut or have no scored token. name: such as "training"."""
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


def marked_examples(tokens: ScoredTokens, tokenizer: Tokenizer, number: int) -> tuple[MarkedText, ...]:
    """The texts of the first `number` conversations, special tokens included, in parts that are scored or not.

    Raises TinyLMError if the `tokenizers` library fails.
    """
    examples = []
    for index in range(min(number, len(tokens))):
        ids, scored = tokens.tokens(index)
        scored[:1] = False  # the first token is never a target
        edges = [0, *(np.flatnonzero(np.diff(scored)) + 1), len(ids)]
        parts = (
            (tokenizer.decode(ids[a:b], skip_special_tokens=False), bool(scored[a]))
            for a, b in itertools.pairwise(edges)
        )
        examples.append(tuple(parts))
    return tuple(examples)
