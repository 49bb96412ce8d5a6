"""Forge run directories and adapters as an untrusted source might: each gets one fault, and `seal` makes its digests
valid.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import os
import random
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch

from tests.faults.process import remove
from tests.forgeries import MUTATIONS, forged_tokenizers, written
from tinylm.config.run import RunConfig
from tinylm.run_directory.weights import digest
from tinylm.text.tokenizer import Tokenizer

Forgery = tuple[str, Callable[[], object]]  # a description of the fault, and a function that makes it
Forge = Callable[[random.Random, Path, Path], Forgery]  # of a random generator, the model and the folder outside

DEPTH = 100_000
NAN, INFINITY = float("nan"), float("inf")
RUN_FILES = (
    *("config.json", "tokenizer.json", "metrics.jsonl", "last/state.json", "last/manifest.json", "last"),
    *("model.safetensors", "last/model.safetensors", "last/optimizer.safetensors"),
)
TEMPORARY_NAMES = (  # names that a run or its replacement may use for a while
    *("config.json.tmp", "metrics.jsonl.tmp", "model.safetensors.tmp", "tokenizer.json.tmp", "last.new", "last.old"),
    *("tokens", "../.evil.tinylm-lock", "../.evil.tinylm-new", "../.evil.tinylm-old"),
)
OPTIONAL_FILES = {"special_tokens_map.json", "generation_config.json", "chat_template.jinja"}  # of a HF folder
TEXTS = ("", "x", "0", "auto", "\x1b]0;owned\x07\x1b[31m", "\ud800", "\0", "../../outside/folder", "\u202e")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 0.0, -0.5, 1e-320, 1e308, NAN, INFINITY, -INFINITY),
    *(1 << 20, (1 << 20) + 1, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 10**400, *TEXTS, "a" * 100_000),
    *([], [[]], [0], [-1], [1] * 5000, {}, {"a": 1}, ["x", None, {}]),
)


def seal(run: Path) -> None:
    """Recompute the digests in all files of a run or an adapter that can be parsed."""
    values: dict[str, Any] = {}
    with contextlib.suppress(Exception):
        values = json.loads((run / "config.json").read_text())
        values.pop("digest", None)
    with contextlib.suppress(Exception):
        values["tokenizer"]["sha256"] = Tokenizer.load(run / "tokenizer.json").sha256
    with contextlib.suppress(Exception):
        write_config(run, values)
    for file in (*run.glob("*model.safetensors"), *run.glob("last/*model.safetensors")):
        with contextlib.suppress(Exception):
            tensors, metadata = read_tensors(file)
            step, val_loss = int(metadata["step"]), json.loads(metadata["val_loss"])
            metadata["digest"] = digest(tensors, RunConfig.from_json(values), step, val_loss)
            safetensors.torch.save_file(tensors, file, metadata)
    with contextlib.suppress(Exception):
        names = dict(json.loads((run / "last/manifest.json").read_text()))
        fresh = {name: hashlib.sha256((run / "last" / name).read_bytes()).hexdigest() for name in names}
        (run / "last/manifest.json").write_text(json.dumps(fresh))


def write_config(run: Path, values: dict[str, Any]) -> None:
    sealed = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    (run / "config.json").write_text(json.dumps({**values, "digest": sealed}))


def read_tensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safetensors.safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118


def write(path: Path, content: str | bytes) -> None:
    """Write a file, also with half a surrogate pair in its text."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))


# Values in JSON.


