"""JSON that is valid by a schema: llguidance says which tokens may come next."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import llguidance
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.json_grammar import json_grammar
from tinylm.generation.json_validation import JSONSchema, parse_exact_json
from tinylm.generation.prompts import EncodedPrompt
from tinylm.text.tokenizer import Tokenizer


class JSONSampler:
    """As `sampler`, of whose tokens each continues a JSON text that the schema admits; an end token follows the text.

    No object of the text has two equal names, which the grammar cannot say.

    prompts: one per row. Raises UsageError as `json_grammar`, and for a tokenizer that llguidance cannot read.
    """

    def __init__(
        self,
        sampler: Callable[[Tensor], list[int]],
        schema: Mapping[str, Any],
        tokenizer: Tokenizer,
        prompts: Sequence[EncodedPrompt],
    ) -> None:
        self._sampler = sampler
        self._schema = JSONSchema(schema)
        self._size = tokenizer.vocab_size
        self._stop_ids = tokenizer.stop_ids
        self._end_ids = [sorted(tokenizer.stop_ids | prompt.end_ids) for prompt in prompts]
        vocabulary, grammar = _vocabulary(tokenizer), json_grammar(self._schema)
        self._bytes = [vocabulary.decode_bytes([token]) for token in range(self._size)]
        self._has_quote = np.array([b'"' in content for content in self._bytes])
        self._texts: list[_Text | None] = [  # `None` after the end
            _Text(llguidance.LLMatcher(vocabulary, grammar, log_level=0)) for _ in prompts
        ]

    def __call__(self, logits: Tensor) -> list[int]:
        """Logits (B, V) -> a token id per row.

        Raises UsageError if the vocabulary has no token that can follow, and TinyLMError if the names of a pattern are
        used up, or a finished text is not valid, for which there is no known reason.
        """
        logits = logits[:, : self._size].float().cpu().clone()
        for row, text in enumerate(self._texts):
            if text is not None:
                logits[row].masked_fill_(torch.from_numpy(~self._allowed(row, text)), -torch.inf)
        tokens = self._sampler(logits)
        for row, (text, token) in enumerate(zip(self._texts, tokens, strict=True)):
            if text is None or token in self._end_ids[row]:
                if text is not None:
                    self._check(text.content)
                self._texts[row], tokens[row] = None, self._end_ids[row][0]
            else:
                text.matcher.consume_token(token)
                text.content += self._bytes[token]
                text.names.read(self._bytes[token])
        return tokens

    def _allowed(self, row: int, text: "_Text") -> NDArray[np.bool_]:
        """Whether each token can come next in a row, (V,)."""
        bits = np.frombuffer(text.matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=self._size, bitorder="little").astype(bool)
        if allowed[list(self._stop_ids)].any():
            allowed[self._end_ids[row]] = True
        if text.matcher.is_error() or not allowed.any():
            raise UsageError("The model's vocabulary has no token with which the JSON of `json_schema` can go on.")
        if text.names.any():
            for token in np.flatnonzero(allowed & self._has_quote):
                allowed[token] = text.names.copy().read(self._bytes[token])
            if not allowed.any():
                raise TinyLMError(
                    "An object of the JSON would repeat a name, since the pattern in `json_schema` has no other that "
                    "begins so: give the object a `maxProperties`, or list its names in `properties`."
                )
        return allowed

    def _check(self, content: bytes) -> None:
        self._schema.steps = 0
        try:
            is_valid = self._schema.is_valid(parse_exact_json(content.decode()), self._schema.root)
        except (ValueError, RecursionError) as error:
            raise TinyLMError(f"The generated text is not JSON: {error}.") from error
        if not is_valid:
            raise TinyLMError("The generated JSON is not valid by `json_schema`.")


class _Text:
    """The JSON text of a row so far."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matcher = matcher
        self.content = b""
        self.names = _Names([])


class _Names:
    """The names in each open object of a JSON text; lists have `None`."""

    def __init__(self, open_: list[set[str] | None]) -> None:
        self._open = open_
        self._string: bytes | None = None  # the content of a string that has not ended
        self._is_name = self._is_escaped = False

    def any(self) -> bool:
        """Whether an open object has a name."""
        return any(self._open)

    def copy(self) -> Self:
        copy = type(self)([None if names is None else names.copy() for names in self._open])
        copy._string, copy._is_name, copy._is_escaped = self._string, self._is_name, self._is_escaped
        return copy

    def read(self, content: bytes) -> bool:
        """Go on with the text. False if a name occurs twice in an object."""
        for byte in (content[i : i + 1] for i in range(len(content))):
            if self._string is not None:
                if self._is_escaped or byte != b'"':
                    self._string += byte if self._is_name else b""
                    self._is_escaped = byte == b"\\" and not self._is_escaped
                    continue
                names, string, self._string = self._open[-1] if self._open else None, self._string, None
                if self._is_name and names is not None:
                    name = json.loads(b'"' + string + b'"')
                    if name in names:
                        return False
                    names.add(name)
            elif byte == b'"':
                self._string = b""
            elif byte in b"{[":
                self._open.append(set() if byte == b"{" else None)
                self._is_name = byte == b"{"
            elif byte in b"}]":
                self._open.pop()
            elif byte in b",:":
                self._is_name = byte == b"," and self._open[-1] is not None
        return True


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
