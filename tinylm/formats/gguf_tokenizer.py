"""Converts the tokenizer metadata of a GGUF file to a tokenizer.json with special tokens, and back.

A GGUF file has the vocabulary and the merges or scores, but only the name of the pre-tokenizer (`tokenizer.ggml.pre`);
its regular expressions are in llama.cpp's src/llama-vocab.cpp. Functions that read raise ValueError with a reason that
completes the sentence "Cannot read PATH as GGUF: ".
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tinylm.config.run import SpecialTokens
from tinylm.formats.foreign_config import refused
from tinylm.formats.gguf_file import Metadata
from tinylm.text.tokenizer_file import MAX_MERGES, TokenizerSpec, short_repr, token_ids, validate_tokenizer
from tinylm.text.tokenizer_libraries import byte_alphabet

PREFIX = "tokenizer.ggml."
NUMBER_END = ";"
NO_TOKEN = 2**32 - 1  # -1 as an unsigned id, as converters write it for a token that does not exist
CHAT_TEMPLATE = "tokenizer.chat_template"
MAX_TEMPLATE = 1 << 20  # characters
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
INERT_MERGE = "À Á"  # llama.cpp requires a merge; this one joins the bytes C0 and C1, which never occur in UTF-8
SPACE = "\u2581"  # the space in SentencePiece tokens
MAX_PIECE = 256  # characters per SentencePiece token; SentencePiece's own default limit is 16
MAX_PIECES = 1 << 23  # characters of all SentencePiece tokens together

# Control tokens with these names become EOS tokens. llama.cpp stops generation at them, and at some other names.
END_TOKENS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<|end_of_text|>", "</s>"}
)
# Keys without effect here: tokens for fill-in-the-middle, masking and classification, and the number of token types.
_WITHOUT_EFFECT = (
    *("fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id"),
    *("fim_sep_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id", "mask_token_id"),
    *("seperator_token_id", "cls_token_id", "token_type_count"),
)


@dataclass(frozen=True)
class ReadTokenizer:
    """text: validated content of a tokenizer.json. chat_template: Jinja source, not yet checked; `None` without one."""

    text: str
    special: SpecialTokens
    chat_template: str | None


# Pre-tokenizers.

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2_PATTERN = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _bytes(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGITS = {"type": "Digits", "individual_digits": True}
_NFC = {"type": "NFC"}


class PreTokenizer(NamedTuple):
    """The components that a value of tokenizer.ggml.pre names. steps: of the pre-tokenizer in tokenizer.json.

    normalizer: that of the original tokenizer, which llama.cpp does not apply.
    """

    steps: tuple[dict[str, Any], ...]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False  # default of tokenizer.ggml.add_bos_token


_GPT2 = PreTokenizer((_bytes(use_regex=True),))
_QWEN2 = PreTokenizer((_split(_QWEN2_PATTERN), _bytes(use_regex=False)))
_LLAMA3 = PreTokenizer((_split(_LLAMA3_PATTERN), _bytes(use_regex=False)), ignore_merges=True, add_bos=True)
_NUMBERS_APART = PreTokenizer((_DIGITS, _bytes(use_regex=True)))
# Export uses the first name that fits the tokenizer (find_pre).
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "qwen2": _QWEN2._replace(normalizer=_NFC),
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3._replace(ignore_merges=False, add_bos=False),
    "smollm": _NUMBERS_APART,
    "starcoder": _NUMBERS_APART,
    "refact": _NUMBERS_APART,
    "codeshell": _NUMBERS_APART,
    "olmo": _GPT2._replace(normalizer=_NFC),
    "mpt": _GPT2._replace(normalizer=_NFC),
    "tekken": PreTokenizer((_split(_TEKKEN_PATTERN), _bytes(use_regex=False)), ignore_merges=True, add_bos=True),
    "default": PreTokenizer(
        (
            _split(r"[\p{P}\$\+<=>\^~\|]+"),
            _split(_GPT2_PATTERN),
            _split(r"\p{N}+"),
            _split("[0-9][0-9][0-9]"),
            _bytes(use_regex=False),
        )
    ),
}
# Default of tokenizer.ggml.pre, which older files lack, for families that use only one pre-tokenizer.
_PRE_OF_FAMILY = {"gpt2": "gpt-2", **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "qwen2")}


# Metadata to tokenizer.json.


class _Vocabulary(NamedTuple):
    tokens: list[str]
    types: list[int]

    def of_type(self, *types: int) -> list[tuple[int, str]]:
        """Pairs of id and token for the tokens of these types, without empty ones."""
        return [(i, token) for i, (token, kind) in enumerate(zip(*self, strict=True)) if kind in types and token]


def read_tokenizer(metadata: Metadata, family: str, vocab_size: int) -> ReadTokenizer:
    """The tokenizer in the metadata. family: Hugging Face model type; vocab_size: number of rows of the embedding.

    Raises ValueError for metadata that is missing, invalid or not supported.
    """
    template = metadata.text(CHAT_TEMPLATE, None)
    metadata = Metadata(metadata.values, PREFIX)
    kind = metadata.text("model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"its tokenizer is of the kind {short_repr(kind)}; tinylm reads gpt2 and llama")
    vocabulary = _read_vocabulary(metadata, vocab_size)
    if kind == "llama":
        spec, adds_bos = _sentencepiece(metadata, vocabulary), True
    else:
        pre = _read_pre(metadata, family)
        spec, adds_bos = _byte_level(metadata, vocabulary, pre), PRE_TOKENIZERS[pre].add_bos
    with refused("its special tokens cannot be used"):
        special = _read_special(metadata, vocabulary, adds_bos)
    # The names of special tokens in a text are not encoded as them; those of user-defined tokens are
    named = {special.end_of_text, special.bos, special.pad, *special.eos}
    spec["added_tokens"] = [
        {"id": i, "content": token, "special": is_special}
        for i, (token, token_type) in enumerate(zip(*vocabulary, strict=True))
        if (is_special := token_type in (CONTROL, UNKNOWN) or token in named) or token_type == USER_DEFINED
    ]
    if template is not None and len(template) > MAX_TEMPLATE:
        raise ValueError(f"its chat template has more than {MAX_TEMPLATE:,} characters")
    metadata.ignore(*_WITHOUT_EFFECT)
    if unknown := metadata.unread():
        raise ValueError(f"its metadata has the key {unknown[0]!r}, which tinylm does not know")
    text = json.dumps(validate_tokenizer(json.dumps(spec)), ensure_ascii=False)
    return ReadTokenizer(text, special, template)


def _read_vocabulary(metadata: Metadata, vocab_size: int) -> _Vocabulary:
    tokens = metadata.texts("tokens")
    if not 1 <= len(tokens) <= vocab_size:
        raise ValueError(f"it has {len(tokens):,} tokens and an embedding of {vocab_size:,} rows")
    if len(set(tokens)) < len(tokens) - max(0, tokens.count("") - 1):
        raise ValueError("its tokenizer has a token twice")
    types = metadata.numbers("token_type", np.full(len(tokens), NORMAL))
    if len(types) != len(tokens) or types.dtype.kind not in "iu":
        raise ValueError(f"its {PREFIX}token_type does not have one integer per token")
    return _Vocabulary(tokens, types.tolist())


def _read_pre(metadata: Metadata, family: str) -> str:
    key = metadata.key("pre")
    pre = metadata.text("pre", _PRE_OF_FAMILY.get(family))
    if pre is None:
        raise ValueError(f"its metadata lacks {key}, the name of its pre-tokenizer; convert the model again")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"its {key} is {short_repr(pre)}; tinylm knows {', '.join(sorted(PRE_TOKENIZERS))}")
    return str(pre)


def _byte_level(metadata: Metadata, vocabulary: _Vocabulary, pre: str) -> TokenizerSpec:
    merges = [merge.split(" ") for merge in metadata.texts("merges") if merge != INERT_MERGE]
    for pair in merges:
        if len(pair) != 2 or not all(pair):
            raise ValueError(f"its merge {short_repr(' '.join(pair))} is not a pair of tokens")
    for name in ("scores", "add_space_prefix", "remove_extra_whitespaces"):  # for the kind llama only
        metadata.ignore(name)
    if pre == "gpt-2" and (characters := _single_characters(vocabulary)):
        return {"model": {"type": "BPE", "vocab": characters, "merges": []}, "decoder": {"type": "Fuse"}}
    steps, normalizer, ignore_merges, _ = PRE_TOKENIZERS[pre]
    model: dict[str, Any] = {"type": "BPE", "ignore_merges": ignore_merges, "vocab": _ids(vocabulary), "merges": merges}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": list(steps)},
        "decoder": _bytes(use_regex=True),
        "model": model,
    }


def _ids(vocabulary: _Vocabulary) -> dict[str, int]:
    """The ids of all tokens that are not empty, except unused tokens, which only pad the embedding."""
    pairs = zip(*vocabulary, strict=True)
    return {token: i for i, (token, kind) in enumerate(pairs) if kind != UNUSED and token}


def _single_characters(vocabulary: _Vocabulary) -> dict[str, int]:
    """The ids of a character tokenizer of tinylm and of its special tokens; empty for any other tokenizer.

    The merges of such a tokenizer join the UTF-8 bytes of a character. The `tokenizers` library rejects them, since
    their intermediate results are not tokens, so the characters are read without merges.
    """
    byte_of = dict(byte_alphabet())
    characters: dict[str, int] = {}
    for i, token in vocabulary.of_type(NORMAL):
        try:
            text = bytes(byte_of[character] for character in token).decode("utf-8")
        except (KeyError, UnicodeDecodeError):
            return {}
        if len(text) != 1:
            return {}
        characters[text] = i
    special = {token: i for i, token in vocabulary.of_type(CONTROL)}
    return {**special, **characters} if not special.keys() & characters.keys() else {}


def _sentencepiece(metadata: Metadata, vocabulary: _Vocabulary) -> TokenizerSpec:
    """SentencePiece's BPE, with merges from the scores; with byte fallback if the tokens of all bytes exist."""
    scores = metadata.numbers("scores")
    if len(scores) != len(vocabulary.tokens) or scores.dtype.kind not in "fiu" or not np.isfinite(scores).all():
        raise ValueError(f"its {PREFIX}scores does not have one finite number per token")
    metadata.ignore("pre", "merges")  # for the kind gpt2 only
    metadata.require("remove_extra_whitespaces", False)
    prefix = metadata.flag("add_space_prefix", True)
    ids = _ids(vocabulary)
    unknown = vocabulary.of_type(UNKNOWN)
    has_bytes = all(f"<0x{byte:02X}>" in ids for byte in range(256))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, replace] if prefix else [replace]
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    spaces = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "decoder": {"type": "Sequence", "decoders": [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "unk_token": unknown[0][1] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": has_bytes,
            "vocab": ids,
            "merges": _merges_of_scores(vocabulary, scores),
        },
    }


