"""Validate an untrusted tokenizer.json before the `tokenizers` library reads it.

The library panics, loops or allocates without bound on malformed files (decision 021). Only the models, normalizers,
pre-tokenizers, post-processors and decoders listed here are accepted, with every field checked. The library receives a
new file that contains only the checked values, without unknown or duplicate keys.
"""

import math
import re
import reprlib
from collections.abc import Callable, Iterable
from typing import Any

from tinylm.system.files import parse_unicode_json

MAX_IDS = 1 << 19  # published models have up to 262,400 tokens, which load in 5 s
MAX_MERGES = 1 << 20  # Gemma 3 has 514,906
MAX_TOKEN = 4096  # characters
MAX_ADDED_TOKENS = 1 << 16
MAX_ADDED_CHARACTERS = 1 << 20  # sum over all added tokens, from which the library builds one automaton
MAX_UNIGRAM_BYTES = 1 << 20  # sum over all tokens; each byte can become a trie node of 330 bytes
MAX_STEPS = 8  # of a normalizer, pre-tokenizer, post-processor or decoder; also the levels of nested sequences
MAX_GROWTH = 16  # factor by which replacements may lengthen a text
MAX_SHORT_STRING = 64  # characters of a prefix, suffix or replacement
MAX_WORD = 1000  # characters; WordPiece takes quadratic time in the length of a word

TokenizerSpec = dict[str, Any]  # the content of a tokenizer.json
Check = Callable[[Any], bool]
Fields = dict[str, Check]  # the check of the value of each field of a step

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring = 3, 100


def validate_tokenizer(text: str) -> TokenizerSpec:
    """Return the validated content of a tokenizer.json, which is safe to pass to `tokenizers.Tokenizer.from_str`.

    Truncation, padding and BPE dropout, which makes encoding random, are turned off. Raises ValueError with a reason
    that completes the sentence "Cannot use FILE as a tokenizer: ".
    """
    spec = parse_unicode_json(text)
    if not isinstance(spec, dict) or spec.get("version", "1.0") != "1.0":
        raise ValueError("it is not a tokenizer.json of version 1.0")
    model = _validate_model(spec.get("model"))
    added_tokens = _validate_added_tokens(spec.get("added_tokens") or [])
    # The library fails on unknown text if `unk_token` is no token. An empty one, as in GPT-2's file, stands for none.
    unknown = model.get("unk_token")
    if unknown and unknown not in model["vocab"] and unknown not in {token["content"] for token in added_tokens}:
        raise ValueError(f"its unk_token {short_repr(unknown)} is not in its vocabulary")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": _validate_steps("normalizer", spec.get("normalizer"), NORMALIZERS, "normalizers"),
        "pre_tokenizer": _validate_steps("pre-tokenizer", spec.get("pre_tokenizer"), PRE_TOKENIZERS, "pretokenizers"),
        "post_processor": _validate_steps("post-processor", spec.get("post_processor"), POST_PROCESSORS, "processors"),
        "decoder": _validate_steps("decoder", spec.get("decoder"), DECODERS, "decoders"),
        "model": model,
    }


def token_ids(spec: TokenizerSpec) -> dict[str, int]:
    """The id of each token in a validated tokenizer.json, added tokens included."""
    model = spec["model"]
    is_list = model["type"] == "Unigram"  # the id of a token is its position in the list
    vocabulary: dict[str, int] = (
        {token: i for i, (token, _) in enumerate(model["vocab"])} if is_list else model["vocab"]
    )
    return vocabulary | {token["content"]: token["id"] for token in spec["added_tokens"]}


def short_repr(value: Any) -> str:
    """`repr(value)` for an error message: bounded in length and depth, without control characters."""
    return _REPR.repr(value)


