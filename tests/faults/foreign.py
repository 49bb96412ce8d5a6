"""Forge models of other tools: Hugging Face folders, GGUF files and PEFT adapters, each with one fault."""

import json
import random
import resource
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults import forging
from tests.faults.forging import INFINITY, NAN, VALUES, Forge, Forgery, write
from tests.faults.process import Ran
from tinylm.commands import streams
from tinylm.formats.gguf_file import parse_header
from tinylm.system import files

FOLDERS = {  # name: case of tests/formats/peers.py
    "llama": "llama 3 scaling",
    "yarn": "qwen3 with biases, windows by layer, yarn",
    "gpt2": "gpt2",
    "gemma": "gemma3_text with scaling, scalar, pattern",
    "mixture": "qwen3_moe",
    "neox": "gpt_neox",
}
FILES = {  # name: case of tests/formats/gguf_files.py
    "llama.gguf": "llama 3 scaling",
    "gpt2.gguf": "gpt2",
    "gemma.gguf": "gemma3_text as published",
    "mixture.gguf": "mixtral",
}
SENTENCEPIECE = "pieces.gguf"
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {  # name: the base, and fields of LoraConfig
    "lora": ("llama", {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"q_proj": 2}}),
    "saved": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["lm_head"], "fan_in_fan_out": True}),
    "experts": ("mixture", {"target_modules": ["q_proj"], "alpha_pattern": {"layers.1.*": 9}}),
}
CHAT = {"messages": [{"role": "user", "content": "the bee"}, {"role": "assistant", "content": "sees the moon"}]}
LONGEST = 1000  # characters of the longest allowed error message
MOST_RESIDENT = 3 << 30  # bytes, of which 0.7 GB are those of the process that forks
SUBJECTS = (  # what an error may name instead of the forged model
    *("tensor", "tokenizer", "template", "conversation", "special token", "this model", "the model", "The text"),
    *("loss", "logits", "--"),
)
CONTROLS = {*map(chr, [*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0x202A, 0x202F)])}
SHORT = "--steps 1 --batch-size 2"
ON_MODELS = f"""sample -m MODEL -n 8 --prompt the
sample -m MODEL -n 80 --temperature 3 --num-samples 2
sample -m MODEL -n 8 --quantize int8 --prompt the
sample -m MODEL -n 8 --chat --prompt the
chat -m MODEL -n 8
eval other.txt -m MODEL --json
eval chat.jsonl -m MODEL
import MODEL --out run
export MODEL --to hf --out exported
export MODEL --to gguf --out exported.gguf
train other.txt --init-from MODEL --out from {SHORT}
finetune-lora other.txt --model MODEL --out lora {SHORT}
finetune-lora chat.jsonl --model MODEL --out taught {SHORT}
finetune-adapter other.txt --model MODEL --out bottleneck {SHORT}"""
ON_ADAPTERS = """sample --adapter MODEL -m BASE -n 8 --prompt the
sample --adapter MODEL -m BASE -n 8 --quantize int8 --prompt the
eval other.txt --adapter MODEL -m BASE --json
merge-lora MODEL --model BASE --out merged
export MODEL --to peft --base BASE --out exported
sample -m MODEL -n 8
import MODEL --out run"""


