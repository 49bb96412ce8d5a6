"""tokenizer.json files with the structure of published models, and with small vocabularies."""

import copy
import functools
import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXT = (
    "The cat's hat, the dog's log; they'll say we've 123 and 1234 of them, don't they?\r\n\r\n"
    "  Zwölf große Boxkämpfer\t\t日本語の文章と漢字 👩‍👩‍👧 e\u0301 naïve — “quoted”…\n\n\n    indented    text\n"
)

Part = dict[str, Any]
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
    r"|\s*[\r\n]|\s+(?!\S)|\s",
    "llama3": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}",
    "qwen2": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{BLANKS}",
    "qwen3.5": rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
    rf"|{BLANKS}",
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    rf"{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{BLANKS}",
    "deepseek3": "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
    "nanochat": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
    r"|\s+(?!\S)|\s+",
    "clip": r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    "bloom": r" ?[^(\s|.,!?…。，、।۔،)]+",
    "falcon": "[0-9][0-9][0-9]",
    "chinese": "[一-龥぀-ゟ゠-ヿ]+",
    "digits": r"\p{N}{1,3}",
    "blanks": " {2,}",
}

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
BYTES_ALONE = {**BYTE_LEVEL, "use_regex": False}
NFC = {"type": "NFC"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
TO_METASPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
FROM_METASPACE: list[Part] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}]
FROM_METASPACE += [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]


def published() -> dict[str, Part]:
    """The JSON values of the files by model; the caller may modify them."""
    return copy.deepcopy(_published())


@functools.cache
def _published() -> dict[str, Part]:
    end, unknown, bos = added("<|endoftext|>", 0), added("<unk>", 0), added("<bos>", 1)
    spaces = [added(" " * (24 - i), 300 + i, special=False, normalized=True) for i in range(22)]
    begin = {"type": "Sequence", "processors": [BYTE_LEVEL, _template("<|begin_of_text|>", 300)]}
    prepend = {"type": "Prepend", "prepend": "▁"}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    single_digits, digits = ({"type": "Digits", "individual_digits": individual} for individual in (True, False))
    punctuation = {"type": "Punctuation", "behavior": "Contiguous"}
    flags = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1, "cat": 2}, "unk_token": "[UNK]"}

    def byte_level(pre_tokenizer: Part, *more: str, **parts: Any) -> Part:
        return layout(_byte_level(), [end, *_more(*more)], pre_tokenizer, BYTE_LEVEL, **parts)

    def pieces(pre_tokenizer: Part | None, steps: int = 4, **parts: Any) -> Part:
        return layout(
            _byte_fallback(), [unknown, bos], pre_tokenizer, _sequence("decoders", *FROM_METASPACE[:steps]), **parts
        )

    llama3 = byte_level(_words("llama3"), "<|begin_of_text|>", "<|eot_id|>", post_processor=begin)
    llama3["model"]["ignore_merges"] = True
    qwen2 = byte_level(_words("qwen2"), "<|im_start|>", "<|im_end|>", normalizer=NFC, post_processor=BYTES_ALONE)
    pythia = byte_level(BYTE_LEVEL, normalizer=NFC, post_processor=_template("<|endoftext|>", 0))
    return {
        "gpt2": layout(_byte_level(untyped=True), [end], BYTE_LEVEL, BYTE_LEVEL, post_processor=BYTE_LEVEL),
        "llama3": llama3,
        "qwen2": {**qwen2, "decoder": BYTES_ALONE},
        "smollm2": byte_level(_sequence("pretokenizers", single_digits, BYTE_LEVEL)),
        "pythia": {**pythia, "added_tokens": [end, *spaces]},
        "gemma": pieces(split, 3, normalizer=TO_METASPACE, post_processor=_template("<bos>", 1)),
        "llama2": pieces(
            None, normalizer=_sequence("normalizers", prepend, TO_METASPACE), post_processor=_template("<bos>", 1)
        ),
        "mistral": pieces(METASPACE),
        "mistral-nemo": byte_level(_words("tekken")),
        "gpt-oss": byte_level(_words("o200k")),
        "deepseek3": byte_level(_words("digits", "chinese", "deepseek3")),
        "falcon": byte_level(_sequence("pretokenizers", punctuation, BYTE_LEVEL, digits, _split("falcon"))),
        "bert": layout(
            _word_piece(),
            [added("[UNK]", 0), added("[CLS]", 1), added("[SEP]", 2)],
            {"type": "BertPreTokenizer"},
            {"type": "WordPiece", "prefix": "##", "cleanup": True},
            {"type": "BertNormalizer", **flags},
            {"type": "BertProcessing", "sep": ["[SEP]", 2], "cls": ["[CLS]", 1]},
        ),
        "unigram": layout(_unigram(), [unknown], METASPACE, METASPACE),
        "words": layout(words, [], {"type": "Whitespace"}, None),
    }


def layout(
    model: Part,
    added_tokens: list[Part],
    pre: Part | None,
    decoder: Part | None,
    normalizer: Part | None = None,
    post_processor: Part | None = None,
) -> Part:
    steps = {"pre_tokenizer": pre, "post_processor": post_processor, "decoder": decoder, "model": model}
    header: Part = {"version": "1.0", "truncation": None, "padding": None}
    return {**header, "added_tokens": added_tokens, "normalizer": normalizer, **steps}


def added(content: str, i: int, special: bool = True, normalized: bool = False) -> Part:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": special}
    return {"id": i, "content": content, **flags}


def _more(*contents: str) -> list[Part]:
    """Added tokens behind a vocabulary of 300."""
    return [added(content, 300 + i) for i, content in enumerate(contents)]


def _split(pattern: str) -> Part:
    return {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": False}


def _sequence(key: str, *steps: Part) -> Part:
    return {"type": "Sequence", key: list(steps)}


def _words(*patterns: str) -> Part:
    return _sequence("pretokenizers", *map(_split, patterns), BYTES_ALONE)


def _template(token: str, i: int) -> Part:
    before = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [before, first],
        "pair": [before, first, before, second],
        "special_tokens": {token: {"id": token, "ids": [i], "tokens": [token]}},
    }


def _trained(library: tokenizers.Tokenizer, trainer: Any) -> Part:
    library.train_from_iterator([TEXT] * 3, trainer)
    model: Part = json.loads(library.to_str())["model"]
    return model


def _byte_level(untyped: bool = False) -> Part:
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model = _trained(library, trainer)
    assert len(model["vocab"]) == 300
    if untyped:  # GPT-2's file is older than the field
        del model["type"]
        model.update(unk_token="", continuing_subword_prefix="", end_of_word_suffix="")
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    return model


def _byte_fallback() -> Part:
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=450, special_tokens=["<unk>", "<bos>", *byte_tokens], show_progress=False)
    return _trained(library, trainer)


def _word_piece() -> Part:
    characters = sorted(set("".join(TEXT.lower().split())))
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "##s", *characters, *(f"##{c}" for c in characters)]
    return {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {word: i for i, word in enumerate(dict.fromkeys(words))},
    }


def _unigram() -> Part:
    characters = sorted(set(TEXT.replace(" ", "▁")))
    vocabulary = [["<unk>", 0.0], ["▁the", -3.0], ["▁cat", -4.0], *([c, -8.0] for c in characters)]
    return {"type": "Unigram", "unk_id": 0, "vocab": vocabulary, "byte_fallback": False}
