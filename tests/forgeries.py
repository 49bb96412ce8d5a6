"""Forged and damaged tokenizer.json files."""

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from tests.published import added, published

Layout = dict[str, Any]
NESTED = "NESTED"  # stands for brackets, which json.dumps cannot nest deeply enough

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, float("inf")),
    *(2**31 - 1, 2**32 - 1, 2**32, 2**63, 2**64, 10**400),
    *("", " ", "x" * 1_000_000, "\0", "\ud800", "\u202e\u0301", "\U0010ffff"),
    *("Precompiled", "Sequence", "ByteLevel"),
    *([], {}, [[]], {"": {}}, {"type": "Sequence"}, {"Regex": "(a+)+$"}, {"String": ""}, [None] * 1000),
    *({"x": NESTED}, NESTED),
)


def forged_tokenizers(seed: int) -> Iterator[tuple[str, str]]:
    """The name and the text of one file after the other, without end: first known attacks, then mutations of files with
    the structure of published models. A seed always gives the same files.
    """
    bases = published()
    yield from _known_attacks(bases)
    rng = random.Random(seed)
    for number in itertools.count():
        name = rng.choice(list(bases))
        forged = copy.deepcopy(bases[name])
        changes = [rng.choice(MUTATIONS) for _ in range(rng.choice((1, 1, 2, 3)))]
        for change in changes:
            change(forged, rng)
        text = written(forged)
        if rng.random() < 0.15:
            text = _damaged(text, rng)
        yield f"{number}-{name}-{'-'.join(change.__name__.strip('_') for change in changes)}", text


def written(forged: Layout) -> str:
    text = json.dumps(forged).replace("Infinity", "1e999")
    return text.replace(f'"{NESTED}"', "[" * 100_000 + "]" * 100_000) if NESTED in text else text