def _merges_of_scores(vocabulary: _Vocabulary, scores: np.ndarray) -> list[list[str]]:
    """All pairs of normal tokens that join to a normal token, by decreasing score of the result.

    Among results of equal score, the lowest id is merged first; llama.cpp merges the leftmost in the text first.
    """
    pieces = vocabulary.of_type(NORMAL)
    longest = max((len(token) for _, token in pieces), default=0)
    if longest > MAX_PIECE or sum(len(token) for _, token in pieces) > MAX_PIECES:
        raise ValueError(f"its tokens are too long: one may have {MAX_PIECE} characters, and all {MAX_PIECES:,}")
    known = {token for _, token in pieces}
    merges: list[list[str]] = []
    for _, token in sorted(pieces, key=lambda piece: (-scores[piece[0]], piece[0])):
        pairs = ([token[:i], token[i:]] for i in range(len(token) - 1, 0, -1))
        merges += [pair for pair in pairs if known.issuperset(pair)]
        if len(merges) > MAX_MERGES:
            raise ValueError(f"its tokens join in more than {MAX_MERGES:,} ways")
    return merges


def _read_special(metadata: Metadata, vocabulary: _Vocabulary, adds_bos: bool) -> SpecialTokens:
    def find(name: str) -> str | None:
        key = f"{name}_token_id"
        if metadata.integer(key, NO_TOKEN, low=-1, high=NO_TOKEN) in (-1, NO_TOKEN):
            return None
        return vocabulary.tokens[metadata.integer(key, low=0, high=len(vocabulary.tokens) - 1)] or None

    end_of_text, bos = find("eos"), find("bos")
    if end_of_text is None:
        raise ValueError(f"its metadata lacks {PREFIX}eos_token_id, the token that ends a text")
    metadata.require("add_eos_token", False)
    metadata.require("add_sep_token", False)
    find("unknown")
    ends = [end_of_text, find("eot"), find("eom"), *(token for _, token in vocabulary.of_type(CONTROL))]
    is_end = {end_of_text, *ends[1:3], *END_TOKENS}
    add_bos = metadata.flag("add_bos_token", adds_bos)
    if add_bos and bos is None:
        raise ValueError(f"its metadata lacks {PREFIX}bos_token_id, although a text begins with that token")
    return SpecialTokens(
        end_of_text=end_of_text,
        bos=bos,
        eos=tuple(dict.fromkeys(token for token in ends if token is not None and token in is_end)),
        pad=find("padding"),
        add_bos=add_bos,
    )


