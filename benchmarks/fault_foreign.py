"""Forge models of other tools: Hugging Face folders, GGUF files and PEFT adapters, each with one fault."""

import importlib
import json
import os
import random
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fault_forging
import numpy as np
import safetensors.torch
from fault_forging import INFINITY, NAN, VALUES, Forgery

from tinylm import files, streams
from tinylm.formats import gguf_header

FOLDERS = {  # name: case of family_peers.py
    "llama": "llama 3 scaling",
    "yarn": "qwen3 with biases, windows by layer, yarn",
    "gpt2": "gpt2",
    "gemma": "gemma3_text with scaling, scalar, pattern",
    "mixture": "qwen3_moe",
    "neox": "gpt_neox",
}
FILES = {"llama.gguf": "llama 3", "gpt2.gguf": "gpt2", "gemma.gguf": "gemma3", "mixture.gguf": "mixtral"}
SENTENCEPIECE = "pieces.gguf"
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {  # name: the base, and fields of LoraConfig
    "lora": ("llama", {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2}}),
    "saved": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True}),
    "experts": ("mixture", {"target_modules": ["q_proj"], "alpha_pattern": {"layers.1.*": 9}}),
}
CHAT = {"messages": [{"role": "user", "content": "the bee"}, {"role": "assistant", "content": "sees the moon"}]}
LONGEST = 1000  # characters of the longest allowed error message
KIBIBYTE = 1024 if sys.platform.startswith("linux") else 1
MOST_RESIDENT = 3 << 30  # bytes, of which 0.7 GB are those of the process that forks
SUBJECTS = (  # what an error may name instead of the forged model
    *(
        "tensor",
        "tokenizer",
        "template",
        "conversation",
        "special token",
        "this model",
        "the model",
        "The text",
        "loss",
        "logits",
    ),
    "--",
)
CONTROLS = {*map(chr, [*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F)])}