def make_models(folder: Path) -> None:
    """Write all models. Imports transformers, peft and gguf, so it is called in a fork."""
    from tests.formats import gguf_files, gguf_peers, peers, peft_adapters

    for name, case in FOLDERS.items():
        peers.save_peer(case, folder / name, **({"max_shard_size": "20KB"} if name == "yarn" else {}))
    for name, case in FILES.items():
        gguf_files.save_peer(case, folder / name)
    peer, size = peers.make_peer("llama"), peers.VOCABULARY
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁thebonsamr", "▁t", "he", "▁the"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259), *[5] * (size - len(tokens))]
    tokens += [f"[PAD{i}]" for i in range(size - len(tokens))]
    values = {key: v for key, v in gguf_files.peer_metadata("llama", peer).items() if not key.startswith("tokenizer")}
    pieces: dict[str, Any] = {"model": "llama", "tokens": tokens, "token_type": types}
    pieces |= {"scores": [float(-i) for i in range(size)], "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    values |= {f"tokenizer.ggml.{key}": value for key, value in pieces.items()}
    values["tokenizer.chat_template"] = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    gguf_files.write_file(folder / SENTENCEPIECE, "llama", values, dict(gguf_peers.peer_tensors("llama", peer)))
    for name, (base, fields) in ADAPTERS.items():
        peft_adapters.make_adapter(peers.make_peer(FOLDERS[base]), folder / name, **fields)
    (folder.parent / "chat.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 4)


# Hugging Face folders and PEFT adapters.

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 3, 7, 1e-320, 1e-5, 0.5, 1e300, -2.5, NAN, INFINITY, 10**9, 1 << 40, 10**30, 10**400),
    *("8", None, True, [4], {}, "\ud800"),
)
SCALINGS: tuple[dict[str, Any], ...] = (  # an absurd number takes the place of each last value
    *({"rope_type": "linear", "factor": 1}, {"rope_theta": 1}, {"full_attention": {}, "sliding_attention": {}}),
    *({"rope_type": "yarn", "factor": 4.0, name: 1} for name in ("beta_slow", "original_max_position_embeddings")),
    {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": -14.426950408889634, "mscale": 1},
    {"rope_type": "yarn", "attention_factor": 1e-320, "factor": 1},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1},
    {"rope_type": 1},
)
SIZES = ("hidden", "layer", "head", "vocab", "expert", "embd", "position", "context", "intermediate", "inner", "window")
TEMPLATES = (
    *("{% for i in range(10**12) %}{{ i }}{% endfor %}", "{{ 'a' * 10**12 }}", "{{ 'x'.center(10**12) }}"),
    *("{{ ''.__class__.__mro__ }}", "{{ messages[0].content.__init__.__globals__ }}", "{% include '/etc/passwd' %}"),
    *("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "{{ raise_exception('\x1b]0;owned\x07\ud800') }}", "{% if"),
    *("{{ 1 / 0 }}", "{{ messages | tojson | upper }}" * 1000, "(" * 5000 + "{{" + "(" * 5000, "constant", ""),
    *("\ud800{{ messages[0].content }}", "\x1b[31m{{ messages[0].content }}\u202e", "x" * (2 << 20)),
    *("{{ messages[5].content }}", "{{ undefined.field }}", "{{ '%1000000000d' % 5 }}"),
    "{% generation %}{{ messages[1].content }}{% endgeneration %}" * 2,
    "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% for m in messages %}{{ m.content }}{{ strftime_now('%Y' * 100000) }}{% endfor %}",
)


def forge_field(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Replace a number or the scaling of RoPE in config.json by an absurd value."""
    values = json.loads((model / "config.json").read_text())
    how, number = rng.choice(("size", "size", "number", "rope", "rope", "scaling")), rng.choice(NUMBERS)
    if how in ("rope", "scaling"):
        scaling = rng.choice(SCALINGS)
        value = {**scaling, [*scaling][-1]: number}
        name = {"rope": "rope_parameters", "scaling": "rope_scaling"}[how]
        return set_in(model / "config.json", name, {**values.get(name, {}), **value} if rng.random() < 0.5 else value)
    numbers = [name for name, value in values.items() if type(value) in (int, float)]
    sizes = [name for name in values if any(part in name for part in SIZES)]
    return set_in(model / "config.json", rng.choice(sizes if how == "size" else numbers), number)


def set_in(path: Path, name: str, value: Any) -> Forgery:
    values = json.loads(path.read_text()) if path.exists() else {}
    return f"{path.name}: {name} = {str(value)[:80]!r}", lambda: path.write_text(json.dumps({**values, name: value}))


def forge_special(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Replace a special token, an id of one, or the chat template by a hostile one."""
    if rng.random() < 0.3:
        return f"template {(text := rng.choice(TEMPLATES))[:50]!r}", lambda: write(model / "chat_template.jinja", text)
    tokens = [("tokenizer_config.json", name) for name in ("bos_token", "eos_token", "pad_token", "add_bos_token")]
    ids = [(file, f"{k}_token_id") for k in ("bos", "eos") for file in ("config.json", "generation_config.json")]
    file, name = rng.choice([*tokens, *ids, *[("tokenizer_config.json", "chat_template")] * 3])
    values = TEMPLATES if name == "chat_template" else (*VALUES, [1] * 100, [0, -5, 10**9], {"content": "\ud800"})
    return set_in(model / file, name, rng.choice(values))


def forge_bytes(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Change, delete or repeat bytes of a file."""
    path = rng.choice([model] if model.is_file() else sorted(path for path in model.rglob("*") if path.is_file()))
    content = bytearray(path.read_bytes())
    how = rng.choice(("flip", "flip", "flip", "cut", "cut", "zeros", "more", "middle", "empty"))
    at = rng.randrange(min(len(content), rng.choice((16, 200, 5000, 1 << 30))))
    if how == "flip":
        for _ in range(rng.choice((1, 1, 8))):
            content[(at + rng.randrange(16)) % len(content)] ^= 1 << rng.randrange(8)
    elif how == "zeros":
        content[at : at + 64] = bytes(64)
    elif how == "more":
        content += bytes(rng.choice((1, 1000, 1 << 20)))
    else:
        del content[0 if how == "empty" else at : at + rng.choice((1, 8, 1000)) if how == "middle" else len(content)]
    return f"{path.name}: {how} at {at}", lambda: write(path, bytes(content))


# GGUF files, written without any check.

U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 4, 5, 6, 7, 8, 9, 10, 12
Value = tuple[int, Any]  # kind and value; of an array, the value is (kind of its items, items)
LAYOUTS = {U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", F64: "<d"}


def as_bytes(kind: int, value: Any) -> bytes:
    if kind == ARRAY:
        item, items = value
        return struct.pack("<IQ", item, len(items)) + b"".join(as_bytes(item, one) for one in items)
    if kind == STRING:
        data = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        return struct.pack("<Q", len(data)) + data
    return struct.pack(LAYOUTS[kind], value)


def typed(value: Any) -> Value:
    if isinstance(value, np.ndarray):
        return ARRAY, ({"f": F32, "b": BOOL}.get(value.dtype.kind, I32), value.tolist())
    kinds = {bool: BOOL, int: U32, float: F32, str: STRING}
    return (kinds[type(value)], value) if type(value) in kinds else (ARRAY, (STRING, [str(one) for one in value]))


class Raw:
    """A parsed GGUF file: pairs of the metadata, and tensors as [name, shape reversed, type, offset, bytes]."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        header = parse_header(data)
        self.pairs: list[tuple[Any, Value]] = [(key, typed(value)) for key, value in header.metadata.values.items()]
        self.version, self.counts, self.tensors, end = 3, (0, 0), list[list[Any]](), 0
        for info in header.tensors.values():
            kind = 0 if info.type.name == "F32" else 1
            self.tensors.append([info.name, list(info.shape[::-1]), kind, end, data[info.offset :][: info.size]])
            end += -(-info.size // 32) * 32

    def to_bytes(self) -> bytes:
        """The file. `counts` are added to the numbers of tensors and of keys."""
        counts = (len(self.tensors) + self.counts[0], len(self.pairs) + self.counts[1])
        head = b"GGUF" + struct.pack("<IQQ", self.version, *counts)
        for key, (kind, value) in self.pairs:
            head += as_bytes(STRING, key) + struct.pack("<I", kind) + as_bytes(kind, value)
        for name, shape, kind, offset, _ in self.tensors:
            sizes = (size % (1 << 64) for size in shape)
            head += as_bytes(STRING, name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *sizes, kind, offset)
        return head + bytes(-len(head) % 32) + b"".join(data + bytes(-len(data) % 32) for *_, data in self.tensors)


STRINGS = ("", "x", "yarn", "linear", "\ud800", b"\xff\xfe", "\x1b[31m\u202e", "a" * 100_000, "\0", "llama", "bert")
ODD: tuple[Value, ...] = (
    *((U32, n) for n in (0, 1, 3, 5, 7, 33, 300, 1 << 20, (1 << 32) - 1)),
    *((U64, n) for n in (10**9, 1 << 40, 1 << 63, (1 << 64) - 1)),
    *((F32, n) for n in (0.0, -1.0, 1e-40, 3e38, NAN, INFINITY)),
    *((F64, n) for n in (1e300, 1e-320, -INFINITY)),
    *((I32, -1), (I32, -(1 << 31)), (BOOL, 0), (BOOL, 1), (BOOL, 7), (ARRAY, (ARRAY, [(U32, [1])]))),
    *((STRING, text) for text in STRINGS),
    *((ARRAY, a) for a in ((U32, []), (BOOL, [1, 0]), (F32, [NAN] * 3), (STRING, ["a"]), (I32, [-1]))),
)
OF_MODEL = (
    *("rope.scaling.type", "rope.scaling.factor", "rope.freq_base", "expert_count", "attention.head_count_kv"),
    *("attention.key_length", "another", "context_length"),
)
OF_TOKENIZER = ("scores", "merges", "eot_token_id", "add_bos_token", "add_space_prefix", "pre")


def forge_metadata(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Change the value or the type of an entry of the metadata, delete it, add or repeat one, also of the tokenizer."""
    raw = Raw(model)
    key, (kind, old) = rng.choice([pair for pair in raw.pairs if pair[1][0] != ARRAY or rng.random() < 0.5])
    prefix = next(item for name, (_, item) in raw.pairs if name == "general.architecture")
    added = [*STRINGS[:6], "general.alignment", "split.count", "a" * 300, *(f"{prefix}.{name}" for name in OF_MODEL)]
    added += [f"tokenizer.ggml.{name}" for name in OF_TOKENIZER]
    how = rng.choice(("change", "change", "change", "delete", "add", "add", "twice", "template", "scaling"))
    value = forged_list(rng, *old) if kind == ARRAY and rng.random() < 0.8 else rng.choice(ODD)
    changed: list[tuple[Any, Value]] = [(rng.choice(added) if how == "add" else key, value)]
    if how == "twice":
        changed.append((key, (kind, old)))
    elif how == "template":
        changed = [("tokenizer.chat_template", (STRING, rng.choice(TEMPLATES)))]
    elif how == "scaling":
        changed = [(f"{prefix}.rope.scaling.type", (STRING, "yarn")), (f"{prefix}.rope.scaling.factor", value)]
    keys = {key for key, _ in changed} | ({key} if how == "delete" else set())
    raw.pairs = [pair for pair in raw.pairs if pair[0] not in keys] + ([] if how == "delete" else changed)
    return f"metadata: {how} {changed[-1][0]!r} {str(changed[-1][1])[:60]!r}", lambda: write(model, raw.to_bytes())


def forged_list(rng: random.Random, kind: int, items: list[Any]) -> Value:
    """A list of tokens, types, scores or merges that is too short or too long, of another type, or has odd elements."""
    size, at = len(items), rng.randrange(len(items))
    texts = ("\ud800", "\x1b[31m", "", "a" * 1_000_000, "h absent", "a b c", " ", "h e")
    odd = rng.choice(texts if kind == STRING else (-5, 4, 5, 6) if kind == I32 else (NAN, 0.0, -INFINITY))
    forged = [items[: size // 2], [*items, odd], [odd] * size, [*items[:at], odd, *items[at + 1 :]], [], [odd]]
    others = ((BOOL, [1] * size), (F32, [1.0] * size), (I32, [*range(size)]), (STRING, ["x"] * size))
    return ARRAY, rng.choice((*others[:2], rng.choice(others), *((kind, items) for items in forged)))


def forge_stored(rng: random.Random, model: Path, outside: Path) -> Forgery:
    """Change the name, shape, type, offset or a value of a tensor, repeat it, or change the counts of the header."""
    raw = Raw(model)
    tensor = rng.choice(raw.tensors)
    old, (first, *rest) = str(tensor)[:60], tensor[1]
    shapes = [[0, *rest], [-1, *rest], tensor[1][::-1], [*tensor[1], 1], [], [1] * 9, [1 << 62, 4], [first * 2, *rest]]
    shapes += [[*tensor[1][:-1], tensor[1][-1] // 2], [1 << 33, 1 << 33], [first * tensor[1][-1]], [10**9, *rest]]
    changes: dict[int, Any] = {
        0: ("x", "", "\ud800", b"\xff", "\x1b[31m", "a" * 300, raw.tensors[0][0]),
        1: shapes,
        2: (1, 2, 8, 12, 14, 24, 30, 99, (1 << 32) - 1),
        3: (1, 32, 64, 1 << 40, 1 << 63, (1 << 64) - 32, raw.tensors[0][3], raw.tensors[-1][3]),
        4: [np.full(len(tensor[4]) // 4, n, np.float32).tobytes() for n in (NAN, INFINITY, 3e38, -3e38, 1e-45, 0.0)],
    }
    how = rng.choice((0, 1, 1, 1, 2, 3, 3, 4, "twice", "gone", "counts"))
    if how in changes:
        tensor[how] = rng.choice(changes[how])
    elif how == "twice":
        raw.tensors.append(list(tensor))
    elif how == "gone":
        raw.tensors.remove(tensor)
    else:
        raw.counts = rng.choice(((1, 0), (0, 1), (-1, 0), (0, -1), (1 << 62, 0), (0, 1 << 62), (1 << 15, 0)))
        raw.version = rng.choice((3, 3, 2, 1, 0, 4, 3 << 24))
    return f"tensors: {how} of {old} to {str(tensor)[:60]}", lambda: write(model, raw.to_bytes())


ANYWHERE = (
    *(*(forging.forge_value,) * 4, *(forging.forge_text,) * 2, *(forging.forge_tensors,) * 3, forging.forge_header),
    *(forge_bytes, forge_bytes, *(forging.forge_place,) * 3),
)
IN_FOLDERS = (*ANYWHERE, *(forge_field,) * 8, *(forging.forge_tokenizer,) * 3, *(forge_special,) * 4)
IN_FILES = (*(forge_metadata,) * 9, *(forge_stored,) * 4, *(forge_bytes,) * 3, *(forging.forge_place,) * 2)
KINDS: tuple[tuple[list[str], tuple[Forge, ...], str], ...] = (
    *(([*FOLDERS], IN_FOLDERS, ON_MODELS),) * 2,
    *(([*FILES, SENTENCEPIECE], IN_FILES, ON_MODELS),) * 2,
    ([*ADAPTERS], ANYWHERE, ON_ADAPTERS),
)


def choose(rng: random.Random, models: Path) -> tuple[str, Path, Forge, list[str]]:
    """Choose a model, a forgery and two commands: the model's name, its copy that will be forged, and the function."""
    sources, forgeries, commands = rng.choice(KINDS)
    source = rng.choice(sources)
    evil = models.with_name("evil.gguf" if source.endswith(".gguf") else "evil")
    if source in FOLDERS:  # which adapters may need
        shutil.copytree(models / source, evil)
    else:
        (models / source).rename(evil)
    base = f"models/{ADAPTERS[source][0]}" if source in ADAPTERS else ""
    chosen = rng.sample(commands.replace("MODEL", evil.name).replace("BASE", base).splitlines(), 2)
    return source, evil, rng.choice(forgeries), chosen


# What a command on a forged model may print and use.


def on_terminal() -> None:
    """In a fork: stdout seems to be a terminal, which must not get control characters."""
    streams._RawStdout.isatty = lambda self: True  # type: ignore[method-assign]


def write_resident(path: Path) -> None:
    """In a fork: write its peak resident memory in bytes to a file."""
    unit = 1024 if sys.platform.startswith("linux") else 1
    path.write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit))


def defects_of_message(ran: Ran, name: str, resident: int, is_terminal: bool) -> list[str]:
    """Descriptions of what is wrong with the output and memory of a command, besides `Ran.defects`."""
    lines, failed = [line for line in ran.stderr.splitlines() if line.startswith("Error: ")], ran.code in (1, 2, 3)
    first, last = (lines[0], lines[-1]) if lines else ("", "")
    is_one = len(lines[-1:] if ran.words[0] == "chat" else lines) == 1  # a chat has one for each question
    is_one &= ran.last[:160] == last[:160]
    is_named = any(word in first for word in (name.removesuffix(".gguf"), *SUBJECTS))
    controls = CONTROLS & set(ran.stdout + ran.stderr)
    wrong = {
        f"{len(lines)} lines of error": failed and not is_one,
        f"the error does not name the model: {first[:300]}": failed and is_one and not is_named,
        f"an error of {len(first)} characters": len(first) > LONGEST,
        f"{resident >> 20} MB of memory": "Out of memory" in ran.stderr or resident > MOST_RESIDENT,
        f"control characters on the terminal: {sorted(controls)}": is_terminal and controls,
    }
    if "--json" in ran.words and ran.code == 0:
        try:
            for line in ran.stdout.splitlines():
                files.parse_json(line)  # which refuses NaN and infinity
        except ValueError:
            wrong[f"no JSON: {ran.stdout[:200]}"] = True
    return [f"{ran}: {defect}" for defect, is_there in wrong.items() if is_there]