# tokenizer.json to metadata.


def write_tokenizer(
    spec: TokenizerSpec, special: SpecialTokens, chat_template: str | None, vocab_size: int
) -> dict[str, Any]:
    """The metadata of a tokenizer by key. The values are bool, int, str, or a list of str, int or float.

    spec: validated content of a tokenizer.json. vocab_size: number of rows of the embedding. The metadata has a token
    for each row; ids that the tokenizer lacks get tokens of the type UNUSED.

    Raises ValueError with a reason that completes the sentence "The tokenizer cannot be written as GGUF: ".
    """
    model = spec["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        affixes = " with a prefix or suffix of tokens" if model["type"] == "BPE" else ""
        raise ValueError(
            f"it is a {model['type']} model{affixes}; tinylm writes byte-level BPE and SentencePiece's BPE"
        )
    if any(token[flag] for token in spec["added_tokens"] for flag in ("single_word", "lstrip", "rstrip")):
        raise ValueError("one of its added tokens strips the spaces around it, or matches whole words only")
    # All tokens are single characters or special tokens, without merges, pre-tokenizer and normalizer
    added = {token["content"] for token in spec["added_tokens"] if token["special"]}
    plain = not (model["merges"] or model.get("byte_fallback") or model.get("unk_token"))
    whole = not (spec["normalizer"] or spec["pre_tokenizer"]) and len(added) == len(spec["added_tokens"])
    if plain and whole and all(len(token) == 1 for token in model["vocab"] if token not in added):
        metadata = _write_characters(spec, vocab_size)
    elif model.get("byte_fallback"):
        metadata = _write_sentencepiece(spec, vocab_size)
    else:
        metadata = {
            "model": "gpt2",
            "pre": find_pre(spec),
            **_write_vocabulary(spec, {}, vocab_size),
            "merges": [f"{first} {second}" for first, second in model["merges"]] or [INERT_MERGE],
        }
    metadata |= _write_special(special, token_ids(spec))
    values = {PREFIX + name: value for name, value in metadata.items()}
    return values if chat_template is None else {**values, CHAT_TEMPLATE: chat_template}


def write_numbers(end_id: int, vocab_size: int) -> dict[str, Any]:
    """The metadata of a tokenizer whose tokens are the decimal numbers of their ids, each with NUMBER_END.

    For generation from ids to ids: llama.cpp then reports each token as soon as it is sampled, also those that end
    within a character, and knows no end token besides `end_id`.
    """
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [f"{token}{NUMBER_END}" for token in range(vocab_size)],
        "token_type": [NORMAL] * vocab_size,
        "merges": [INERT_MERGE],
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "add_bos_token": False,
    }
    return {PREFIX + name: value for name, value in metadata.items()}


