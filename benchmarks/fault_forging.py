"""Forge run directories as an untrusted source might: each gets one fault, and `seal` makes its digests valid."""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from tinylm.run_config import RunConfig
from tinylm.run_directory.weights import digest
from tinylm.text.tokenizer import Tokenizer

DEPTH = 100_000
NAN, INFINITY = float("nan"), float("inf")
JSON_FILES = ("config.json", "tokenizer.json", "metrics.jsonl", "last/state.json", "last/manifest.json")
RUN_FILES = (*JSON_FILES, "model.safetensors", "last/model.safetensors", "last/optimizer.safetensors")
TEMPORARY_NAMES = (  # names that a run or its replacement may use for a while
    *("config.json.tmp", "metrics.jsonl.tmp", "model.safetensors.tmp", "tokenizer.json.tmp"),
    *("last.new", "last.old", "tokens", "../.evil.tinylm-lock", "../.evil.tinylm-new", "../.evil.tinylm-old"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 0.0, -0.5, 1e-320, 1e308, NAN, INFINITY, -INFINITY),
    *(1 << 20, (1 << 20) + 1, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 10**400),
    *(
        "",
        "x",
        "0",
        "auto",
        "\x1b]0;owned\x07\x1b[31m",
        "\ud800",
        "\0",
        "../../outside/folder",
        "a" * 100_000,
        "\u202e",
    ),
    *([], [[]], [0], [-1], [1] * 5000, {}, {"a": 1}, ["x", None, {}]),
)
Forgery = tuple[str, Callable[[], None]]  # a description of the fault, and a function that makes it


def seal(run: Path) -> None:
    """Recompute the digests in all files of a run or an adapter that can be parsed."""
    values: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        values = json.loads((run / "config.json").read_text())
        values.pop("digest", None)
    with contextlib.suppress(Exception):
        tokenizer = Tokenizer.load(run / "tokenizer.json")
        values["tokenizer"]["sha256"] = tokenizer.sha256
    with contextlib.suppress(Exception):
        _write_config(run, values)
    with contextlib.suppress(Exception):
        config = RunConfig.from_json(values)
        for file in (*run.glob("*model.safetensors"), *run.glob("last/*model.safetensors")):
            with contextlib.suppress(Exception):
                _seal_weights(file, config)
    with contextlib.suppress(Exception):
        manifest = json.loads((run / "last/manifest.json").read_text())
        if isinstance(manifest, dict):
            fresh = {name: hashlib.sha256((run / "last" / name).read_bytes()).hexdigest() for name in manifest}
            (run / "last/manifest.json").write_text(json.dumps(fresh))


def _write_config(run: Path, values: dict[str, Any]) -> None:
    sealed = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (run / "config.json").write_text(json.dumps({**values, "digest": sealed}))


def _seal_weights(file: Path, config: RunConfig) -> None:
    with safetensors.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    step, val_loss = int(metadata["step"]), json.loads(metadata["val_loss"])
    metadata["digest"] = digest(tensors, config, step, val_loss)
    safetensors.torch.save_file(tensors, file, metadata)


# Values in JSON.


