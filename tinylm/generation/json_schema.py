"""JSON that is valid by a schema: llguidance makes a grammar of the schema and says which tokens may come next."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from tinylm.errors import UsageError
from tinylm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
MAX_SIZE = 1_000_000  # characters of a schema
# Of these, llguidance's time has no limit of its own (1.9.1): it grows with the square of the number of patterns, by
# 2.3 with each one that meets others in a string, and with the common multiple.
MAX_PATTERNS = 100
MAX_JOINED_PATTERNS = 12
MAX_MULTIPLE = 100_000
JOINING = {"$ref", "anyOf", "oneOf"}
APPLIED = JOINING | {"pattern", "properties", "patternProperties", "additionalProperties", "items", "prefixItems"}


class JSONSampler:
    """A sampler of tokens, each of which continues a JSON text that the schema admits; an end token follows the text.

    sampler: chooses among the tokens that can follow; logits (B, V) -> a token id per row
    end_ids: per row, ids that may end the text, beside the tokenizer's

    Raises the errors of `json_grammar`, and UsageError for a tokenizer that llguidance cannot read.
    """

    def __init__(
        self,
        sampler: "Callable[[Tensor], list[int]]",
        schema: Mapping[str, Any],
        tokenizer: Tokenizer,
        end_ids: Sequence[Iterable[int]],
    ) -> None:
        self._sampler = sampler
        self._size = tokenizer.vocab_size
        self._stop_ids = sorted(tokenizer.stop_ids)
        self._end_ids = [sorted(tokenizer.stop_ids.union(ids)) for ids in end_ids]
        vocabulary, grammar = _vocabulary(tokenizer), json_grammar(schema)
        self._texts: list[llguidance.LLMatcher | None] = [  # `None` after the end
            llguidance.LLMatcher(vocabulary, grammar, log_level=0) for _ in end_ids
        ]

    def __call__(self, logits: "Tensor") -> list[int]:
        """Logits (B, V) -> a token id per row. Raises UsageError if no token can follow, or a mask is too complex."""
        import torch  # not for `json_grammar`, with which a server that runs llama.cpp checks schemas

        logits = logits[:, : self._size].float().cpu().clone()
        for row, text in enumerate(self._texts):
            if text is None:
                continue
            bits = np.frombuffer(text.compute_bitmask(), np.uint8)
            allowed = np.unpackbits(bits, count=self._size, bitorder="little").astype(bool)
            # "panic": the tokenizer cannot encode a text of the schema
            is_stuck = not allowed.any() or text.get_error().startswith(("NoExtension", "panic"))
            _check(is_stuck or not text.is_error(), "it is too complex")
            if is_stuck:
                raise UsageError("The model's vocabulary has no token with which the JSON of `json_schema` can go on.")
            if allowed[self._stop_ids].any():
                allowed[self._end_ids[row]] = True
            logits[row].masked_fill_(torch.from_numpy(~allowed), -torch.inf)
        tokens = self._sampler(logits)
        for row, (text, token) in enumerate(zip(self._texts, tokens, strict=True)):
            if text is None or token in self._end_ids[row]:
                self._texts[row], tokens[row] = None, self._end_ids[row][0]
            else:
                text.consume_token(token)
        return tokens


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of a schema, for llguidance.

    Raises UsageError, with llguidance's reason, for a schema that is invalid, that nothing is valid by, or that is not
    supported; and for one that is too large, or has integers that are not exact in float64.
    """
    patterns: set[str] = set()
    multiples: list[int] = []
    limits = {MAX_PATTERNS}

    def count(found: dict[str, Any]) -> dict[str, Any]:
        named = found.get("patternProperties")
        texts = [found.get("pattern"), *(named if isinstance(named, dict) else ())]
        patterns.update(text for text in texts if isinstance(text, str))
        if "allOf" in found or (found.keys() & JOINING and len(found.keys() & APPLIED) > 1):
            limits.add(MAX_JOINED_PATTERNS)
        if type(step := found.get("multipleOf")) in (int, float):
            multiples.append(int("".join(map(str, Decimal(str(step)).as_tuple().digits))))
        return found

    # What llguidance does not limit
    try:
        text = json.dumps({**schema, "x-guidance": SPACING}, allow_nan=False)
        _check(len(text) <= MAX_SIZE, f"it has more than {MAX_SIZE:,} characters")
        json.loads(text, parse_int=_exact, object_hook=count)
    except RecursionError:
        raise _refusal("it is nested too deeply") from None
    except (TypeError, ValueError) as error:
        raise _refusal(str(error)) from error
    _check(len(patterns) <= min(limits), f"it has more than {min(limits)} patterns")
    _check(math.lcm(*multiples) <= MAX_MULTIPLE, f"the common multiple of `multipleOf` is above {MAX_MULTIPLE:,}")

    # What it does not support
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(text)
        is_wrong, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, limits=llguidance.LLParserLimits(verbose_errors=False)
        )
    except ValueError as error:
        is_wrong, messages = True, [str(error)]
    if is_wrong:
        reason = messages[0].rpartition("error: ")[2].partition(" Enable ")[0]  # an option that is not offered
        raise _refusal(" ".join(reason.split())[:200].rstrip("."))
    return grammar


def _exact(text: str) -> int:
    if abs(float(text)) >= 2**53:
        raise ValueError(f"{text[:40]} is not below 2**53, up to which integers are exact in float64")
    return int(text)


def _check(is_right: bool, reason: str) -> None:
    if not is_right:
        raise _refusal(reason)


def _refusal(reason: str) -> UsageError:
    return UsageError(f"`json_schema` cannot be used: {reason}.")


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
