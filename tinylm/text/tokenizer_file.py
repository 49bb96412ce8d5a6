"""Validation of a foreign tokenizer.json before the `tokenizers` library reads it.

The library panics, loops or allocates without bound on malformed files (decision 021). Only the kinds of model,
normalizer, pre-tokenizer, post-processor and decoder listed here pass, with every field checked. What passes is written
anew from the checked values, so that the library reads exactly what was checked: no unknown or duplicate keys.
"""

import contextlib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tinylm.errors import TinyLMError
from tinylm.files import parse_json

MAX_IDS = 1 << 19  # decoders have up to 262,400 tokens; more would load for longer than a user waits
MAX_MERGES = 1 << 20  # Gemma 3 has 514,906
MAX_TOKEN = 4096  # characters
MAX_ADDED_TOKENS = 1 << 16
MAX_ADDED_CHARACTERS = 1 << 20  # of all added tokens together: they become one automaton
MAX_UNIGRAM_BYTES = 1 << 20  # of all tokens together: each byte can become a trie node of 330 bytes
MAX_STEPS = 8  # of a normalizer, pre-tokenizer, post-processor or decoder
MAX_GROWTH = 16  # by how much replacements may lengthen a text
MAX_AFFIX = 64  # characters of a prefix, suffix or replacement
MAX_WORD = 1000  # characters; WordPiece takes quadratic time in the length of a word
MAX_PATTERN = 1000  # characters
MAX_ALTERNATIVES = 32  # of a pattern

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring = 3, 100

Layout = dict[str, Any]
Check = Callable[[Any], bool]
Fields = dict[str, Check]