def forge_value(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace or delete a value of a JSON file, or add one."""
    file = rng.choice([name for name in (*JSON_FILES, *_more_json(run)) if (run / name).is_file()])
    lines = (run / file).read_text().splitlines() if file.endswith(".jsonl") else [(run / file).read_text()]
    index = rng.randrange(len(lines))
    root = json.loads(lines[index])
    parent, key = rng.choice(list(_places(root)))
    value = rng.choice(VALUES)
    how = rng.choice(("change", "change", "change", "change", "delete", "add"))

    def apply() -> None:
        if how == "delete":
            del parent[key]
        elif how == "add" and isinstance(parent, dict):
            parent["another"] = value
        else:
            parent[key] = value
        lines[index] = json.dumps(root)
        (run / file).write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")

    return f"{file}: {how} {key} ({repr(value)[:40]})", apply


def _more_json(run: Path) -> list[str]:
    return [str(path.relative_to(run)) for path in (*run.glob("*config.json"), *run.glob("tokens/*.json"))]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every element of a JSON value: its container and its key or index; of large containers, only some."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if len(keys) > 30:
        keys = keys[:: len(keys) // 10]
    found = []
    for key in keys:
        found += [(value, key), *_places(value[key])]
    return found


def forge_text(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace a JSON file by deeply nested, huge, empty or binary content."""
    file = rng.choice([name for name in (*JSON_FILES, *_more_json(run)) if (run / name).is_file()])
    contents = {
        "empty": b"",
        "null": b"null",
        "a list": b"[]",
        "a number": b"7",
        "deep lists": b"[" * DEPTH,
        "deep closed lists": b"[" * DEPTH + b"]" * DEPTH,
        "deep objects": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
        "deep in an object": (run / file)
        .read_bytes()
        .replace(b"{", b'{"deep": ' + b"[" * DEPTH + b"]" * DEPTH + b",", 1),
        "UTF-16": "{}".encode("utf-16"),
        "not UTF-8": b'{"a": "\xff\xfe"}',
        "zeros": bytes(1000),
        "a long number": b'{"step": ' + b"9" * 10_000 + b"}",
        "cut": (run / file).read_bytes()[: rng.randrange(1, 60)],
        "twice": (run / file).read_bytes() * 2,
        "80 MB": b'{"a": "' + b"x" * (80 << 20) + b'"}',
    }
    name = rng.choice(sorted(contents))
    return f"{file}: {name}", lambda: _replace(run / file, contents[name])


def _replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


# Links and special files.


def forge_link(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Put a link where a file is or will be written."""
    name = rng.choice((*RUN_FILES, *TEMPORARY_NAMES, *TEMPORARY_NAMES, "last"))
    target = rng.choice(
        [
            outside / "secret.txt",
            outside / "secret.json",
            outside / "folder",
            outside / "new",
            Path("/dev/zero"),
            Path("/dev/stdin"),
            Path("loop"),
        ]
    )

    def apply() -> None:
        path = run / name
        clear(path)
        path.symlink_to(path.name if target == Path("loop") else target)

    return f"{name} is a link to {target}", apply


def forge_kind(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace a file by a FIFO, a device, a socket or a folder, or a folder by a file, or delete it."""
    kind = rng.choice(("fifo", "fifo", "folder", "file", "zero", "socket", "missing"))
    name = rng.choice((*RUN_FILES, *TEMPORARY_NAMES[:7], "last", *_more_json(run)))

    def apply() -> None:
        path = run / name
        clear(path)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "file":
            path.write_text("x")
        elif kind == "zero":
            try:
                os.mknod(path, 0o20666, os.makedev(1, 5))
            except OSError:  # only root may make a device
                path.symlink_to("/dev/zero")
        elif kind == "socket":
            make_socket(path)

    return f"{name} is a {kind}", apply


def make_socket(path: Path) -> None:
    import socket

    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def clear(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def forge_path(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace a path that the run records, usually by one outside the run."""
    values = json.loads((run / "config.json").read_text())
    values.pop("digest", None)
    fields = [(values["data"], name) for name in ("corpus", "val_corpus")] if values["data"] else []
    if values.get("adapter"):
        fields.append((values["adapter"], "base"))
    section, name = rng.choice(fields)
    fifo = run.parent / "pipe"
    path = rng.choice(
        [
            *(str(outside), str(outside / "folder"), str(outside / "secret.txt"), "../../../outside/folder", ".."),
            *("/dev/zero", "/dev/stdin", str(fifo), "", ".", "~", "\0", "x" * 5000, "-", "tokens/../../good", "C:\\x"),
        ]
    )

    def apply() -> None:
        if path == str(fifo):
            os.mkfifo(fifo)
        section[name] = [path] if name.endswith("corpus") else path
        if values["data"]:
            values["data"]["tokens_in_run"] = False  # nor in the cache: only the path could help
            values["data"]["fingerprint"] = "0" * 64
        _write_config(run, values)

    return f"{name} is {path[:60]!r}", apply


# Tokens and tensors.


def forge_tokens(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Give a token folder another dtype, a wrong count, unknown ids or no ids, in one of 1 to 3 files."""
    part = rng.choice(("train", "val"))
    dtype = rng.choice(
        ("O", "V8", "U4", "S10", "f8", "f2", "i8", "u8", "<u2", ">u4", "?", "c16", "M8[s]", "i4,f4", "uint8")
    )
    how = rng.choice(("dtype", "dtype", "ids", "ids", "tokens", "empty"))
    count = rng.choice((-1, 0, 1, 1 << 40, "5", None, 2.0))
    shards = rng.choice((1, 1, 2, 3))

    def apply() -> None:
        index = json.loads((run / "tokens/tokens.json").read_text())
        records = _split_tokens(run / "tokens", part, index[part], shards)
        index[part] = records if shards > 1 else records[0]
        data, record = run / f"tokens/{_shard_name(part, shards - 1)}", records[-1]
        if how == "dtype":
            record["dtype"] = dtype
            with contextlib.suppress(TypeError, ValueError):
                size = np.dtype(dtype).itemsize
                data.write_bytes(data.read_bytes()[: len(data.read_bytes()) // size * size])
                record["tokens"] = len(data.read_bytes()) // size
        elif how == "ids":
            ids = np.frombuffer(data.read_bytes(), record["dtype"]).copy()
            ids[rng.randrange(len(ids)) :] = rng.choice((255, np.iinfo(ids.dtype).max, 200))
            data.write_bytes(ids.tobytes())
        elif how == "tokens":
            record["tokens"] = count
        else:
            data.write_bytes(b"")
            record["tokens"] = 0
        record["sha256"] = hashlib.sha256(data.read_bytes()).hexdigest()
        record["changed"] = data.stat().st_mtime_ns
        (run / "tokens/tokens.json").write_text(json.dumps(index))
        values = json.loads((run / "config.json").read_text())
        values.pop("digest")
        values["data"]["tokens_in_run"] = True
        with contextlib.suppress(TypeError):
            if (total := sum(record["tokens"] for record in records)) >= 0:
                values["data"][f"{part}_tokens"] = total
        _write_config(run, values)

    return f"tokens/{part} {shards}: {how} {dtype if how == 'dtype' else count if how == 'tokens' else ''}", apply


def _shard_name(part: str, index: int) -> str:
    return f"{part}-{index:05}.bin" if index else f"{part}.bin"


def _split_tokens(folder: Path, part: str, record: dict[str, Any], shards: int) -> list[dict[str, Any]]:
    """Divide the ids of a part among several files. Returns their records, with valid digests."""
    records = []
    ids = np.frombuffer((folder / f"{part}.bin").read_bytes(), record["dtype"])
    for index, piece in enumerate(np.array_split(ids, shards)):
        (folder / _shard_name(part, index)).write_bytes(piece.tobytes())
        records.append({**record, "tokens": len(piece), "sha256": hashlib.sha256(piece.tobytes()).hexdigest()})
    return records


def forge_tensors(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Change the name, shape, dtype or values of a tensor, delete it or add one."""
    file = rng.choice([*run.glob("*.safetensors"), *run.glob("last/*.safetensors")])
    with safetensors.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    changed: dict[str, Callable[[], Any]] = {
        "int64": lambda: tensor.to(torch.int64),
        "complex": lambda: tensor.to(torch.complex64),
        "bool": lambda: tensor.to(torch.bool),
        "float64": lambda: tensor.double(),
        "bf16": lambda: tensor.bfloat16(),
        "float8": lambda: tensor.to(torch.float8_e4m3fn),
        "transposed": lambda: tensor.T.contiguous() if tensor.ndim == 2 else tensor[None],
        "flat": lambda: tensor.reshape(-1),
        "empty": lambda: tensor.new_zeros(0),
        "scalar": lambda: tensor.new_zeros(()),
        "longer": lambda: torch.cat([tensor, tensor]) if tensor.ndim else tensor[None],
        "NaN": lambda: torch.full_like(tensor, NAN) if tensor.is_floating_point() else tensor,
        "infinity": lambda: torch.full_like(tensor, INFINITY) if tensor.is_floating_point() else tensor,
        "huge": lambda: torch.full_like(tensor, 1e38) if tensor.is_floating_point() else tensor,
    }
    how = rng.choice((*changed, "missing", "extra", "renamed", "control characters"))

    def apply() -> None:
        if how in changed:
            tensors[name] = changed[how]()
        elif how == "extra":
            tensors["another.weight"] = torch.zeros(3)
        else:
            moved = tensors.pop(name)
            if how != "missing":
                tensors["\x1b[31m" + name if how == "control characters" else f"{name}.0"] = moved
        safetensors.torch.save_file(tensors, file, metadata)

    return f"{file.relative_to(run)}: {name} is {how}", apply


def forge_header(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace the header of a safetensors file."""
    file = rng.choice([*run.glob("*.safetensors"), *run.glob("last/*.safetensors")])
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    first = next(name for name in header if name != "__metadata__")
    headers: dict[str, Any] = {
        "a huge length": None,
        "no metadata": {name: value for name, value in header.items() if name != "__metadata__"},
        "offsets beyond": {**header, first: {**header[first], "data_offsets": [0, 1 << 60]}},
        "overlap": {**header, first: {**header[first], "data_offsets": [0, 4]}},
        "a negative shape": {**header, first: {**header[first], "shape": [-1, 4]}},
        "a huge shape": {**header, first: {**header[first], "shape": [1 << 62, 1 << 62]}},
        "an unknown kind": {**header, first: {**header[first], "dtype": "O"}},
        "a list": [],
    }
    for key in ("step", "val_loss", "digest", "format"):
        for value in ("", "x", "-1", "1e999", "NaN", "Infinity", "null", "[]", '"x"', "9" * 5000, "[" * DEPTH):
            metadata = {**header.get("__metadata__", {}), key: value}
            headers[f"{key} = {value[:10]}"] = {**header, "__metadata__": metadata}
    how = rng.choice((*list(headers)[:8] * 3, *headers))

    def apply() -> None:
        text = json.dumps(headers[how]).encode()
        length = 1 << 63 if headers[how] is None else len(text)
        file.write_bytes(struct.pack("<Q", length) + text + content[8 + size :])

    return f"{file.relative_to(run)}: {how}", apply


# Tokenizers.

PARTS: dict[str, list[Any]] = {
    "normalizer": [
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Precompiled", "precompiled_charsmap": ""},
        {"type": "Precompiled", "precompiled_charsmap": "/////w=="},
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"},
        {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
        {"type": "Replace", "pattern": {"String": ""}, "content": "xx"},
        {"type": "Prepend", "prepend": "a" * 100_000},
        {"type": "Sequence", "normalizers": []},
        {"type": "NFKC"},
        {"type": "Nmt"},
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        {"type": "Lowercase"},
    ],
    "pre_tokenizer": [
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": "(?:e+)*+x|(.*.*)*y"}, "behavior": "Removed", "invert": True},
        {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False},
        {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Removed", "invert": False},
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        {"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}] * 1000},
        {"type": "FixedLength", "length": 0},
        {"type": "FixedLength", "length": 1 << 62},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ],
    "decoder": [
        {"type": "Strip", "content": "a", "start": 1 << 60, "stop": 1 << 60},
        {"type": "WordPiece", "prefix": "#" * 10_000, "cleanup": True},
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "BPEDecoder", "suffix": ""},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
    "post_processor": [
        {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}},
        {"type": "BertProcessing", "sep": ["x", 1 << 31], "cls": ["y", 0]},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ],
    "truncation": [{"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5}],
    "padding": [
        {
            "strategy": {"Fixed": 1 << 40},
            "direction": "Right",
            "pad_to_multiple_of": 0,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }
    ],
}


def forge_tokenizer(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Change the tokenizer: a part that tinylm does not support or that crashes the library, or an invalid value."""
    layout = json.loads((run / "tokenizer.json").read_text())
    model = layout["model"]
    how = rng.choice(("part", "part", "part", "added", "model", "vocabulary", "deep"))
    part = rng.choice(sorted(PARTS))
    value = rng.choice(PARTS[part])
    number = rng.choice((-1, 0, 1 << 20, (1 << 32) - 1, 1 << 32, 1 << 64, "0"))
    field = rng.choice(
        [
            ("unk_token", "absent"),
            ("dropout", 0.5),
            ("dropout", -1),
            ("continuing_subword_prefix", "a" * 10_000),
            ("end_of_word_suffix", "é" * 100),
            ("fuse_unk", "x"),
            ("byte_fallback", True),
            ("ignore_merges", True),
            ("merges", [["a", "b"]]),
            ("merges", [["", ""]]),
            ("type", "Unigram"),
            ("type", "WordPiece"),
            ("type", "Nothing"),
            ("vocab", []),
            ("vocab", {}),
        ]
    )

    def apply() -> None:
        if how == "part":
            layout[part] = value
        elif how == "added":
            flags = {"single_word": False, "lstrip": True, "rstrip": True, "normalized": True, "special": False}
            content = rng.choice(("", "e", " ", "a" * 100_000, "\x1b[31m"))
            layout["added_tokens"] = [*layout["added_tokens"], {"id": number, "content": content, **flags}]
        elif how == "model":
            model[field[0]] = field[1]
        elif how == "vocabulary":
            model["vocab"][rng.choice(sorted(model["vocab"]))] = number
        else:
            for _ in range(300):
                layout["normalizer"] = {"type": "Sequence", "normalizers": [layout["normalizer"] or {"type": "NFC"}]}
        (run / "tokenizer.json").write_text(json.dumps(layout))

    said = {"part": f"{part} {value}", "added": str(number), "model": str(field), "vocabulary": str(number)}.get(
        how, ""
    )
    return f"tokenizer: {how} {said[:100]}", apply


def forge_published_tokenizer(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace the tokenizer by a mutation of one built like a published model's (tests/forgeries.py)."""
    forgeries = importlib.import_module("tests.forgeries")
    name, text = next(itertools.islice(forgeries.forged_tokenizers(0), rng.randrange(400), None))
    return f"tokenizer: {name}", lambda: _replace(run / "tokenizer.json", text.encode(errors="surrogatepass"))


HAS_PUBLISHED = importlib.util.find_spec("tests.forgeries") is not None
FORGERIES = (
    *((forge_published_tokenizer,) * 3 if HAS_PUBLISHED else ()),
    *(forge_value, forge_value, forge_value, forge_value, forge_text, forge_link, forge_link, forge_kind),
    *(forge_path, forge_tokens, forge_tensors, forge_header, forge_tokenizer, forge_tokenizer, forge_tokenizer),
)