def _write_characters(spec: TokenizerSpec, vocab_size: int) -> dict[str, Any]:
    """Characters as byte-level BPE whose merges join the UTF-8 bytes of each character."""
    letter_of = {byte: letter for letter, byte in byte_alphabet()}
    spelled = {token: "".join(letter_of[byte] for byte in token.encode()) for token in spec["model"]["vocab"]}
    added = {token["content"] for token in spec["added_tokens"]}
    letters = [spelling for token, spelling in spelled.items() if token not in added]
    merges = [f"{word[:i]} {word[i]}" for word in letters for i in range(1, len(word))]
    return {
        "model": "gpt2",
        "pre": "gpt-2",
        **_write_vocabulary(spec, {token: spelled[token] for token in spelled if token not in added}, vocab_size),
        "merges": list(dict.fromkeys(merges)) or [INERT_MERGE],
    }


def find_pre(spec: TokenizerSpec) -> str:
    """The value of tokenizer.ggml.pre for a byte-level tokenizer. Raises ValueError if none in PRE_TOKENIZERS fits.

    spec: validated content of a tokenizer.json.
    """
    found = _comparable(_steps(spec["pre_tokenizer"], "pretokenizers"))
    normalizers = _comparable(_steps(spec["normalizer"], "normalizers"))
    for name, (steps, normalizer, ignore_merges, _) in PRE_TOKENIZERS.items():
        same = found == _comparable(list(steps)) and bool(spec["model"].get("ignore_merges")) == ignore_merges
        if same and normalizers == _comparable([normalizer] if normalizer else []):
            return name
    raise ValueError("its pre-tokenizer has no name in GGUF that tinylm knows")