class LibraryError(Exception):
    """The tokenizers library or gigatoken failed, by an exception or a panic."""


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Raises LibraryError for whatever a library written in Rust raises.

    A panic arrives as pyo3_runtime.PanicException, which is not an Exception and cannot be imported.
    """
    try:
        yield
    except (MemoryError, TinyLMError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise  # an interruption of the program
        raise LibraryError(_shown(str(error))) from error


def validate(text: str) -> Layout:
    """The JSON of the same tokenizer, safe for `tokenizers.Tokenizer.from_str`.

    Truncation and padding are left out, and so is a BPE's dropout, which would make encoding random. Raises ValueError
    with a reason that completes "... is not a tokenizer that can be used: ".
    """
    layout = parse_json(text)
    if not isinstance(layout, dict) or layout.get("version", "1.0") != "1.0":
        raise ValueError("it is not a tokenizer.json of version 1.0")
    model = _model(layout.get("model"))
    added_tokens = _added_tokens(layout.get("added_tokens") or [])
    _check_unknown_token(model, {token["content"] for token in added_tokens})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": _steps("normalizer", layout.get("normalizer"), NORMALIZERS, "normalizers"),
        "pre_tokenizer": _steps("pre-tokenizer", layout.get("pre_tokenizer"), PRE_TOKENIZERS, "pretokenizers"),
        "post_processor": _steps("post-processor", layout.get("post_processor"), POST_PROCESSORS, "processors"),
        "decoder": _steps("decoder", layout.get("decoder"), DECODERS, "decoders"),
        "model": model,
    }


def expected_ids(layout: Layout) -> dict[str, int]:
    """The id of each token that a validated file states, added tokens included."""
    model = layout["model"]
    is_list = model["type"] == "Unigram"
    vocabulary: dict[str, int] = (
        {token: i for i, (token, _) in enumerate(model["vocab"])} if is_list else model["vocab"]
    )
    return vocabulary | {token["content"]: token["id"] for token in layout["added_tokens"]}


# Fields.


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_flag_or_null(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_affix(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_AFFIX


def _is_character(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 1


def _is_token(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_TOKEN


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_IDS


def _is_count(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def _is_one_of(*choices: str) -> Check:
    return lambda value: isinstance(value, str) and value in choices


def _is_list(is_item: Check, least: int, most: int) -> Check:
    return lambda value: isinstance(value, list) and least <= len(value) <= most and all(map(is_item, value))


def _is_object(**fields: Check) -> Check:
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == fields.keys()
        and all(is_valid(value[name]) for name, is_valid in fields.items())
    )


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((kind, pattern),) = value.items()
    if not isinstance(pattern, str) or not 1 <= len(pattern) <= MAX_PATTERN:
        return False
    return kind == "String" or (kind == "Regex" and is_linear(pattern))


def _is_processor_token(value: Any) -> bool:
    """A token and its id, as BERT's and RoBERTa's post-processors have them."""
    return isinstance(value, list) and len(value) == 2 and _is_token(value[0]) and _is_id(value[1])


def _is_template_piece(value: Any) -> bool:
    is_type = _is_count(0, 255)
    return _is_object(SpecialToken=_is_object(id=_is_token, type_id=is_type))(value) or _is_object(
        Sequence=_is_object(id=_is_one_of("A", "B"), type_id=is_type)
    )(value)


def _is_template_token(value: Any) -> bool:
    is_valid = _is_object(id=_is_token, ids=_is_list(_is_id, 1, 64), tokens=_is_list(_is_token, 1, 64))
    return is_valid(value) and len(value["ids"]) == len(value["tokens"])


def _is_template_tokens(value: Any) -> bool:
    return isinstance(value, dict) and len(value) <= 64 and all(map(_is_template_token, value.values()))


_BEHAVIOR = _is_one_of("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_REPLACE: Fields = {"pattern": _is_pattern, "content": _is_affix}
_BYTE_LEVEL: Fields = {"add_prefix_space": _is_flag, "trim_offsets": _is_flag, "use_regex": _is_flag}
_METASPACE: Fields = {
    "replacement": _is_character,
    "add_prefix_space": _is_flag_or_null,  # of older files
    "prepend_scheme": _is_one_of("first", "never", "always"),
    "split": _is_flag_or_null,
}

# Missing on purpose: Precompiled, a binary table that the library trusts, and CTC, which is for speech.
NORMALIZERS: dict[str, Fields] = {
    "BertNormalizer": {
        "clean_text": _is_flag,
        "handle_chinese_chars": _is_flag,
        "strip_accents": _is_flag_or_null,
        "lowercase": _is_flag,
    },
    "ByteLevel": {},
    "Lowercase": {},
    "NFC": {},
    "NFD": {},
    "NFKC": {},
    "NFKD": {},
    "Nmt": {},
    "Prepend": {"prepend": _is_affix},
    "Replace": _REPLACE,
    "Strip": {"strip_left": _is_flag, "strip_right": _is_flag},
    "StripAccents": {},
}
PRE_TOKENIZERS: dict[str, Fields] = {
    "BertPreTokenizer": {},
    "ByteLevel": _BYTE_LEVEL,
    "CharDelimiterSplit": {"delimiter": _is_character},
    "Digits": {"individual_digits": _is_flag},
    "FixedLength": {"length": _is_count(1, MAX_TOKEN)},
    "Metaspace": _METASPACE,
    "Punctuation": {"behavior": _BEHAVIOR},
    "Split": {"pattern": _is_pattern, "behavior": _BEHAVIOR, "invert": _is_flag},
    "UnicodeScripts": {},
    "Whitespace": {},
    "WhitespaceSplit": {},
}
POST_PROCESSORS: dict[str, Fields] = {
    "BertProcessing": {"sep": _is_processor_token, "cls": _is_processor_token},
    "ByteLevel": _BYTE_LEVEL,
    "RobertaProcessing": {
        "sep": _is_processor_token,
        "cls": _is_processor_token,
        "trim_offsets": _is_flag,
        "add_prefix_space": _is_flag,
    },
    "TemplateProcessing": {
        "single": _is_list(_is_template_piece, 0, 64),
        "pair": _is_list(_is_template_piece, 0, 64),
        "special_tokens": _is_template_tokens,
    },
}
DECODERS: dict[str, Fields] = {
    "BPEDecoder": {"suffix": _is_affix},
    "ByteFallback": {},
    "ByteLevel": _BYTE_LEVEL,
    "Fuse": {},
    "Metaspace": _METASPACE,
    "Replace": _REPLACE,
    # The library reads before the beginning of a token that is shorter than `stop`.
    "Strip": {"content": _is_character, "start": _is_count(0, MAX_AFFIX), "stop": _is_count(0, 0)},
    "WordPiece": {"prefix": _is_affix, "cleanup": _is_flag},
}
REPEATABLE = ("Replace", "Split")  # any other step is needed once; ByteLevel doubles a text each time


def _steps(role: str, value: Any, kinds: dict[str, Fields], key: str) -> dict[str, Any] | None:
    """A normalizer, pre-tokenizer, post-processor or decoder; sequences within sequences become one sequence."""
    if value is None:
        return None
    steps = [_step(role, step, kinds) for step in _flattened(role, value, key, MAX_STEPS)]
    names = [step["type"] for step in steps]
    for name in names:
        if name not in REPEATABLE and names.count(name) > 1:
            raise ValueError(f"its {role} has the step {name} more than once")
    _check_growth(role, steps)
    return {"type": "Sequence", key: steps} if value["type"] == "Sequence" else steps[0]


def _flattened(role: str, value: Any, key: str, depth: int) -> list[Any]:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ValueError(f"its {role} has a step without a type")
    if value["type"] != "Sequence":
        return [value]
    if not isinstance(value.get(key), list) or not depth:
        raise ValueError(f"its {role} is not a list of steps")
    steps: list[Any] = []
    for step in value[key]:
        steps += _flattened(role, step, key, depth - 1)
        if len(steps) > MAX_STEPS:
            raise ValueError(f"its {role} has more than {MAX_STEPS} steps")
    return steps


def _step(role: str, step: dict[str, Any], kinds: dict[str, Fields]) -> dict[str, Any]:
    name = step["type"]
    if name not in kinds:
        raise ValueError(f"its {role} has a step of the kind {_shown(name)}, which is not supported")
    fields = kinds[name]
    for field in step.keys() & fields.keys():
        if not fields[field](step[field]):
            raise ValueError(f"its {role} {name} has {_shown(step[field])} for {field}, which is not supported")
    if name == "TemplateProcessing":
        _check_template(step)
    return {"type": name, **{field: step[field] for field in fields if field in step}}


def _check_template(step: dict[str, Any]) -> None:
    """The library panics at a template that names a token it does not define, or a second text where there is one."""
    defined = step.get("special_tokens", {})
    for name in ("single", "pair"):
        for piece in step.get(name, ()):
            if "SpecialToken" in piece and piece["SpecialToken"]["id"] not in defined:
                raise ValueError(f"its post-processor's template {name} has a token that it does not define")
            if name == "single" and piece.get("Sequence", {}).get("id") == "B":
                raise ValueError("its post-processor's template single has a second text")


def _check_growth(role: str, steps: Iterable[dict[str, Any]]) -> None:
    """Replacements one after the other multiply the length of a text. An expression may match between characters."""
    growth = math.prod(
        max(1, len(step["content"]) + ("Regex" in step["pattern"]))
        for step in steps
        if "pattern" in step and "content" in step
    )
    if growth > MAX_GROWTH:
        raise ValueError(f"its {role} can make a text {growth} times as long")


# Patterns.

_ATOM = (
    r"(?:[^\\\[\](){}|?*+^$]"  # a character itself, or any with a dot
    r"|\\[dDsSwWhHrntfv]|\\[-.+*?()\[\]{}|^$/\\]|\\[pP]\{\^?[A-Za-z_]{1,40}\}"
    r"|\[\^?(?:[^\\\[\]]|\\[^\n])+\])"  # a class without a class in it
)
_COUNT = r"(?:\?\+?|\{\d\}|\{\d,\d\}\+?)"
_FIXED = rf"(?:{_ATOM}(?![?*+{{]))*"
_UNBOUNDED = r"(?:[*+]\+?|\{\d,\})"
# What follows the first unbounded repetition can be empty, so a match that has begun cannot fail and be tried again;
# before it, at most one choice multiplies the work.
_LINEAR = rf"(?=[^|]){_FIXED}(?:{_ATOM}{_COUNT}{_FIXED})?(?:{_ATOM}{_UNBOUNDED}(?:{_ATOM}[*?]\+?)*)?"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Parts of published patterns that take linear time only as a whole, since what fails here is matched by what follows.
_KNOWN = (
    _CONTRACTIONS,
    "'(?i:[sdmt]|ll|ve|re)",
    "(?:'s|'t|'re|'ve|'m|'ll|'d)",
    "'(?:[sdmt]|ll|ve|re)",
    *(  # o200k, and Tekken without contractions
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}"
        for end in ("", _CONTRACTIONS + "?")
    ),
    r"\s+(?!\S)|\s+",
    r"\s+(?!\S)|\s",
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"\s*[\r\n]|\s+(?!\S)|\s+",
    r"\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    # DeepSeek-V3's first alternative: a class with both brackets in it.
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
)
_PART = "|".join([*sorted(map(re.escape, _KNOWN), key=len, reverse=True), _LINEAR])
_PATTERN = re.compile(rf"(?:{_PART})(?:\|(?:{_PART})){{0,{MAX_ALTERNATIVES - 1}}}")


def is_linear(pattern: str) -> bool:
    """Whether a regular expression certainly takes time proportional to the text, and is not empty.

    True for the patterns of the known tokenizers, and for alternatives of which only the end may repeat without bound.
    """
    if not pattern or len(pattern) > MAX_PATTERN or "&&" in pattern:  # && is an intersection within a class
        return False
    return _PATTERN.fullmatch(pattern.replace("\r", r"\r").replace("\n", r"\n")) is not None


# Tokens.


def _added_tokens(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_ADDED_TOKENS:
        raise ValueError(f"its added_tokens are not a list of at most {MAX_ADDED_TOKENS:,}")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = []
    for token in value:
        if not isinstance(token, dict) or not _is_token(token.get("content")):
            raise ValueError(f"one of its added_tokens has no content of 1 to {MAX_TOKEN:,} characters")
        if not _is_id(token.get("id")):
            raise ValueError(_bad_id(token["content"], token.get("id")))
        if not all(_is_flag(token.get(flag, False)) for flag in flags):
            raise ValueError(f"its added token {_shown(token['content'])} has a flag that is not true or false")
        known = {flag: token.get(flag, False) for flag in flags}
        tokens.append({"id": token["id"], "content": token["content"], **known})
    if sum(len(token["content"]) for token in tokens) > MAX_ADDED_CHARACTERS:
        raise ValueError(f"its added_tokens have more than {MAX_ADDED_CHARACTERS:,} characters")
    return tokens


def _model(value: Any) -> dict[str, Any]:
    kind = value.get("type", _untyped_kind(value)) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in _MODELS:
        raise ValueError(f"its model is of the kind {_shown(kind)}; supported are {', '.join(_MODELS)}")
    return {"type": kind, **_MODELS[kind](value)}


def _untyped_kind(model: dict[str, Any]) -> str:
    """Of files older than the field `type`."""
    if "merges" in model:
        return "BPE"
    if isinstance(model.get("vocab"), list):
        return "Unigram"
    return "WordPiece" if "max_input_chars_per_word" in model else "WordLevel"


def _bpe(model: dict[str, Any]) -> dict[str, Any]:
    vocabulary = _vocabulary(model.get("vocab"))
    prefix = _affix(model, "continuing_subword_prefix")
    return {
        "dropout": None,
        "unk_token": _affix(model, "unk_token", MAX_TOKEN),
        "continuing_subword_prefix": prefix,
        "end_of_word_suffix": _affix(model, "end_of_word_suffix"),
        **{name: _flag(model, name) for name in ("fuse_unk", "byte_fallback", "ignore_merges")},
        "vocab": vocabulary,
        "merges": _merges(model.get("merges"), vocabulary, prefix or ""),
    }


def _merges(value: Any, vocabulary: dict[str, int], prefix: str) -> list[list[str]]:
    """The library panics unless both parts and their union are tokens, and each second part begins with the prefix."""
    if not isinstance(value, list):
        raise ValueError("its merges are not a list")
    if len(value) > MAX_MERGES:
        raise ValueError(f"it has {len(value):,} merges, and {MAX_MERGES:,} are supported")
    if value and isinstance(value[0], str) and value[0].startswith("#version"):
        value = value[1:]
    merges = []
    for merge in value:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
            raise ValueError(f"its merges have {_shown(merge)}, which is not two tokens")
        first, second = parts
        if first not in vocabulary or second not in vocabulary or not second.startswith(prefix):
            raise ValueError(f"its merges have {_shown(first)} and {_shown(second)}, which are not both tokens")
        if first + second[len(prefix) :] not in vocabulary:
            raise ValueError(f"its merges make {_shown(first + second[len(prefix) :])}, which is not a token")
        merges.append(parts)
    return merges


def _word_level(model: dict[str, Any]) -> dict[str, Any]:
    unknown = _affix(model, "unk_token", MAX_TOKEN)
    return {"vocab": _vocabulary(model.get("vocab")), "unk_token": "<unk>" if unknown is None else unknown}


def _word_piece(model: dict[str, Any]) -> dict[str, Any]:
    longest = model.get("max_input_chars_per_word", 100)
    if not _is_count(1, MAX_WORD)(longest):
        raise ValueError(f"its max_input_chars_per_word is {_shown(longest)}; it must be from 1 to {MAX_WORD}")
    unknown = _affix(model, "unk_token", MAX_TOKEN)
    return {
        "unk_token": "[UNK]" if unknown is None else unknown,
        "continuing_subword_prefix": _affix(model, "continuing_subword_prefix") or "",
        "max_input_chars_per_word": longest,
        "vocab": _vocabulary(model.get("vocab")),
    }


def _unigram(model: dict[str, Any]) -> dict[str, Any]:
    value = model.get("vocab")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_IDS:
        raise ValueError(f"its vocabulary is not a list of 1 to {MAX_IDS:,} tokens with their scores")
    for entry in value:
        if not isinstance(entry, list) or len(entry) != 2 or not _is_token(entry[0]) or not _is_score(entry[1]):
            raise ValueError(f"its vocabulary has {_shown(entry)}, which is not a token with its score")
    if len({token for token, _ in value}) < len(value):
        raise ValueError("its vocabulary has a token twice")
    if sum(len(token.encode()) for token, _ in value) > MAX_UNIGRAM_BYTES:
        raise ValueError(f"the tokens of its Unigram model have more than {MAX_UNIGRAM_BYTES:,} bytes")
    unknown = model.get("unk_id")
    if unknown is not None and not _is_count(0, len(value) - 1)(unknown):
        raise ValueError(f"its unk_id is {_shown(unknown)}, which is not a token")
    return {"unk_id": unknown, "vocab": value, "byte_fallback": _flag(model, "byte_fallback")}


def _is_score(value: Any) -> bool:
    return type(value) in (int, float) and -1e6 < value < 1e6  # an integer may be too large to become a float


_MODELS = {"BPE": _bpe, "WordPiece": _word_piece, "WordLevel": _word_level, "Unigram": _unigram}


def _vocabulary(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_IDS:
        raise ValueError(f"its vocabulary is not an object of at most {MAX_IDS:,} tokens and their ids")
    for token, i in value.items():
        if not _is_id(i):
            raise ValueError(_bad_id(token, i))
        if len(token) > MAX_TOKEN:
            raise ValueError(f"its vocabulary has a token of {len(token):,} characters")
    if len(set(value.values())) < len(value):
        raise ValueError("it gives one id to two tokens")
    return value


def _check_unknown_token(model: dict[str, Any], added: set[str]) -> None:
    """Without the token, text with an unknown part could not be encoded. GPT-2's file has an empty one, for none."""
    unknown = model.get("unk_token")
    if unknown and unknown not in model["vocab"] and unknown not in added:
        raise ValueError(f"its unk_token {_shown(unknown)} is not in its vocabulary")


def _affix(model: dict[str, Any], name: str, most: int = MAX_AFFIX) -> str | None:
    value = model.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= most):
        raise ValueError(f"its {name} is {_shown(value)}, which is not a text of at most {most:,} characters")
    return value


def _flag(model: dict[str, Any], name: str) -> bool:
    value = model.get(name)
    if not _is_flag_or_null(value):
        raise ValueError(f"its {name} is {_shown(value)}, which is not true or false")
    return bool(value)


def _bad_id(token: str, value: Any) -> str:
    return f"the id of its token {_shown(token)} is {_shown(value)}; ids are integers from 0 to {MAX_IDS - 1:,}"


def _shown(value: Any) -> str:
    """For an error message: short whatever the value is, and without control characters."""
    return _REPR.repr(value)