def make_models(folder: Path) -> None:
    """Write all models. Imports transformers, peft and gguf, so it is called in a process of its own."""
    import family_peers

    gguf_files = importlib.import_module("tests.formats.gguf_files")
    peft_adapters = importlib.import_module("tests.formats.peft_adapters")
    for name, case in FOLDERS.items():
        family_peers.save_peer(case, folder / name, **({"max_shard_size": "20KB"} if name == "yarn" else {}))
    for name, case in FILES.items():
        gguf_files.save_peer(case, folder / name)
    peer, pieces = gguf_files.make_peer("llama"), _sentencepiece(gguf_files.VOCABULARY)
    metadata = {
        key: value for key, value in gguf_files.peer_metadata("llama", peer).items() if not key.startswith("tokenizer")
    }
    tensors = dict(importlib.import_module("gguf_peers").peer_tensors("llama", peer))
    gguf_files.write_file(folder / SENTENCEPIECE, "llama", {**metadata, **pieces}, tensors)
    for name, (base, fields) in ADAPTERS.items():
        peft_adapters.make_adapter(family_peers.make_peer(FOLDERS[base]), folder / name, **fields)
    (folder.parent / "chat.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 4)


def _sentencepiece(size: int) -> dict[str, Any]:
    """The metadata of a SentencePiece tokenizer with byte fallback."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thebonsamr", "▁t", "he", "▁the"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    padding = size - len(tokens)
    values: dict[str, Any] = {
        "model": "llama",
        "tokens": [*tokens, *(f"[PAD{i}]" for i in range(padding))],
        "token_type": [*types, *[5] * padding],
        "scores": [float(-i) for i in range(size)],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    return {**{f"tokenizer.ggml.{key}": value for key, value in values.items()}, "tokenizer.chat_template": template}


# Hugging Face folders and PEFT adapters.

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 3, 7, 1e-320, 1e-5, 0.5, 1e300, -2.5, NAN, INFINITY, 10**9, 1 << 40, 10**30, 10**400),
    *("8", None, True, [4], {}, "\ud800"),
)
ROPE: tuple[Any, ...] = (
    *({"rope_type": "linear", "factor": n} for n in NUMBERS[:16]),
    *({"rope_type": "yarn", "factor": 4.0, "beta_slow": n} for n in NUMBERS[:16]),
    *({"rope_type": "yarn", "factor": 4.0, "mscale": n, "mscale_all_dim": -14.426950408889634} for n in NUMBERS[:16]),
    *({"rope_type": "yarn", "factor": n, "attention_factor": 1e-320} for n in NUMBERS[:16]),
    *({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": n} for n in NUMBERS[:16]),
    *({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": n} for n in NUMBERS[:16]),
    *({"rope_theta": n} for n in NUMBERS),
    *({"full_attention": value, "sliding_attention": value} for value in (*VALUES[:12], {"rope_theta": 0})),
    {"rope_type": "\x1b[31m\ud800"},
    {"rope_type": ["yarn"]},
    {"longrope": {"a": [1] * 1000}},
)
SIZES = ("hidden", "layer", "head", "vocab", "expert", "embd", "position", "context", "intermediate", "inner", "window")


def forge_field(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Replace a number or the scaling of RoPE in config.json by an absurd value."""
    values = json.loads((model / "config.json").read_text())
    sizes = [name for name in values if any(part in name for part in SIZES)]
    how = rng.choice(("size", "size", "number", "rope", "rope", "scaling"))
    if how == "rope":
        name, value = "rope_parameters", rng.choice(ROPE)
        value = {**values.get("rope_parameters", {}), **value} if rng.random() < 0.6 else value
    elif how == "scaling":
        name, value = "rope_scaling", rng.choice(ROPE)
    else:
        numbers = [name for name, value in values.items() if type(value) in (int, float)]
        name, value = rng.choice(sizes if how == "size" else numbers), rng.choice(NUMBERS)

    def apply() -> None:
        (model / "config.json").write_text(json.dumps({**values, name: value}))

    return f"config.json: {name} = {str(value)[:80]}", apply


def forge_duplicate(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Repeat a field of a JSON file with another value."""
    path = rng.choice([path for path in _files(model) if path.suffix == ".json"])
    text = path.read_text()
    name = rng.choice([*json.loads(text), "model_type"])
    value = json.dumps(rng.choice(VALUES))
    first = rng.random() < 0.5
    begin, end = f'{{"{name}": {value}, ', f', "{name}": {value}}}'
    changed = text.replace("{", begin, 1) if first else text.rstrip().removesuffix("}") + end
    return f"{path.name}: {name} twice, {'first' if first else 'last'} {value[:40]}", lambda: _write(path, changed)


def forge_name(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Give a tensor a name with a line break, a very long one or an empty one."""
    file = rng.choice([path for path in _files(model) if path.suffix == ".safetensors"])
    tensors = safetensors.torch.load_file(file)
    old, new = (
        rng.choice(sorted(tensors)),
        rng.choice(("a\nError: b", "\r\n", "a" * 100_000, "", "\u202e", "\x85\u2028")),
    )

    def apply() -> None:
        tensors[new] = tensors.pop(old)
        safetensors.torch.save_file(tensors, file, {"format": "pt"})

    return f"{file.name}: {old} is called {new[:20]!r}", apply


TEMPLATES = (
    "{% for i in range(10**12) %}{{ i }}{% endfor %}",
    "{{ 'a' * 10**12 }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0].content.__init__.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{{ raise_exception('\x1b]0;owned\x07\ud800') }}",
    "{% if",
    "{{ 1 / 0 }}",
    "{{ messages | tojson | upper }}" * 1000,
    "(" * 5000 + "{{" + "(" * 5000,
    "{{ '%1000000000d' % 5 }}",
    "{{ 'x'.center(10**12) }}",
    "\ud800{{ messages[0].content }}",
    "\x1b[31m{{ messages[0].content }}\u202e",
    "",
    "constant",
    "{{ messages[5].content }}",
    "{{ undefined.field }}",
    "{% generation %}{{ messages[1].content }}{% endgeneration %}" * 2,
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% for m in messages %}{{ m.content }}{{ strftime_now('%Y' * 100000) }}{% endfor %}",
    "x" * (2 << 20),
)


def forge_template(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Replace the chat template by a hostile one."""
    template = rng.choice(TEMPLATES)
    settings = model / "tokenizer_config.json"
    in_settings = rng.random() < 0.5

    def apply() -> None:
        if in_settings:
            (model / "chat_template.jinja").unlink(missing_ok=True)
            values = {**json.loads(settings.read_text()), "chat_template": template}
            settings.write_text(json.dumps(values))
        else:
            _write(model / "chat_template.jinja", template)

    return f"template {template[:50]!r} in {'tokenizer_config.json' if in_settings else 'a file'}", apply


def forge_special(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Replace a special token of tokenizer_config.json, or an id of config.json or generation_config.json."""
    file, name = rng.choice(
        [
            *(("tokenizer_config.json", f"{kind}_token") for kind in ("bos", "eos", "pad")),
            ("tokenizer_config.json", "add_bos_token"),
            *(
                (file, f"{kind}_token_id")
                for kind in ("bos", "eos")
                for file in ("config.json", "generation_config.json")
            ),
        ]
    )
    value = rng.choice((*VALUES, [1] * 100, [0, -5, 10**9], {"content": "\ud800"}, {"content": ["x"]}))

    def apply() -> None:
        path = model / file
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**values, name: value}))

    return f"{file}: {name} = {str(value)[:60]!r}", apply