def _known_attacks(bases: dict[str, Layout]) -> Iterator[tuple[str, str]]:
    def bpe(**fields: Any) -> Layout:
        return {**bases["gpt2"], **fields}

    def model(base: str, **fields: Any) -> Layout:
        return {**bases[base], "model": {**bases[base]["model"], **fields}}

    def words(**fields: Any) -> Layout:
        return {**bases["words"], **fields}

    def sequence(key: str, *steps: Layout) -> Layout:
        return {"type": "Sequence", key: list(steps)}

    def replace(pattern: Layout, content: str) -> Layout:
        return {"type": "Replace", "pattern": pattern, "content": content}

    def split(pattern: str) -> Layout:
        return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}

    vocabulary = bases["gpt2"]["model"]["vocab"]
    some = next(iter(bases["gpt2"]["model"]["merges"]))
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    template = bases["pythia"]["post_processor"]
    attacks: dict[str, Layout | str] = {
        "empty": "",
        "no object": "[]",
        "null": "null",
        "nested": "[" * 1_000_000,
        "nested model": words(model=NESTED),
        "nested normalizer": words(normalizer={"type": "Sequence", "normalizers": NESTED}),
        "no model": {"version": "1.0"},
        "long number": '{"version": ' + "1" * 100_000 + "}",
        "precompiled": words(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "precompiled, long": words(normalizer={"type": "Precompiled", "precompiled_charsmap": "/wAAAA" + "A" * 998}),
        "precompiled, hidden": words(
            normalizer=sequence("normalizers", {"type": "NFC"}, {"type": "Precompiled", "precompiled_charsmap": "gAAA"})
        ),
        "normalizer without a type": words(normalizer={"precompiled_charsmap": "AAAA"}),
        "replace nothing": words(normalizer=replace({"String": ""}, "x")),
        "replace by much": words(normalizer=replace({"String": "a"}, "a" * 1_000_000)),
        "replace again and again": words(normalizer=sequence("normalizers", *[replace({"String": "a"}, "aaaa")] * 15)),
        "replace decoder": words(decoder=sequence("decoders", *[replace({"String": "a"}, "aaaa")] * 15)),
        "prepend much": words(normalizer={"type": "Prepend", "prepend": "a" * 1_000_000}),
        "bytes of bytes": words(pre_tokenizer=sequence("pretokenizers", *[byte_level] * 40)),
        "strip too much": words(decoder={"type": "Strip", "content": " ", "start": 0, "stop": 5}),
        "strip 2^64": words(decoder={"type": "Strip", "content": " ", "start": 2**64 - 1, "stop": 2**64 - 1}),
        "ctc": words(decoder={"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True}),
        "length 0": words(pre_tokenizer={"type": "FixedLength", "length": 0}),
        "deep sequence": words(pre_tokenizer=_deep({"type": "Whitespace"}, "pretokenizers", 100)),
        "wide sequence": words(pre_tokenizer=sequence("pretokenizers", *[split(" ")] * 100_000)),
        "no steps": words(normalizer=sequence("normalizers"), decoder=sequence("decoders")),
        "template without its token": words(post_processor={**template, "special_tokens": {}}),
        "template of two": words(post_processor={**template, "single": template["pair"]}),
        "template with ids": words(
            post_processor={**template, "special_tokens": {"<|endoftext|>": {"id": "x", "ids": [], "tokens": []}}}
        ),
        "id 2^32 - 1": words(model={"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}),
        "id 2^32": words(model={"type": "WordLevel", "vocab": {"a": 2**32}, "unk_token": "a"}),
        "id 2^31": model("gpt2", vocab={**vocabulary, "far": 2**31}),
        "id -1": model("gpt2", vocab={**vocabulary, "far": -1}),
        "id 0.5": model("gpt2", vocab={**vocabulary, "far": 0.5}),
        "id true": model("gpt2", vocab={**vocabulary, "far": True}),
        "an id twice": model("gpt2", vocab={**vocabulary, "far": 7}),
        "added id 2^32 - 1": bpe(added_tokens=[added("<x>", 2**32 - 1)]),
        "added id of another": bpe(added_tokens=[added("<x>", 7)]),
        "added nothing": bpe(added_tokens=[added("", 300)]),
        "added white space": bpe(
            added_tokens=[
                {**added(c, 300 + i, special=False), "lstrip": True, "rstrip": True} for i, c in enumerate(" \n")
            ]
        ),
        "added much": bpe(added_tokens=[added("x" * 1_000_000, 300)]),
        "added many": bpe(added_tokens=[added(f"<{i}>", 300 + i) for i in range(70_000)]),
        "added, normalized to nothing": words(
            added_tokens=[added(" ", 3, normalized=True)],
            normalizer={"type": "Strip", "strip_left": True, "strip_right": True},
        ),
        "merge of strangers": model("gpt2", merges=["x y z"]),
        "merge of unknown": model("gpt2", merges=["qq qq"]),
        "merge into unknown": model("gpt2", merges=["q q"]),
        "merge with nothing": model("gpt2", vocab={**vocabulary, "": 300}, merges=[["", "q"], ["q", ""]]),
        "merge in a circle": model("gpt2", merges=[some] * 1000),
        "merges of numbers": model("gpt2", merges=[[1, 2]]),
        "prefix": model("gpt2", continuing_subword_prefix="##"),
        "long prefix": model("gpt2", continuing_subword_prefix="漢" * 1000),
        "suffix": model("gpt2", end_of_word_suffix="</w>" * 1000),
        "dropout": model("gpt2", dropout=0.9),
        "dropout 2": model("gpt2", dropout=2),
        "unknown token unknown": model("gpt2", unk_token="<nowhere>"),
        "byte fallback without bytes": model("gpt2", byte_fallback=True, fuse_unk=True),
        "words of any length": model("bert", max_input_chars_per_word=2**64 - 1),
        "word piece without its unknown": model("bert", unk_token="nowhere"),
        "unigram unknown": model("unigram", unk_id=2**63),
        "unigram without unknown": model("unigram", unk_id=None),
        "unigram infinite": model("unigram", vocab=[["a", float("inf")], ["b", 1e308]]),
        "unigram of nothing": model("unigram", vocab=[["", 0.0], ["a", 0.0]]),
        "unigram empty": model("unigram", vocab=[]),
        "unigram of 100 MB": model("unigram", vocab=[[f"{i:x}" * 400, 0.0] for i in range(4000)]),
        "truncation": bpe(truncation={"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}),
        "padding": bpe(padding={"strategy": {"Fixed": 2**40}, "direction": "Right"}),
        "keys twice": written(bases["words"])[:-1] + ', "normalizer": {"type": "Precompiled"}}',
        "keys twice, in front": '{"model": {"type": "Unigram", "vocab": [], "unk_id": 9}, '
        + written(bases["words"])[1:],
        "half a pair": words(model={"type": "WordLevel", "vocab": {"\ud800": 0}, "unk_token": "\ud800"}),
    }
    hostile = (r"(a+)+$", r"(\w*)*!", "a?" * 30 + "a" * 30, r"\s*$", ".*x", "(?<=a+)b", "(", r"(\w)\1", r"\p{L}{99999}")
    attacks |= {f"split by {pattern[:12]}": words(pre_tokenizer=split(pattern)) for pattern in hostile}
    attacks |= {f"replace {pattern[:12]}": words(normalizer=replace({"Regex": pattern}, "x")) for pattern in hostile}
    for name, forged in attacks.items():
        yield name, forged if isinstance(forged, str) else written(forged)


def _deep(step: Layout, key: str, depth: int) -> Layout:
    for _ in range(depth):
        step = {"type": "Sequence", key: [step]}
    return step


# Mutations of a parsed tokenizer.json, in place.


def _places(value: Any, most: int = 12) -> Iterator[tuple[Any, Any]]:
    """Containers and keys: of long ones, such as vocabularies, the first few."""
    if isinstance(value, (dict, list)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        for key in keys[:most]:
            yield value, key
            yield from _places(value[key], most)


def _place(forged: Layout, rng: random.Random) -> tuple[Any, Any]:
    return rng.choice(list(_places(forged)) or [(forged, "model")])


def _swap(forged: Layout, rng: random.Random) -> None:
    container, key = _place(forged, rng)
    container[key] = copy.deepcopy(rng.choice(ODD))


def _drop(forged: Layout, rng: random.Random) -> None:
    container, key = _place(forged, rng)
    del container[key]


def _move(forged: Layout, rng: random.Random) -> None:
    """Replace a part of the file by a copy of another part."""
    (container, key), (other, source) = _place(forged, rng), _place(forged, rng)
    container[key] = copy.deepcopy(other[source])


def _add_key(forged: Layout, rng: random.Random) -> None:
    containers = [forged, *(c[k] for c, k in _places(forged) if isinstance(c[k], dict))]
    key = rng.choice(("extra", "type", "pattern", "content", "vocab", "stop", "length"))
    rng.choice(containers)[key] = rng.choice(ODD)


def _swap_flag(forged: Layout, rng: random.Random) -> None:
    flags = [(c, k) for c, k in _places(forged, 40) if isinstance(c[k], bool)]
    if flags:
        container, key = rng.choice(flags)
        container[key] = not container[key]


def _model_part(forged: Layout, name: str) -> Any:
    return forged["model"].get(name) if isinstance(forged.get("model"), dict) else None


def _swap_ids(forged: Layout, rng: random.Random) -> None:
    vocabulary = _model_part(forged, "vocab")
    if isinstance(vocabulary, dict) and len(vocabulary) > 1:
        for _ in range(rng.choice((1, 100))):
            one, two = rng.sample(sorted(vocabulary, key=str), 2)
            vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]


def _shuffle_merges(forged: Layout, rng: random.Random) -> None:
    merges = _model_part(forged, "merges")
    if isinstance(merges, list):
        rng.shuffle(merges)
        del merges[rng.randrange(len(merges) + 1) :]


def _mix_steps(forged: Layout, rng: random.Random) -> None:
    """Replace the normalizer, pre-tokenizer or decoder by that of another file."""
    part = rng.choice(("normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens"))
    forged[part] = copy.deepcopy(rng.choice(list(published().values()))[part])


MUTATIONS: tuple[Callable[[Layout, random.Random], None], ...] = (
    *(_swap, _swap, _swap, _drop, _move, _add_key, _swap_flag, _swap_ids, _shuffle_merges, _mix_steps, _mix_steps),
)


def _damaged(text: str, rng: random.Random) -> str:
    """Truncate the text, or change, double or remove a character."""
    place = rng.randrange(max(1, len(text)))
    rest = text[place + 1 :]
    new = rng.choice(("", rng.choice('{}[]",:0e\\'), "\0", text[place : place + 1] * 2))
    return text[:place] + new + rng.choice((rest, rest, rest, ""))