def _steps(component: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    if component is None:
        return []
    return list(component[key]) if component["type"] == "Sequence" else [component]


_DEFAULTS = {"add_prefix_space": True, "use_regex": True, "invert": False, "individual_digits": False}


def _comparable(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps with their defaults filled in, and without fields that do not change ids."""
    defaults = {"ByteLevel": ("add_prefix_space", "use_regex"), "Split": ("invert",), "Digits": ("individual_digits",)}
    return [
        {name: _DEFAULTS[name] for name in defaults.get(step["type"], ())}
        | {name: value for name, value in step.items() if name != "trim_offsets"}
        for step in steps
    ]


def _write_sentencepiece(spec: TokenizerSpec, vocab_size: int) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = _steps(spec["normalizer"], "normalizers")
    prefix = normalizers[:1] == [{"type": "Prepend", "prepend": SPACE}]
    # Gemma's pre-tokenizer splits at spaces, which its normalizer has replaced, so it has no effect.
    inert = [{"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}]
    if normalizers[prefix:] != [replace] or _steps(spec["pre_tokenizer"], "pretokenizers") not in ([], inert):
        raise ValueError("its normalizer or its pre-tokenizer is not SentencePiece's")
    model = spec["model"]
    if model.get("ignore_merges"):
        raise ValueError("it ignores merges, which SentencePiece's BPE does not")
    ranks = _ranks_of_tokens(model["merges"])
    values = {"model": "llama", "pre": "default", "add_space_prefix": prefix}
    vocabulary = _write_vocabulary(spec, {}, vocab_size)
    vocabulary["scores"] = [float(-ranks.get(token, len(ranks) + 1)) for token in vocabulary["tokens"]]
    if unknown := model.get("unk_token"):
        i = token_ids(spec)[unknown]
        vocabulary["token_type"][i] = UNKNOWN
        values["unknown_token_id"] = i
    for byte in range(256):
        if (token := f"<0x{byte:02X}>") not in model["vocab"]:
            raise ValueError(f"it falls back to bytes, and has no token {token}")
        vocabulary["token_type"][model["vocab"][token]] = BYTE
    return {**values, **vocabulary}


def _ranks_of_tokens(merges: list[list[str]]) -> dict[str, int]:
    """The rank, from 1, of each result of a merge. Raises ValueError if the merges to a token are not consecutive."""
    ranks: dict[str, int] = {}
    previous = None
    for first, second in merges:
        token = first + second
        if token != previous and token in ranks:
            raise ValueError("its merges are not in the order of the scores of tokens")
        ranks.setdefault(token, len(ranks) + 1)
        previous = token
    return ranks


def _write_vocabulary(spec: TokenizerSpec, spelled: Mapping[str, str], vocab_size: int) -> dict[str, Any]:
    """The arrays tokens and token_type. spelled: the text in the GGUF file of tokens that are written differently."""
    ids = token_ids(spec)
    special = {token["content"]: token["special"] for token in spec["added_tokens"]}
    if max(ids.values()) >= vocab_size:
        raise ValueError(f"it has the id {max(ids.values())}, and the model has {vocab_size} ids")
    tokens, types = [""] * vocab_size, [UNUSED] * vocab_size
    for token, i in ids.items():
        tokens[i] = spelled.get(token, token)
        types[i] = NORMAL if token not in special else CONTROL if special[token] else USER_DEFINED
    taken = set(tokens)
    padding = (name for number in itertools.count() if (name := f"[PAD{number}]") not in taken)
    tokens = [token or next(padding) for token in tokens]
    if len(set(tokens)) < vocab_size:
        raise ValueError("two of its tokens are written in the same way")
    return {"tokens": tokens, "token_type": types}


def _write_special(special: SpecialTokens, ids: Mapping[str, int]) -> dict[str, Any]:
    """The ids of special tokens. Without an id of BOS or EOS, llama.cpp would use its default, an ordinary token.

    Of several EOS tokens besides `end_of_text`, the first two are written, as the EOT and EOM tokens.
    """
    end = ids[special.end_of_text]
    values: dict[str, Any] = {
        "eos_token_id": end,
        "bos_token_id": end if special.bos is None else ids[special.bos],
        "add_bos_token": special.add_bos,
    }
    if special.pad is not None:
        values["padding_token_id"] = ids[special.pad]
    others = [ids[token] for token in special.eos if token != special.end_of_text]
    return values | dict(zip(("eot_token_id", "eom_token_id"), others, strict=False))
