"""JSON that a schema admits: llguidance says which tokens may come next."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from tinylm.errors import UsageError
from tinylm.generation.generation_config import json_grammar
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.sampler import Logits, Sampler, as_array
from tinylm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


class JSONSampler:
    """As `sampler`, of whose tokens each continues a JSON text that the schema admits; an end token follows the text.

    prompts: one per row. Raises UsageError as `json_grammar`, and for a tokenizer that llguidance cannot read.
    """

    def __init__(
        self, sampler: Sampler, schema: Mapping[str, Any], tokenizer: Tokenizer, prompts: Sequence[EncodedPrompt]
    ) -> None:
        self._sampler = sampler
        self._size = tokenizer.vocab_size
        self._stop_ids = tokenizer.stop_ids
        self._end_ids = [sorted(tokenizer.stop_ids | prompt.end_ids) for prompt in prompts]
        vocabulary, grammar = _vocabulary(tokenizer), json_grammar(schema)
        self._texts: list[llguidance.LLMatcher | None] = [  # `None` after the end
            llguidance.LLMatcher(vocabulary, grammar, log_level=0) for _ in prompts
        ]

    def __call__(self, logits: "Logits | Tensor") -> list[int]:
        """Logits (B, V) -> a token id per row. Raises UsageError if the vocabulary has no token that can follow."""
        logits = as_array(logits)[:, : self._size].copy()
        for row, text in enumerate(self._texts):
            if text is not None:
                logits[row, ~self._allowed(row, text)] = -np.inf
        tokens = self._sampler(logits)
        for row, (text, token) in enumerate(zip(self._texts, tokens, strict=True)):
            if text is None or token in self._end_ids[row]:
                self._texts[row], tokens[row] = None, self._end_ids[row][0]
            else:
                text.consume_token(token)
        return tokens

    def _allowed(self, row: int, text: llguidance.LLMatcher) -> NDArray[np.bool_]:
        """Whether each token can come next in a row, (V,)."""
        bits = np.frombuffer(text.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._size, bitorder="little").astype(bool)
        if allowed[list(self._stop_ids)].any():
            allowed[self._end_ids[row]] = True
        if text.is_error() or not allowed.any():
            raise UsageError("The model's vocabulary has no token with which the JSON of `json_schema` can go on.")
        return allowed


class _GrammarVocabulary:
    """The bytes of each token, in the form that llguidance reads."""

    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokenizer: Tokenizer, token_bytes: Mapping[int, bytes]) -> None:
        self.eos_token_id = tokenizer.end_of_text_id
        self.tokens = [token_bytes[i] for i in range(tokenizer.vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text if isinstance(text, str) else text.decode())]


def _vocabulary(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    token_bytes = tokenizer.token_bytes
    try:
        if token_bytes is not None:
            wrapper = llguidance.TokenizerWrapper(_GrammarVocabulary(tokenizer, token_bytes))
            return llguidance.LLTokenizer(wrapper, eos_token=sorted(tokenizer.stop_ids))
        return llguidance.LLTokenizer(tokenizer.to_str(), eos_token=sorted(tokenizer.stop_ids))
    except ValueError as error:
        raise UsageError(f"`json_schema` is not possible with this model's tokenizer: {error}.") from error