PATTERNS = ("(a+)+b", "(.*.*)*x", "[", "(?R)", "x" * 5000, "(" * 500, "(?:.|..|...){99}y", "", "\ud800", "^", ".*", "*")


def forge_pattern(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Put an odd pattern of module names into adapter_config.json."""
    path, field = model / "adapter_config.json", rng.choice(("rank_pattern", "alpha_pattern"))
    pattern, number = rng.choice(PATTERNS), rng.choice(NUMBERS)

    def apply() -> None:
        path.write_text(json.dumps({**json.loads(path.read_text()), field: {pattern: number}}))

    return f"{field} {pattern[:40]!r}: {str(number)[:40]}", apply


def forge_index(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Change the file of a tensor in the index of shards; without an index, add one of files that do not exist."""
    path = model / "model.safetensors.index.json"
    values = json.loads(path.read_text()) if path.exists() else {"metadata": {}, "weight_map": {}}
    names = values["weight_map"]
    tensor = rng.choice([*names, "another.weight"])
    target = rng.choice(
        [
            *("../../outside/secret.txt", "/dev/zero", "model.safetensors.index.json", "absent.safetensors", "\ud800"),
            *(str(outside / "folder"), ".safetensors", "..", "", "a/b.safetensors", "\x1b[31m.safetensors", 7, None),
            *names.values(),
        ]
    )

    def apply() -> None:
        if path.exists():
            names[tensor] = target
        else:
            names.update({f"t{i}": f"s{i}.safetensors" for i in range(5000)})
            (model / "model.safetensors").unlink()
        path.write_text(json.dumps(values))

    return f"index: {tensor[:40]} in {str(target)[:40]!r}", apply


# Any file.


def _files(model: Path) -> list[Path]:
    return [model] if model.is_file() else sorted(path for path in model.rglob("*") if path.is_file())


def forge_bytes(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Change, delete or repeat bytes of a file."""
    path = rng.choice(_files(model))
    content = bytearray(path.read_bytes())
    how = rng.choice(("flip", "flip", "flip", "cut", "cut", "zeros", "more", "middle", "empty"))
    at = rng.randrange(min(len(content), rng.choice((16, 200, 5000, 1 << 30))))
    if how == "flip":
        for _ in range(rng.choice((1, 1, 8))):
            content[(at + rng.randrange(16)) % len(content)] ^= 1 << rng.randrange(8)
    elif how == "cut":
        del content[at:]
    elif how == "zeros":
        content[at : at + 64] = bytes(64)
    elif how == "more":
        content += bytes(rng.choice((1, 1000, 1 << 20)))
    elif how == "middle":
        del content[at : at + rng.choice((1, 8, 1000))]
    else:
        content.clear()
    return f"{path.name}: {how} at {at}", lambda: _write_bytes(path, bytes(content))


def forge_place(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Replace a file or the model itself by a link, a special file, a folder or a sparse file, or delete it."""
    extra = ["special_tokens_map.json", "generation_config.json", "chat_template.jinja", "model.safetensors.index.json"]
    inside = [model / name for name in extra] if model.is_dir() else []
    path = rng.choice([*_files(model), *inside, *([model] if rng.random() < 0.3 else [])])
    kind = rng.choice(
        ("loop", "loop", "link", "link", "fifo", "folder", "device", "socket", "missing", "sparse", "self")
    )
    target = rng.choice((outside / "secret.json", outside / "folder", outside / "new", Path("/dev/zero"), Path("..")))

    def apply() -> None:
        fault_forging.clear(path)
        if kind in ("loop", "self"):
            path.symlink_to(path.name if kind == "loop" else path)
        elif kind == "link":
            path.symlink_to(target)
        elif kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/stdin")
        elif kind == "socket":
            fault_forging.make_socket(path)
        elif kind == "sparse":
            with path.open("wb") as file:
                file.truncate(1 << 27)

    return f"{path.name} is a {kind}{f' to {target}' if kind == 'link' else ''}", apply


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def _write_bytes(path: Path, content: bytes) -> None:
    path.write_bytes(content)


# GGUF files, written without any check.

U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12
Value = tuple[int, Any]  # kind and value; of an array, the value is (kind of its items, items)
_LAYOUTS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", F64: "<d"}


def _text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(_value(item, one) for one in items)
    return struct.pack(_LAYOUTS[kind], value)


class Raw:
    """A parsed GGUF file: pairs of the metadata, and tensors as [name, shape reversed, type, offset, bytes]."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        header = gguf_header.parse_header(data)
        self.pairs: list[tuple[str | bytes, Value]] = [
            (key, _typed(value)) for key, value in header.metadata._values.items()
        ]
        self.tensors: list[list[Any]] = [
            [
                info.name,
                list(info.shape[::-1]),
                0 if info.type.name == "F32" else 1,
                0,
                data[info.offset :][: info.size],
            ]
            for info in header.tensors.values()
        ]
        self.version, self.counts = 3, (0, 0)
        end = 0
        for tensor in self.tensors:
            tensor[3] = end
            end += -(-len(tensor[4]) // 32) * 32

    def to_bytes(self) -> bytes:
        """The file. `counts` are added to the numbers of tensors and of keys."""
        parts = [b"GGUF", struct.pack("<I", self.version)]
        parts.append(struct.pack("<QQ", len(self.tensors) + self.counts[0], len(self.pairs) + self.counts[1]))
        for key, (kind, value) in self.pairs:
            parts += [_text(key), struct.pack("<I", kind), _value(kind, value)]
        for name, shape, kind, offset, _ in self.tensors:
            dimensions = struct.pack(f"<{len(shape)}Q", *(size % (1 << 64) for size in shape))
            parts += [_text(name), struct.pack("<I", len(shape)), dimensions, struct.pack("<IQ", kind, offset)]
        head = b"".join(parts)
        body = bytearray(-len(head) % 32)
        for *_, data in self.tensors:
            body += data + bytes(-len(data) % 32)
        return head + bytes(body)


def _typed(value: Any) -> Value:
    if isinstance(value, bool):
        return BOOL, value
    if isinstance(value, int):
        return U32, value
    if isinstance(value, float):
        return F32, value
    if isinstance(value, str):
        return STRING, value
    if isinstance(value, np.ndarray):
        kind = {"f": F32, "b": BOOL}.get(value.dtype.kind, I32)
        return ARRAY, (kind, value.tolist())
    return ARRAY, (STRING, value)


ODD: tuple[Value, ...] = (
    *((U32, n) for n in (0, 1, 3, 5, 7, 33, 1 << 20, (1 << 32) - 1)),
    *((U64, n) for n in (10**9, 1 << 40, 1 << 63, (1 << 64) - 1)),
    *((I32, n) for n in (-1, -(1 << 31))),
    *((F32, n) for n in (0.0, -1.0, 1e-40, 3e38, NAN, INFINITY)),
    *((F64, n) for n in (1e300, 1e-320, -INFINITY)),
    *((BOOL, n) for n in (0, 1, 7)),
    *((STRING, s) for s in ("", "x", "yarn", "linear", "\ud800", b"\xff\xfe", "\x1b[31m\u202e", "a" * 100_000, "\0")),
    *(
        (ARRAY, (kind, items))
        for kind, items in ((U32, []), (BOOL, [1, 0]), (F32, [NAN] * 3), (STRING, ["a"]), (I32, [-1]))
    ),
    (ARRAY, (ARRAY, [(U32, [1])])),
)


def forge_metadata(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Change the value or the type of an entry of the metadata, delete it or repeat it."""
    raw = Raw(model)
    index = rng.randrange(len(raw.pairs))
    if rng.random() < 0.6:  # not of the tokenizer
        index = rng.choice([i for i, (key, _) in enumerate(raw.pairs) if not str(key).startswith("tokenizer")])
    key, old = raw.pairs[index]
    value = rng.choice(ODD)
    prefix = next(item for name, (_, item) in raw.pairs if name == "general.architecture")
    added = [
        *("general.alignment", "split.count", "general.type", "\ud800", b"\xff", "", "a" * 300, "tokenizer.ggml.pre"),
        *(
            f"{prefix}.{name}"
            for name in ("rope.scaling.type", "rope.scaling.factor", "rope.freq_base", "expert_count")
        ),
        *(
            f"{prefix}.{name}"
            for name in ("attention.head_count_kv", "attention.key_length", "another", "context_length")
        ),
        *(
            f"tokenizer.ggml.{name}"
            for name in ("scores", "merges", "eot_token_id", "add_bos_token", "add_space_prefix")
        ),
        "tokenizer.chat_template",
    ]
    how = rng.choice(("change", "change", "change", "change", "delete", "add", "add", "twice", "scaling"))
    if how == "change":
        raw.pairs[index] = (key, value)
    elif how == "delete":
        del raw.pairs[index]
    elif how == "twice":
        raw.pairs.append((key, rng.choice((old, value))))
    elif how == "scaling":
        kind = rng.choice(("yarn", "linear"))
        raw.pairs += [(f"{prefix}.rope.scaling.type", (STRING, kind)), (f"{prefix}.rope.scaling.factor", value)]
    else:
        key = rng.choice(added)
        raw.pairs = [pair for pair in raw.pairs if pair[0] != key] + [(key, value)]
    return f"metadata: {how} {key!r} {str(value)[:60]!r}", lambda: _write_bytes(model, raw.to_bytes())


def forge_vocabulary(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Change tokens, types, scores, merges, ids or the template of the tokenizer in the metadata."""
    raw = Raw(model)
    values = {key: value for key, (_, value) in raw.pairs}
    size = len(values["tokenizer.ggml.tokens"][1])
    strings = [str(token) for token in values["tokenizer.ggml.tokens"][1]]
    edits: list[tuple[str, Value]] = [
        ("tokens", (ARRAY, (STRING, strings[: size // 2]))),
        ("tokens", (ARRAY, (STRING, [*strings, "more"]))),
        ("tokens", (ARRAY, (STRING, ["same"] * size))),
        ("tokens", (ARRAY, (STRING, [""] * size))),
        ("tokens", (ARRAY, (STRING, [*strings[:-1], "\ud800"]))),
        ("tokens", (ARRAY, (STRING, [*strings[:70], "\x1b[31m", *strings[71:]]))),
        ("tokens", (ARRAY, (STRING, [*strings[:-1], "a" * 1_000_000]))),
        ("tokens", (ARRAY, (I32, list(range(size))))),
        ("token_type", (ARRAY, (BOOL, [1] * size))),
        ("token_type", (ARRAY, (F32, [1.0] * size))),
        ("token_type", (ARRAY, (I32, [-5] * size))),
        ("token_type", (ARRAY, (I32, [5] * size))),
        ("token_type", (ARRAY, (I32, [4] * size))),
        ("token_type", (ARRAY, (I32, [6] * size))),
        ("scores", (ARRAY, (BOOL, [1] * size))),
        ("scores", (ARRAY, (F32, [NAN] * size))),
        ("scores", (ARRAY, (F32, [0.0] * size))),
        ("scores", (ARRAY, (STRING, ["x"] * size))),
        ("merges", (ARRAY, (STRING, ["h"]))),
        ("merges", (ARRAY, (STRING, ["h e", "h e"]))),
        ("merges", (ARRAY, (STRING, ["h absent"]))),
        ("merges", (ARRAY, (STRING, [" ", "  ", "a b c"]))),
        ("merges", (ARRAY, (STRING, []))),
        ("merges", (ARRAY, (U32, [1, 2]))),
        *(
            (f"{kind}_token_id", (U32, n))
            for kind in ("eos", "bos", "padding", "eot")
            for n in (size, 0, (1 << 32) - 1)
        ),
        *(("model", (STRING, kind)) for kind in ("llama", "gpt2", "bert", "\ud800")),
    ]
    name, value = rng.choice(edits)
    key = f"tokenizer.ggml.{name}"
    if rng.random() < 0.2:
        template = rng.choice(TEMPLATES)
        name, key, value = "template", "tokenizer.chat_template", (STRING, template)
    raw.pairs = [pair for pair in raw.pairs if pair[0] != key] + [(key, value)]
    return f"vocabulary: {name} {str(value)[:60]!r}", lambda: _write_bytes(model, raw.to_bytes())


def forge_stored(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Change the name, shape, type, offset or a value of a tensor, repeat it, or change the counts of the header."""
    raw = Raw(model)
    tensor = rng.choice(raw.tensors)
    old = str(tensor)[:60]
    how = rng.choice(
        ("name", "shape", "shape", "shape", "type", "offset", "offset", "twice", "gone", "numbers", "counts")
    )
    if how == "name":
        tensor[0] = rng.choice(("x", "", "\ud800", b"\xff", "\x1b[31m", "a" * 300, raw.tensors[0][0]))
    elif how == "shape":
        shape = tensor[1]
        tensor[1] = rng.choice(
            [
                [0, *shape[1:]],
                [-1, *shape[1:]],
                shape[::-1],
                [*shape, 1],
                [],
                [1] * 9,
                [1 << 62, 4],
                [shape[0] * 2, *shape[1:]],
                [*shape[:-1], shape[-1] // 2],
                [1 << 33, 1 << 33],
                [shape[0] * shape[-1]],
                [10**9, *shape[1:]],
            ]
        )
    elif how == "type":
        tensor[2] = rng.choice((1, 2, 8, 12, 14, 24, 30, 99, (1 << 32) - 1))
    elif how == "offset":
        tensor[3] = rng.choice((1, 32, 64, 1 << 40, 1 << 63, (1 << 64) - 32, raw.tensors[0][3], raw.tensors[-1][3]))
    elif how == "twice":
        raw.tensors.append(list(tensor))
    elif how == "gone":
        raw.tensors.remove(tensor)
    elif how == "numbers":
        number = rng.choice((NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e-45, 0.0))
        tensor[4] = np.full(len(tensor[4]) // 4, number, dtype=np.float32).tobytes()
    else:
        raw.counts = rng.choice(((1, 0), (0, 1), (-1, 0), (0, -1), (1 << 62, 0), (0, 1 << 62), (1 << 15, 0)))
        raw.version = rng.choice((3, 3, 2, 1, 0, 4, 3 << 24))
    return f"tensors: {how} of {old} to {str(tensor)[:60]}", lambda: _write_bytes(model, raw.to_bytes())


IN_FOLDERS = (
    *(forge_field,) * 8,
    *(fault_forging.forge_value,) * 3,
    *(fault_forging.forge_text, fault_forging.forge_tensors, fault_forging.forge_tensors, fault_forging.forge_header),
    *((fault_forging.forge_published_tokenizer,) if fault_forging.HAS_PUBLISHED else ()),
    *(fault_forging.forge_tokenizer, fault_forging.forge_tokenizer, forge_duplicate, forge_template, forge_template),
    *(
        forge_special,
        forge_special,
        forge_name,
        forge_index,
        forge_bytes,
        forge_bytes,
        forge_place,
        forge_place,
        forge_place,
    ),
)
IN_FILES = (*(forge_metadata,) * 5, *(forge_vocabulary,) * 4, *(forge_stored,) * 4, *(forge_bytes,) * 3, forge_place)
IN_ADAPTERS = (
    *(fault_forging.forge_value,) * 4,
    *(fault_forging.forge_text, fault_forging.forge_tensors, fault_forging.forge_tensors, fault_forging.forge_header),
    *(forge_pattern, forge_pattern, forge_bytes, forge_bytes, forge_place, forge_place, forge_duplicate, forge_name),
)


def commands_against(evil: str, source: str) -> list[tuple[Any, ...]]:
    """The commands to try on a forged model or adapter."""
    short = ("--steps", 1, "--batch-size", 2)
    if source in ADAPTERS:
        base = f"models/{ADAPTERS[source][0]}"
        return [
            ("sample", "--adapter", evil, "-m", base, "-n", 8, "--prompt", "the"),
            ("sample", "--adapter", evil, "-m", base, "-n", 8, "--quantize", "int8", "--prompt", "the"),
            ("eval", "other.txt", "--adapter", evil, "-m", base, "--json"),
            ("merge-lora", evil, "--model", base, "--out", "merged"),
            ("export", evil, "--to", "peft", "--base", base, "--out", "exported"),
            ("sample", "-m", evil, "-n", 8),
            ("import", evil, "--out", "run"),
        ]
    return [
        ("sample", "-m", evil, "-n", 8, "--prompt", "the"),
        ("sample", "-m", evil, "-n", 80, "--temperature", 3, "--num-samples", 2),
        ("sample", "-m", evil, "-n", 8, "--quantize", "int8", "--prompt", "the"),
        ("sample", "-m", evil, "-n", 8, "--chat", "--prompt", "the"),
        ("chat", "-m", evil, "-n", 8),
        ("eval", "other.txt", "-m", evil, "--json"),
        ("eval", "chat.jsonl", "-m", evil),
        ("import", evil, "--out", "run"),
        ("export", evil, "--to", "hf", "--out", "exported"),
        ("export", evil, "--to", "gguf", "--out", "exported.gguf"),
        ("train", "other.txt", "--init-from", evil, "--out", "from", *short),
        ("finetune-lora", "other.txt", "--model", evil, "--out", "lora", *short),
        ("finetune-lora", "chat.jsonl", "--model", evil, "--out", "taught", *short),
        ("finetune-adapter", "other.txt", "--model", evil, "--out", "bottleneck", *short),
    ]


def choose(rng: random.Random, models: Path) -> tuple[str, Path, Callable[..., Forgery]]:
    """Choose a model and a forgery: the model's name, its copy that will be forged, and the forging function."""
    forgeries = rng.choice((IN_FOLDERS, IN_FOLDERS, IN_FILES, IN_FILES, IN_ADAPTERS))
    sources = {IN_FOLDERS: [*FOLDERS], IN_FILES: [*FILES, SENTENCEPIECE], IN_ADAPTERS: [*ADAPTERS]}[forgeries]
    source = rng.choice(sources)
    evil = models.with_name("evil.gguf" if source.endswith(".gguf") else "evil")
    if source in FOLDERS:
        shutil.copytree(models / source, evil)
    else:
        (models / source).rename(evil)
    return source, evil, rng.choice(forgeries)


# Commands on forged models, and defects of their output.


def on_terminal() -> None:
    """In a forked command: make `isatty` of stdout return True. A terminal must not get control characters."""
    streams._RawStdout.isatty = lambda self: True


def write_resident(path: Path) -> Callable[[], None]:
    """A function for a forked command to call last: writes its peak resident memory in bytes to a file."""
    return lambda: _write(path, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE))


def defects_of_message(ran: Any, name: str, resident: Path, is_terminal: bool) -> list[str]:
    """Descriptions of what is wrong with the output and memory of a command, besides `Ran.defects`."""
    wrong = []
    lines = [line for line in ran.stderr.splitlines() if line.startswith("Error: ")]
    last = ran.stderr.strip().splitlines()[-1:] or [""]
    errors = len(lines[-1:] if ran.words[0] == "chat" else lines)  # a chat has one for each question
    if ran.code in (1, 2, 3) and (errors != 1 or last[0][:160] != lines[-1][:160]):
        wrong.append(f"{len(lines)} lines of error, and {last[0][:200]!r} at the end")
    elif ran.code in (1, 2, 3) and not any(word in lines[0] for word in (name.removesuffix(".gguf"), *SUBJECTS)):
        wrong.append(f"the error does not name the model: {lines[0][:300]}")
    if lines and len(lines[0]) > LONGEST:
        wrong.append(f"an error of {len(lines[0])} characters")
    if "Out of memory" in ran.stderr or int(resident.read_text()) > MOST_RESIDENT:
        wrong.append(f"{int(resident.read_text()) >> 20} MB of memory")
    if "--json" in ran.words and ran.code == 0 and not all(map(_is_json, ran.stdout.splitlines())):
        wrong.append(f"no JSON: {ran.stdout[:200]}")
    if is_terminal and (found := CONTROLS & set(ran.stdout + ran.stderr)):
        wrong.append(f"control characters on the terminal: {sorted(found)}")
    return [f"tinylm {' '.join(ran.words)[:120]}: {defect}" for defect in wrong]


def _is_json(line: str) -> bool:
    """Whether a line is JSON, which has no NaN and no infinity."""
    try:
        files.parse_json(line)
    except ValueError:
        return False
    return True