# Checks of one field.


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_flag_or_null(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_string(minimum: int, maximum: int) -> Check:
    return lambda value: isinstance(value, str) and minimum <= len(value) <= maximum


def _is_count(minimum: int, maximum: int) -> Check:
    return lambda value: type(value) is int and minimum <= value <= maximum


def _is_one_of(*choices: str) -> Check:
    return lambda value: isinstance(value, str) and value in choices


def _is_list(is_item: Check, minimum: int, maximum: int) -> Check:
    return lambda value: isinstance(value, list) and minimum <= len(value) <= maximum and all(map(is_item, value))


def _is_object(**fields: Check) -> Check:
    return lambda value: (
        isinstance(value, dict)
        and value.keys() == fields.keys()
        and all(is_valid(value[name]) for name, is_valid in fields.items())
    )


_is_short_string, _is_character, _is_token = _is_string(0, MAX_SHORT_STRING), _is_string(1, 1), _is_string(1, MAX_TOKEN)
_is_id = _is_count(0, MAX_IDS - 1)


def _is_pattern(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) != 1:
        return False
    ((kind, pattern),) = value.items()
    if not isinstance(pattern, str) or not 1 <= len(pattern) <= MAX_PATTERN:
        return False
    return kind == "String" or (kind == "Regex" and is_linear(pattern))


def _is_processor_token(value: Any) -> bool:
    """A pair of a token and its id, as in BERT's and RoBERTa's post-processors."""
    return isinstance(value, list) and len(value) == 2 and _is_token(value[0]) and _is_id(value[1])


def _is_template_item(value: Any) -> bool:
    is_type = _is_count(0, 255)
    return _is_object(SpecialToken=_is_object(id=_is_token, type_id=is_type))(value) or _is_object(
        Sequence=_is_object(id=_is_one_of("A", "B"), type_id=is_type)
    )(value)


def _is_template_tokens(value: Any) -> bool:
    is_token = _is_object(id=_is_token, ids=_is_list(_is_id, 1, 64), tokens=_is_list(_is_token, 1, 64))
    return (
        isinstance(value, dict)
        and len(value) <= 64
        and all(is_token(token) and len(token["ids"]) == len(token["tokens"]) for token in value.values())
    )


_BEHAVIOR = _is_one_of("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
_REPLACE: Fields = {"pattern": _is_pattern, "content": _is_short_string}
_BYTE_LEVEL: Fields = dict.fromkeys(("add_prefix_space", "trim_offsets", "use_regex"), _is_flag)
_BERT: Fields = dict.fromkeys(("sep", "cls"), _is_processor_token)
_METASPACE: Fields = {
    "replacement": _is_character,
    "add_prefix_space": _is_flag_or_null,  # in older files
    "prepend_scheme": _is_one_of("first", "never", "always"),
    "split": _is_flag_or_null,
}

# The accepted steps and their fields. Excluded on purpose: Precompiled, a binary table that the library does not check,
# and CTC, a decoder for speech.
NORMALIZERS: dict[str, Fields] = {
    **{name: {} for name in ("ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents")},
    "BertNormalizer": {
        **dict.fromkeys(("clean_text", "handle_chinese_chars", "lowercase"), _is_flag),
        "strip_accents": _is_flag_or_null,
    },
    "Prepend": {"prepend": _is_short_string},
    "Replace": _REPLACE,
    "Strip": {"strip_left": _is_flag, "strip_right": _is_flag},
}
PRE_TOKENIZERS: dict[str, Fields] = {
    **{name: {} for name in ("BertPreTokenizer", "UnicodeScripts", "Whitespace", "WhitespaceSplit")},
    "ByteLevel": _BYTE_LEVEL,
    "CharDelimiterSplit": {"delimiter": _is_character},
    "Digits": {"individual_digits": _is_flag},
    "FixedLength": {"length": _is_count(1, MAX_TOKEN)},
    "Metaspace": _METASPACE,
    "Punctuation": {"behavior": _BEHAVIOR},
    "Split": {"pattern": _is_pattern, "behavior": _BEHAVIOR, "invert": _is_flag},
}
POST_PROCESSORS: dict[str, Fields] = {
    "BertProcessing": _BERT,
    "ByteLevel": _BYTE_LEVEL,
    "RobertaProcessing": {**_BERT, "trim_offsets": _is_flag, "add_prefix_space": _is_flag},
    "TemplateProcessing": {
        **dict.fromkeys(("single", "pair"), _is_list(_is_template_item, 0, 64)),
        "special_tokens": _is_template_tokens,
    },
}
DECODERS: dict[str, Fields] = {
    **{name: {} for name in ("ByteFallback", "Fuse")},
    "BPEDecoder": {"suffix": _is_short_string},
    "ByteLevel": _BYTE_LEVEL,
    "Metaspace": _METASPACE,
    "Replace": _REPLACE,
    # The library reads out of bounds for a token shorter than `stop`.
    "Strip": {"content": _is_character, "start": _is_count(0, MAX_SHORT_STRING), "stop": _is_count(0, 0)},
    "WordPiece": {"prefix": _is_short_string, "cleanup": _is_flag},
}
REPEATABLE = ("Replace", "Split")  # no tokenizer needs another step twice; each ByteLevel doubles the length of a text


# Normalizer, pre-tokenizer, post-processor and decoder: each is one step or a sequence of steps.


def _validate_steps(component: str, value: Any, accepted: dict[str, Fields], key: str) -> dict[str, Any] | None:
    """Validate one of the four components. Nested sequences, with their steps under `key`, become one sequence.

    Raises ValueError for an unsupported step.
    """
    if value is None:
        return None
    steps = [_validate_step(component, step, accepted) for step in _flatten_sequences(component, value, key, MAX_STEPS)]
    names = [step["type"] for step in steps]
    for name in names:
        if name not in REPEATABLE and names.count(name) > 1:
            raise ValueError(f"its {component} has the step {name} more than once")
    _check_growth(component, steps)
    return {"type": "Sequence", key: steps} if value["type"] == "Sequence" else steps[0]


def _flatten_sequences(component: str, value: Any, key: str, depth: int) -> list[Any]:
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ValueError(f"its {component} has a step without a type")
    if value["type"] != "Sequence":
        return [value]
    if not isinstance(value.get(key), list) or not depth:
        raise ValueError(f"its {component} is not a list of steps, or is nested too deeply")
    steps: list[Any] = []
    for step in value[key]:
        steps += _flatten_sequences(component, step, key, depth - 1)
        if len(steps) > MAX_STEPS:
            raise ValueError(f"its {component} has more than {MAX_STEPS} steps")
    return steps


def _validate_step(component: str, step: dict[str, Any], accepted: dict[str, Fields]) -> dict[str, Any]:
    name = step["type"]
    if name not in accepted:
        raise ValueError(f"its {component} has a step of type {short_repr(name)}, which is not supported")
    fields = accepted[name]
    for field in step.keys() & fields.keys():
        if not fields[field](step[field]):
            raise ValueError(f"its {component} {name} has an unsupported {field}: {short_repr(step[field])}")
    # The library panics on templates with tokens that are not defined, and with a second text in `single`.
    for template in ("single", "pair") if name == "TemplateProcessing" else ():
        for item in step.get(template, ()):
            if "SpecialToken" in item and item["SpecialToken"]["id"] not in step.get("special_tokens", {}):
                raise ValueError(
                    f"the template {template!r} of its post-processor uses a token that it does not define"
                )
            if template == "single" and item.get("Sequence", {}).get("id") == "B":
                raise ValueError("the template 'single' of its post-processor has a second text")
    return {"type": name, **{field: step[field] for field in fields if field in step}}


def _check_growth(component: str, steps: Iterable[dict[str, Any]]) -> None:
    """Raise ValueError if all Replace steps together can make a text more than MAX_GROWTH times as long.

    A regular expression may also match the empty string between two characters, which adds `content` to each character.
    """
    growth = math.prod(
        max(1, len(step["content"]) + ("Regex" in step["pattern"]))
        for step in steps
        if "pattern" in step and "content" in step
    )
    if growth > MAX_GROWTH:
        raise ValueError(f"its {component} can make a text {growth} times as long; at most {MAX_GROWTH} is supported")


# Added tokens, vocabularies and merges.


def _validate_added_tokens(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MAX_ADDED_TOKENS:
        raise ValueError(f"its added_tokens must be a list of at most {MAX_ADDED_TOKENS:,}")
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    tokens = []
    for token in value:
        if not isinstance(token, dict) or not _is_token(token.get("content")):
            raise ValueError(f"one of its added_tokens does not have a content of 1 to {MAX_TOKEN:,} characters")
        if not _is_id(token.get("id")):
            raise ValueError(_bad_id_message(token["content"], token.get("id")))
        if not all(_is_flag(token.get(flag, False)) for flag in flags):
            raise ValueError(f"its added token {short_repr(token['content'])} has a flag that is not true or false")
        token_flags = {flag: token.get(flag, False) for flag in flags}
        tokens.append({"id": token["id"], "content": token["content"], **token_flags})
    if sum(len(token["content"]) for token in tokens) > MAX_ADDED_CHARACTERS:
        raise ValueError(f"its added_tokens have more than {MAX_ADDED_CHARACTERS:,} characters")
    return tokens


def _validate_model(value: Any) -> dict[str, Any]:
    kind = None
    if isinstance(value, dict) and "type" in value:
        kind = value["type"]
    elif isinstance(value, dict):  # older files lack the type
        kind = "WordPiece" if "max_input_chars_per_word" in value else "WordLevel"
        kind = "Unigram" if isinstance(value.get("vocab"), list) else kind
        kind = "BPE" if "merges" in value else kind
    if not isinstance(kind, str) or kind not in _MODELS:
        raise ValueError(f"its model has the type {short_repr(kind)}; it must be one of: {', '.join(_MODELS)}")
    return {"type": kind, **_MODELS[kind](value)}


def _validate_bpe(model: dict[str, Any]) -> dict[str, Any]:
    vocabulary = _validate_vocabulary(model.get("vocab"))
    prefix = _optional_string(model, "continuing_subword_prefix")
    return {
        "dropout": None,
        "unk_token": _optional_string(model, "unk_token", MAX_TOKEN),
        "continuing_subword_prefix": prefix,
        "end_of_word_suffix": _optional_string(model, "end_of_word_suffix"),
        **{name: _optional_flag(model, name) for name in ("fuse_unk", "byte_fallback", "ignore_merges")},
        "vocab": vocabulary,
        "merges": _validate_merges(model.get("merges"), vocabulary, prefix or ""),
    }


def _validate_merges(value: Any, vocabulary: dict[str, int], prefix: str) -> list[list[str]]:
    """Validate the merges of a BPE model; both notations, "a b" and ["a", "b"], become lists.

    The library panics unless both parts are tokens, the second part begins with `prefix`, and the first part followed
    by the second one without `prefix` is a token.
    """
    if not isinstance(value, list):
        raise ValueError("its merges must be a list")
    if len(value) > MAX_MERGES:
        raise ValueError(f"it has {len(value):,} merges; at most {MAX_MERGES:,} are supported")
    if value and isinstance(value[0], str) and value[0].startswith("#version"):
        value = value[1:]
    merges = []
    for merge in value:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
            raise ValueError(f"its merges contain {short_repr(merge)}, which is not a pair of tokens")
        first, second = parts
        if first not in vocabulary or second not in vocabulary:
            raise ValueError(f"its merges join {short_repr(first)} and {short_repr(second)}, which are not both tokens")
        if not second.startswith(prefix):
            raise ValueError(f"its merges join {short_repr(second)}, which does not begin with {short_repr(prefix)}")
        if first + second[len(prefix) :] not in vocabulary:
            raise ValueError(f"its merges produce {short_repr(first + second[len(prefix) :])}, which is not a token")
        merges.append(parts)
    return merges


def _validate_word_piece(model: dict[str, Any]) -> dict[str, Any]:
    longest = model.get("max_input_chars_per_word", 100)
    if not _is_count(1, MAX_WORD)(longest):
        raise ValueError(f"its max_input_chars_per_word is {short_repr(longest)}; it must be from 1 to {MAX_WORD}")
    return {
        **_validate_word_level(model, "[UNK]"),
        "continuing_subword_prefix": _optional_string(model, "continuing_subword_prefix") or "",
        "max_input_chars_per_word": longest,
    }


def _validate_word_level(model: dict[str, Any], default: str = "<unk>") -> dict[str, Any]:
    unknown = _optional_string(model, "unk_token", MAX_TOKEN)
    return {"vocab": _validate_vocabulary(model.get("vocab")), "unk_token": default if unknown is None else unknown}


def _validate_unigram(model: dict[str, Any]) -> dict[str, Any]:
    value = model.get("vocab")
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_IDS:
        raise ValueError(f"its vocabulary must be a list of 1 to {MAX_IDS:,} tokens with their scores")
    for entry in value:
        is_pair = isinstance(entry, list) and len(entry) == 2 and _is_token(entry[0])
        # An integer may be too large to become a float.
        if not is_pair or type(entry[1]) not in (int, float) or not -1e6 < entry[1] < 1e6:
            raise ValueError(f"its vocabulary contains {short_repr(entry)}, which is not a token with its score")
    if len({token for token, _ in value}) < len(value):
        raise ValueError("its vocabulary contains a token twice")
    if sum(len(token.encode()) for token, _ in value) > MAX_UNIGRAM_BYTES:
        raise ValueError(f"the tokens of its Unigram model have more than {MAX_UNIGRAM_BYTES:,} bytes")
    unknown = model.get("unk_id")
    if unknown is not None and not _is_count(0, len(value) - 1)(unknown):
        raise ValueError(f"its unk_id is {short_repr(unknown)}, which is not the id of a token")
    return {"unk_id": unknown, "vocab": value, "byte_fallback": _optional_flag(model, "byte_fallback")}


_MODELS = {
    "BPE": _validate_bpe,
    "WordPiece": _validate_word_piece,
    "WordLevel": _validate_word_level,
    "Unigram": _validate_unigram,
}


def _validate_vocabulary(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > MAX_IDS:
        raise ValueError(f"its vocabulary must be an object of at most {MAX_IDS:,} tokens and their ids")
    for token, i in value.items():
        if not _is_id(i):
            raise ValueError(_bad_id_message(token, i))
        if len(token) > MAX_TOKEN:
            raise ValueError(f"its vocabulary has a token of {len(token):,} characters; the limit is {MAX_TOKEN:,}")
    if len(set(value.values())) < len(value):
        raise ValueError("two of its tokens have the same id")
    return value


def _optional_string(model: dict[str, Any], name: str, limit: int = MAX_SHORT_STRING) -> str | None:
    value = model.get(name)
    if value is not None and not (isinstance(value, str) and len(value) <= limit):
        raise ValueError(f"its {name} is {short_repr(value)}; it must be a string of at most {limit:,} characters")
    return value


def _optional_flag(model: dict[str, Any], name: str) -> bool:
    value = model.get(name)
    if not _is_flag_or_null(value):
        raise ValueError(f"its {name} is {short_repr(value)}; it must be true or false")
    return bool(value)


def _bad_id_message(token: str, value: Any) -> str:
    return f"the id of its token {short_repr(token)} is {short_repr(value)}; ids are integers from 0 to {MAX_IDS - 1:,}"


# Regular expressions: the library's engine, Oniguruma, backtracks, so that a pattern such as `(a+)+$` takes exponential
# time, and `a*b` quadratic time.

MAX_PATTERN = 1000  # characters
MAX_ALTERNATIVES = 32

_ATOM = (
    r"(?:[^\\\[\](){}|?*+^$]"  # a literal character, or the dot
    r"|\\[dDsSwWhHrntfv]|\\[-.+*?()\[\]{}|^$/\\]|\\[pP]\{\^?[A-Za-z_]{1,40}\}"
    r"|\[\^?(?:[^\\\[\]]|\\[^\n])+\])"  # a class without a nested class
)
_BOUNDED = r"(?:\?\+?|\{\d\}|\{\d,\d\}\+?)"
_FIXED = rf"(?:{_ATOM}(?![?*+{{]))*"
_UNBOUNDED = r"(?:[*+]\+?|\{\d,\})"
# One alternative. Everything after its first unbounded repetition may match the empty string, so from there on matching
# cannot fail and backtrack. Before it, at most one bounded repetition multiplies the work.
_LINEAR = rf"(?=[^|]){_FIXED}(?:{_ATOM}{_BOUNDED}{_FIXED})?(?:{_ATOM}{_UNBOUNDED}(?:{_ATOM}[*?]\+?)*)?"

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Patterns from published tokenizers that are not of the form _LINEAR. Those with several alternatives take linear time
# as a whole: text on which one alternative fails is matched by the next.
_PUBLISHED = (
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
    # DeepSeek-V3's first alternative, whose class contains both brackets
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
)
_PART = "|".join([*sorted(map(re.escape, _PUBLISHED), key=len, reverse=True), _LINEAR])
_PATTERN = re.compile(rf"(?:{_PART})(?:\|(?:{_PART})){{0,{MAX_ALTERNATIVES - 1}}}")


def is_linear(pattern: str) -> bool:
    """Whether a pattern is non-empty and known to match in time linear in the length of the text.

    True for the patterns of published tokenizers, for alternatives without groups in which only the end repeats without
    bound, and for alternatives of both kinds. Any other pattern counts as not linear.
    """
    if not pattern or len(pattern) > MAX_PATTERN or "&&" in pattern:  # && intersects character classes
        return False
    return _PATTERN.fullmatch(pattern.replace("\r", r"\r").replace("\n", r"\n")) is not None