def json_files(run: Path) -> list[str]:
    """The JSON files of a run, an adapter or a Hugging Face folder."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*.json*") if path.is_file())


def forge_value(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace or delete a value of a JSON file, or add one."""
    file = rng.choice(json_files(run))
    lines = (run / file).read_text().splitlines() if file.endswith(".jsonl") else [(run / file).read_text()]
    index = rng.randrange(len(lines))
    root = json.loads(lines[index])
    parent, key = rng.choice(_places(root))
    value = rng.choice(VALUES)
    how = rng.choice(("change", "change", "change", "change", "delete", "add"))
    if how == "delete":
        del parent[key]
    elif how == "add" and isinstance(parent, dict):
        parent["another"] = value
    else:
        parent[key] = value
    lines[index] = json.dumps(root)
    return f"{file}: {how} {key} ({repr(value)[:40]})", lambda: write(run / file, "\n".join(lines))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every element of a JSON value: its container and its key or index; of large containers, only some."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    keys = keys[:: len(keys) // 10] if len(keys) > 30 else keys
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def forge_text(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace a JSON file by deeply nested, huge, empty or binary content, or repeat one of its fields."""
    file = rng.choice(json_files(run))
    content = (run / file).read_bytes()
    deep, twice = b"[" * DEPTH + b"]" * DEPTH, json.dumps(rng.choice(VALUES)).encode()
    name = rng.choice([*json.loads(content or b"{}"), "model_type"]) if file.endswith(".json") else "step"
    entry = b'"' + name.encode() + b'": ' + twice
    contents = {
        **{text: text.encode() for text in ("", "null", "[]", "7", '{"step": ' + "9" * 10_000 + "}")},
        "UTF-16": "{}".encode("utf-16"),
        "not UTF-8": b'{"a": "\xff\xfe"}',
        "zeros": bytes(1000),
        "deep, open": b"[" * DEPTH,
        "deep": deep,
        "deep objects": b'{"a":' * DEPTH + b"1" + b"}" * DEPTH,
        "deep in an object": content.replace(b"{", b'{"deep": ' + deep + b",", 1),
        "cut": content[: rng.randrange(1, 60)],
        "twice": content * 2,
        "80 MB": b'{"a": "' + b"x" * (80 << 20) + b'"}',
        f"{name} twice, first": content.replace(b"{", b"{" + entry + b", ", 1),
        f"{name} twice, last": content.rstrip().removesuffix(b"}") + b", " + entry + b"}",
    }
    how = rng.choice(sorted(contents))
    return f"{file}: {how[:60]}", lambda: write(run / file, contents[how])


def forge_path(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace a path that the run records, usually by one outside the run."""
    values = json.loads((run / "config.json").read_text())
    values.pop("digest", None)
    fields = [("data", name) for name in ("corpus", "val_corpus") if values["data"]]
    section, name = rng.choice(fields + ([("adapter", "base")] if values.get("adapter") else []))
    fifo = run.parent / "pipe"
    inside = (str(outside), str(outside / "folder"), str(outside / "secret.txt"), "../../../outside/folder", "..")
    others = (str(fifo), "", ".", "~", "\0", "x" * 5000, "-", "tokens/../../good", "C:\\x")
    path = rng.choice((*inside, "/dev/zero", "/dev/stdin", *others))
    values[section][name] = [path] if name.endswith("corpus") else path
    if values["data"]:  # neither in the run nor in the cache: only the path could help
        values["data"] |= {"tokens_in_run": False, "fingerprint": "0" * 64}

    def apply() -> None:
        if path == str(fifo):
            os.mkfifo(fifo)
        write_config(run, values)

    return f"{name} is {path[:60]!r}", apply


# Links and special files.


def forge_place(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Put a link, a FIFO, a device, a socket, a sparse file or a folder where a file is or will be written, or in place
    of a foreign model itself; or a file in place of a folder; or delete it.
    """
    kinds = ("fifo", "fifo", "folder", "file", "device", "socket", "sparse", "missing")
    kind = "link" if rng.random() < 2 / 3 else rng.choice(kinds)
    if (run / "last").exists():
        name = rng.choice((*RUN_FILES, *(TEMPORARY_NAMES * 2 if kind == "link" else TEMPORARY_NAMES[:7])))
    elif run.is_file() or rng.random() < 0.2:
        name = "."
    else:
        name = rng.choice(sorted({path.name for path in run.iterdir()} | OPTIONAL_FILES))
    others = [outside / name for name in ("secret.txt", "secret.json", "folder", "new")]
    target = rng.choice([*others, *map(Path, ("/dev/zero", "/dev/stdin", "..", (run / name).name)), run / name])

    def apply() -> None:
        path = run / name
        remove(path)
        if kind == "link":
            path.symlink_to(target)
        elif kind in ("fifo", "socket"):
            os.mknod(path, 0o600 | (stat.S_IFIFO if kind == "fifo" else stat.S_IFSOCK))
        elif kind == "folder":
            path.mkdir()
        elif kind == "device":
            try:
                os.mknod(path, 0o20666, os.makedev(1, 5))
            except OSError:  # only root may make a device
                path.symlink_to("/dev/zero")
        elif kind != "missing":
            with path.open("wb") as file:
                file.truncate(1 << 27 if kind == "sparse" else 1)

    return f"{name} is a {kind}{f' to {target}' if kind == 'link' else ''}", apply


# Tokens and tensors.


def forge_tokens(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Give a token folder another dtype, a wrong count, unknown ids or no ids, in one of 1 to 3 files."""
    part, how = rng.choice(("train", "val")), rng.choice(("dtype", "dtype", "ids", "ids", "tokens", "empty"))
    dtypes = ("O", "V8", "U4", "S10", "f8", "f2", "i8", "u8", "<u2", ">u4", "?", "c16", "M8[s]", "i4,f4", "uint8")
    dtype = rng.choice(dtypes)
    count = rng.choice((-1, 0, 1, 1 << 40, "5", None, 2.0))
    shards = rng.choice((1, 1, 2, 3))

    def apply() -> None:
        index = json.loads((run / "tokens/tokens.json").read_text())
        ids = np.frombuffer((run / f"tokens/{part}.bin").read_bytes(), index[part]["dtype"])
        pieces = [piece.tobytes() for piece in np.array_split(ids, shards)]
        records = [{**index[part], "tokens": len(piece) // ids.itemsize} for piece in pieces]
        record = records[-1]  # the forged one
        if how == "dtype":
            record["dtype"] = dtype
            with contextlib.suppress(TypeError, ValueError):
                record["tokens"] = len(pieces[-1]) // np.dtype(dtype).itemsize
                pieces[-1] = pieces[-1][: record["tokens"] * np.dtype(dtype).itemsize]
        elif how == "ids":
            forged = np.frombuffer(pieces[-1], ids.dtype).copy()
            forged[rng.randrange(len(forged)) :] = rng.choice((255, np.iinfo(ids.dtype).max, 200))
            pieces[-1] = forged.tobytes()
        elif how == "tokens":
            record["tokens"] = count
        else:
            pieces[-1], record["tokens"] = b"", 0
        for number, (piece, one) in enumerate(zip(pieces, records, strict=True)):
            file = run / "tokens" / (f"{part}-{number:05}.bin" if number else f"{part}.bin")
            file.write_bytes(piece)
            one |= {"sha256": hashlib.sha256(piece).hexdigest()}
        index[part] = records if shards > 1 else record
        (run / "tokens/tokens.json").write_text(json.dumps(index))
        values = json.loads((run / "config.json").read_text())
        values.pop("digest")
        values["data"]["tokens_in_run"] = True
        with contextlib.suppress(TypeError):
            values["data"][f"{part}_tokens"] = max(0, sum(one["tokens"] for one in records))
        write_config(run, values)

    return f"tokens/{part} {shards}: {how} {dtype if how == 'dtype' else count if how == 'tokens' else ''}", apply


def forge_tensors(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Change the name, shape, dtype or values of a tensor, delete it or add one."""
    file = rng.choice([*run.glob("*.safetensors"), *run.glob("last/*.safetensors")])
    tensors, metadata = read_tensors(file)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    dtypes = (torch.int64, torch.complex64, torch.bool, torch.float64, torch.bfloat16, torch.float8_e4m3fn)
    changed: dict[str, Callable[[], torch.Tensor]] = {
        **{str(dtype): functools.partial(tensor.to, dtype) for dtype in dtypes},
        "transposed": lambda: tensor.T.contiguous() if tensor.ndim == 2 else tensor[None],
        "flat": lambda: tensor.reshape(-1),
        "empty": lambda: tensor.new_zeros(0),
        "scalar": lambda: tensor.new_zeros(()),
        "longer": lambda: torch.cat([tensor, tensor]) if tensor.ndim else tensor[None],
        **{f"{n}": functools.partial(torch.full_like, tensor.float(), n) for n in (NAN, INFINITY, 1e38)},
    }
    names = {"extra": "another.weight", "renamed": f"{name}.0", "control characters": f"\x1b[31m{name}"}
    names |= {"line break": "a\nError: b", "long name": "a" * 100_000, "no name": "", "separators": "\u202e\x85\u2028"}
    how = rng.choice((*changed, *names, "missing"))

    def apply() -> None:
        if how in changed:
            tensors[name] = changed[how]()
        elif how == "extra":
            tensors[names[how]] = torch.zeros(3)
        else:
            moved = tensors.pop(name)
            if how in names:
                tensors[names[how]] = moved
        safetensors.torch.save_file(tensors, file, metadata)

    return f"{file.relative_to(run)}: {name} is {how}", apply


def forge_header(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Replace the header of a safetensors file."""
    file = rng.choice([*run.glob("*.safetensors"), *run.glob("last/*.safetensors")])
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    first = next(name for name in header if name != "__metadata__")
    kinds = {"data_offsets": ([0, 1 << 60], [0, 4]), "shape": ([-1, 4], [1 << 62, 1 << 62]), "dtype": ("O",)}
    headers: dict[str, Any] = {
        "a huge length": None,
        "no metadata": {name: value for name, value in header.items() if name != "__metadata__"},
        "a list": [],
        **{f"{k} {v}": {**header, first: {**header[first], k: v}} for k, values in kinds.items() for v in values},
    }
    several = list(headers) * 3
    for key in ("step", "val_loss", "digest", "format"):
        for value in ("", "x", "-1", "1e999", "NaN", "Infinity", "null", "[]", '"x"', "9" * 5000, "[" * DEPTH):
            metadata = {**header.get("__metadata__", {}), key: value}
            headers[f"{key} = {value[:10]}"] = {**header, "__metadata__": metadata}
    how = rng.choice((*several, *headers))
    text = json.dumps(headers[how]).encode()
    length = 1 << 63 if headers[how] is None else len(text)
    forged = struct.pack("<Q", length) + text + content[8 + size :]
    return f"{file.relative_to(run)}: {how}", lambda: write(file, forged)


# Tokenizers.


def forge_tokenizer(rng: random.Random, run: Path, outside: Path) -> Forgery:
    """Change the tokenizer, or replace it by a mutation of one built like a published model's (tests/forgeries.py)."""
    if rng.random() < 0.5:
        name, text = next(itertools.islice(forged_tokenizers(0), rng.randrange(400), None))
    else:
        layout = json.loads((run / "tokenizer.json").read_text())
        mutation = rng.choice(MUTATIONS)
        mutation(layout, rng)
        name, text = mutation.__name__.strip("_"), written(layout)
    return f"tokenizer: {name}", lambda: write(run / "tokenizer.json", text)


FORGERIES: tuple[Forge, ...] = (
    *(forge_tokenizer,) * 6,
    *(forge_value,) * 4,
    *(*(forge_place,) * 3, forge_text, forge_path, forge_tokens, forge_tensors, forge_header),
)
