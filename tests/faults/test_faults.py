"""Attack the command line: kills, full disks, damaged files, forged folders and models, odd options, combinations of
model parts, Ctrl-C. docs/reliability.md describes the classes, and when a case has survived.

    python -m pytest -m faults tests/faults --cases 400 --seed 0

The same seed makes the same cases, except for the moments of kills and interrupts.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import typer.main

from tests.faults import disk, foreign, forging
from tests.faults.process import CODES, LIMIT, Place, Ran, call, nothing, remove, snapshot, start_server
from tests.shell import WORDS, child_process, same_tensors, story
from tinylm.cli import app

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(7200),  # every command has a shorter limit of its own
    pytest.mark.skipif(os.name != "posix", reason="the attacks use signals and forks"),
]
TINY = "--layers 1 --heads 2 --width 16 --context 16 --batch-size 4 --dtype fp32"
SHORT = f"--steps 6 --eval-every 3 --save-every 2 --log-every 1 {TINY}"
EVERY = f"--dropout 0.1 --eval-every 7 --save-every 5 --log-every 2 {TINY}"
RUN, GOOD, ADAPTER, EVIL = (f"checkpoints/{name}" for name in ("run", "good", "adapter", "evil"))
RESUME = f"train --resume {RUN}"
PREPARED = f"""train corpus.txt --out {RUN} {SHORT}
train corpus.txt --out checkpoints/bpe --tokenizer bpe --vocab-size 280 {SHORT}
train corpus.txt --out checkpoints/encoder --architecture encoder {SHORT}
train pairs.tsv --out checkpoints/pairs --architecture encoder-decoder {SHORT}
finetune-lora other.txt --out {ADAPTER} --model {RUN} --steps 3 --batch-size 4 --dtype fp32
finetune-adapter other.txt --out checkpoints/bottleneck --model {RUN} --steps 3 --batch-size 4 --dtype fp32
train-tokenizer corpus.txt --out tokenizer.json --kind bpe --vocab-size 280
train chats.jsonl --out checkpoints/chat {SHORT} --context 64
export {RUN} --to hf --out model-hf
train corpus.txt --out {GOOD} {SHORT}"""
CHAT = "chat -m checkpoints/chat -n 20 --seed 1"
CONVERSIONS = {  # each writes `new`, or files whose names begin with it
    "import": "import model-hf --out new",
    "export hf": f"export {GOOD} --to hf --out new",
    "export gguf": f"export {GOOD} --to gguf --out new.gguf",
    "export peft": f"export {ADAPTER} --to peft --out new",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folders that cases start from: `runs` with runs of each kind, adapters, a tokenizer and a token cache,
    `foreign` with models of other tools, and `empty` without runs.
    """
    folder = tmp_path_factory.mktemp("faults")
    start_server(disk.compile_library(folder))
    place = Place(folder / "case")
    (place.work / "corpus.txt").write_text(story(3000))
    (place.work / "other.txt").write_text(story(1500, seed=1))
    (place.work / "pairs.tsv").write_text("".join(f"{w}\t{w[::-1]}\n" for w in WORDS.split()) * 6)
    chats = [{"prompt": line, "completion": "I saw no joy."} for line in story(400, seed=2).splitlines()]
    (place.work / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (place.work / "questions.txt").write_text("the old man\n/save saved.jsonl\nby the sea\n/save saved.jsonl\n")
    place.keep("empty")
    place.must(f"train - --out checkpoints/piped {SHORT}", stdin=place.work / "corpus.txt")
    for command in PREPARED.splitlines():
        place.must(command)
    place.keep("runs")
    for path in set((place.work / "checkpoints").iterdir()) - {place.work / GOOD}:
        remove(path)
    assert not place.wrong, place.wrong
    assert call(foreign.make_models, place.work / "models", limit=300) == (0, False)
    place.keep("foreign")
    return place


def continued(place: Place, command: str) -> str:
    return RESUME if (place.work / RUN).exists() else command


def same_as_undisturbed(place: Place, undisturbed: Path) -> None:
    """The run must have the weights, the optimizer state and the files of an undisturbed run."""
    for name in ("model.safetensors", "last/model.safetensors", "last/optimizer.safetensors"):
        if not place.wrong and not same_tensors(place.work / RUN / name, undisturbed / name):
            place.wrong.append(f"{name} is not that of an undisturbed run")
    odd = {str(path.relative_to(undisturbed)) for path in undisturbed.rglob("*")}
    odd ^= {str(path.relative_to(place.work / RUN)) for path in (place.work / RUN).rglob("*")}
    odd -= {"samples.jsonl"}  # which a run has only if training takes some seconds without a pause
    place.wrong += [f"an undisturbed run lacks or has {sorted(odd)}"] if odd and not place.wrong else []


# Kills.

KILLED = f"train corpus.txt --out {RUN} --steps 40 {EVERY}"
MOST_KILLS = 8  # of one run


def plan_kills(place: Place, cases: int, rng: random.Random) -> list[Any]:
    return [min(MOST_KILLS, cases - done) for done in range(0, cases, MOST_KILLS)]


def attack_by_kills(place: Place, kills: int, rng: random.Random) -> str:
    """Kill and resume one run many times, then let it finish."""
    place.restore("empty")
    seconds, undisturbed = place.must(KILLED).seconds, place.path.with_name("undisturbed")
    remove(undisturbed)
    (place.work / RUN).rename(undisturbed)
    left = kills
    while left:
        place.restore("empty")
        while left and place.run(continued(place, KILLED), after=rng.uniform(0.02, seconds)).killed:
            left -= 1
            if (place.work / RUN).exists():
                place.must(f"sample -m {RUN} -n 5 --seed 1")
    place.must(continued(place, KILLED))
    same_as_undisturbed(place, undisturbed)
    return f"{kills} kills"


# Full disks.

DISK_RUN = f"--steps 4 --eval-every 2 --save-every 2 --log-every 1 {TINY}"
ON_FULL_DISK = {
    "train": f"train corpus.txt --out {RUN} {DISK_RUN}",
    "train --force": f"train corpus.txt --out {RUN} --force {DISK_RUN}",
    "train --resume": f"{RESUME} --steps 8",
    "finetune-lora": f"finetune-lora other.txt -m {RUN} -o new --steps 2 --batch-size 4",
    "merge-lora": f"merge-lora {ADAPTER} --out new",
    "train-tokenizer": "train-tokenizer corpus.txt --out t.json --vocab-size 280",
    "sample": f"sample -m {RUN} -n 200 -t 0",
    "eval": f"eval other.txt -m {RUN}",
    "chat": CHAT,
    **CONVERSIONS,
}
STARTS = {"train": "empty", "train-tokenizer": "empty"}  # other commands start from "runs"
FULL_STREAMS = [
    *((name, stream, "") for name in ON_FULL_DISK for stream in ("stdout", "stderr")),
    *((name, stream, "--json") for name in ("train", "sample", "eval") for stream in ("stdout", "stderr")),
    *((word, "stdout", "") for word in ("--help", "--version", "runs", f"info {RUN}")),
]


def plan_full_disks(place: Place, cases: int, rng: random.Random) -> list[Any]:
    """FULL_STREAMS, and two units for each write of each command: it alone fails, or all later ones as well."""
    units: list[Any] = list(FULL_STREAMS)
    counted = place.streams / "count"
    hooks = functools.partial(disk.arm, place.path, 0, False), functools.partial(disk.write_count, counted)
    for name, command in ON_FULL_DISK.items() if (place.path.parent / "disk.so").exists() else ():
        place.restore(STARTS.get(name, "runs"))
        place.must(command, hooks=hooks)
        units += [(name, n + 1, lasting) for n in range(int(counted.read_text())) for lasting in (True, False)]
    return units


def attack_by_full_disk(place: Place, unit: tuple[str, Any, Any], rng: random.Random) -> str:
    """Fail at one write, then load every run, and repeat or continue the command with space again."""
    name, number, lasting = unit
    if isinstance(number, str):
        return attack_by_full_stream(place, *unit)
    command = ON_FULL_DISK[name]
    place.restore(STARTS.get(name, "runs"))
    runs = {str(path.relative_to(place.work)) for path in place.work.glob("checkpoints/*")}
    files = {path.name for path in place.work.iterdir()}
    failed = place.run(command, hooks=(functools.partial(disk.arm, place.path, number, lasting), nothing))
    check_left_over(place, files, name)
    if failed.code and name in ("sample", "eval", "chat"):
        place.wrong.append(str(failed))
    for path in sorted(runs | {path for path in (RUN, "new") if (place.work / path / "config.json").exists()}):
        place.must(f"info {path}")  # which finishes a replacement that was interrupted
    if name == "train":
        place.must(continued(place, command))
    elif failed.code:
        replaces = name in CONVERSIONS or (name == "finetune-lora" and (place.work / "new").exists())
        place.must(f"{command}{' --force' if replaces else ''}")
    return f"{name}: write {number}{' and all later ones' if lasting else ''}"


def check_left_over(place: Place, before: set[str], name: str) -> None:
    """A failed or interrupted command leaves no files but its complete output, also not among temporary files."""
    allowed = {"new.gguf", "new.Modelfile", "saved.jsonl"} if name in (*CONVERSIONS, "chat") else set()
    found = {path.name for path in place.work.iterdir()} - before - allowed - {"checkpoints", "new", "t.json"}
    found |= {f"tmp/{path.name}" for path in (place.home / "tmp").iterdir()}
    place.wrong += [f"{name} left {other}" for other in sorted(found)]


def attack_by_full_stream(place: Place, name: str, stream: str, option: str) -> str:
    """Run a command with stdout or stderr on /dev/full; training must still save its run."""
    place.restore(STARTS.get(name, "runs"))
    command = f"{ON_FULL_DISK.get(name, name)} {option}"
    ran = place.run(command, **{stream: Path("/dev/full")})
    place.wrong = [defect for defect in place.wrong if not defect.endswith(": no message")]
    place.wrong += [f"for stderr alone: {ran}"] if stream == "stderr" and ran.code else []
    if name.split()[0] == "train":
        state, (_, _, steps) = place.work / RUN / "last/state.json", command.partition("--steps ")
        if not state.exists() or json.loads(state.read_text())["step"] != int(steps.split()[0]):
            place.wrong.append(f"the run is not saved at its last step: {ran}")
    return f"{command[:60]} with a full {stream}"


# Flipped bits.

FLIPS = 4  # of each file
READERS = ("sample -t 0 -n 10", "sample -t 0 -n 200", "eval other.txt --json", "eval --json")


def plan_flips(place: Place, cases: int, rng: random.Random) -> list[Any]:
    place.restore("runs")
    names = ("run", "adapter", "piped", "bpe", "bottleneck")
    folders = [*(place.work / "checkpoints" / name for name in names), place.home / "cache"]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    return [(file.relative_to(place.path), rng.random()) for _ in range(FLIPS) for file in files]


def attack_by_flip(place: Place, unit: tuple[Path, float], rng: random.Random) -> str:
    """Each command gives the same result as before the flip, or reports damage."""
    file, at = unit
    name = file.parts[2] if file.parts[1] == "checkpoints" else "run"
    expected = _expected(place, name)
    place.restore("runs")
    target = place.path / file
    status, content = target.stat(), bytearray(target.read_bytes())
    bit = int(at * 8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    target.write_bytes(content)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    for what, output in read_all(place, name).items():
        if output not in (None, expected[what]):
            place.wrong.append(f"another result of {what}, without an error")
    check_listing(place)
    place.run(f"info checkpoints/{name}")
    return f"bit {bit} of {file}"


@functools.cache
def _expected(place: Place, name: str) -> dict[str, str | None]:
    place.restore("runs")
    results = read_all(place, name)
    assert None not in results.values(), place.wrong
    return results


def read_all(place: Place, name: str) -> dict[str, str | None]:
    """The output of each command of READERS, and the hash of the weights after a resume; `None` for an error."""
    path, found = f"checkpoints/{name}", dict[str, str | None]()
    for reader in READERS:
        flag = "--adapter" if name in ("adapter", "bottleneck") else "-m"
        ran = place.run(f"{reader} {flag} {path}", codes=(0, 1, 2))
        values = json.loads(ran.stdout) if "--json" in reader and not ran.code else {"text": ran.stdout}
        kept = {key: value for key, value in values.items() if "second" not in key}  # times and speeds vary
        found[reader] = None if ran.code else json.dumps(kept, sort_keys=True)
    command = {"adapter": "finetune-lora", "bottleneck": "finetune-adapter"}.get(name, "train")
    resumed = place.run(f"{command} --resume {path} --steps 8", codes=(0, 1, 2))
    files = [] if resumed.code else sorted((place.work / path).glob("last/*.safetensors"))
    tensors = [tensor for file in files for tensor in sorted(safetensors.torch.load_file(file).items())]
    content = b"".join(name.encode() + tensor.numpy().tobytes() for name, tensor in tensors)
    found[command] = None if resumed.code else hashlib.sha256(content).hexdigest()
    return found


def check_listing(place: Place) -> None:
    """One bad run or model does not hide the others."""
    if "good" not in (listing := place.must("runs .")).stdout:
        place.wrong.append(f"the other runs are hidden: {listing}")


# Forged folders and tokenizers, and forged models of other tools.


def plan_numbers(place: Place, cases: int, rng: random.Random) -> list[Any]:
    return list(range(cases))


def attack_by_forgery(place: Place, number: int, rng: random.Random) -> str:
    """Try all commands that read a run on a forged one; in 85 of 100 cases its digests are valid."""
    place.restore("runs")
    forge = rng.choice(forging.FORGERIES)
    source = rng.choice(("run", "run", "piped", "bpe", "adapter", "bottleneck", "encoder", "pairs"))
    source = "piped" if forge is forging.forge_tokens else source  # which stores its own tokens
    evil = place.work / EVIL
    (place.work / "checkpoints" / source).rename(evil)
    if source == "run":  # the adapters' base stays
        shutil.copytree(evil, place.work / RUN)
    os.utime(evil / "config.json", (1e9, 1e9))
    what, apply = forge(rng, evil, place.outside)
    apply()
    if rng.random() < 0.85:
        call(forging.seal, evil)  # which may crash
    with untouched(place, place.outside, place.work / GOOD):
        for command in AGAINST[source].splitlines():
            place.run(command)
        check_listing(place)
    return f"{source}: {what}"


@contextlib.contextmanager
def untouched(place: Place, *folders: Path) -> Iterator[None]:
    """What commands do in between must change nothing in these folders."""
    before = [snapshot(folder) for folder in folders]
    yield
    for folder, old in zip(folders, before, strict=True):
        new = snapshot(folder)
        changed = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
        place.wrong += [f"in {folder.name}, files were changed: {', '.join(changed)}"] if changed else []


ON_ADAPTER = f"""info {EVIL}
sample --adapter {EVIL} -n 8 --seed 1
sample --adapter {EVIL} -m {RUN} -n 512 --seed 1
eval --adapter {EVIL}
merge-lora {EVIL} --out merged
TUNE --resume {EVIL} --steps 5"""
ON_RUN = f"""info {EVIL}
sample -m {EVIL} --seed 1 PROMPT
eval -m {EVIL}
eval TEXT -m {EVIL} --json
train TEXT --init-from {EVIL} --out from --steps 1 --batch-size 4
train TEXT --tokenizer {EVIL}/tokenizer.json --out with --steps 1 {TINY}
finetune-lora TEXT --model {EVIL} --out lora --steps 1 --batch-size 4
train --resume {EVIL} --steps 8"""  # the commands that change the run come last
AGAINST = {
    **dict.fromkeys(("run", "piped", "bpe"), ON_RUN.replace("TEXT", "other.txt").replace("PROMPT", "-n 512")),
    "encoder": ON_RUN.replace("TEXT", "other.txt").replace("PROMPT", "--prompt th<mask>ld"),
    "pairs": ON_RUN.replace("TEXT", "pairs.tsv").replace("PROMPT", "--prompt the"),
    "adapter": ON_ADAPTER.replace("TUNE", "finetune-lora"),
    "bottleneck": ON_ADAPTER.replace("TUNE", "finetune-adapter"),
}


def attack_by_foreign_model(place: Place, number: int, rng: random.Random) -> str:
    """Run two random commands and `info` on a forged model, half of the time as if on a terminal."""
    place.restore("foreign")
    source, evil, forge, commands = foreign.choose(rng, place.work / "models")
    what, apply = forge(rng, evil, place.outside)
    apply()
    resident, on_terminal = place.streams / "resident", rng.random() < 0.5
    hooks = foreign.on_terminal if on_terminal else nothing, functools.partial(foreign.write_resident, resident)
    how: dict[str, Any] = {"env": {"TERM": "dumb", "NO_COLOR": "1"}, "hooks": hooks}
    how["codes"] = (0, 1, 2) if source in foreign.ADAPTERS else (0, 1, 2, 3)
    with untouched(place, place.outside, place.work / GOOD):
        for command in (f"info {evil.name}", *commands, "runs ."):
            ran = place.run(command, **how)
            place.wrong += foreign.defects_of_message(ran, evil.name, int(resident.read_text()), on_terminal)
        check_listing(place)
    return f"{source}: {what}"


# Options.

WRONG = (
    *("", " ", "-", "x", "é\u202e", "nan", "-inf", "1e999", "0x10", "1_0", "٣", "'"),
    *("a" * 5000, "../..", "true", "[1]"),
)
EXTREMES: dict[type, tuple[Any, ...]] = {
    int: (-1, 0, 1 << 31, (1 << 63) - 1, 1 << 63, 10**400),
    float: (-1.0, 0.0, 1e308, 1e-320, "nan", "inf", 10**400),
}
NUMBERS = (
    *(*EXTREMES[int], *EXTREMES[float], 1, 2, 3, 0.5, 1.0, 0.999999999, -(1 << 63) - 1),
    *("1e400", "1e-400", "1.5", " 2"),
)
LARGE = (  # options of which large values are valid, but slow
    *("steps", "epochs", "time", "max_tokens", "num_samples", "batch_size", "context", "width", "ffn_width", "layers"),
    *("encoder_layers", "experts", "heads", "kv_heads", "beams", "vocab_size", "rank", "patience", "stride"),
)
SMALL = {"time": ("1s", "0", "-1s", "1x", "1h1h", "s"), "epochs": (0.01, 0, -1, "x", "nan")}
PATHS = (
    *(RUN, ADAPTER, "checkpoints/pairs", "checkpoints/bpe", "checkpoints", "tokenizer.json", "corpus.txt", "0,1"),
    *("pairs.tsv", "missing", "missing/deep", "/dev/null", "-", ".", "new", "x" * 300, "the old", "../outside"),
)
RANDOM_OPTIONS = 400
TUNING = f"other.txt -m {RUN} --out new --steps 1 --batch-size 4"
BASES = {
    "train": f"corpus.txt --out new --steps 2 {TINY}",
    "finetune-lora": TUNING,
    "finetune-adapter": TUNING,
    "sample": f"-m {RUN} -n 5",
    "eval": f"other.txt -m {RUN}",
    "info": RUN,
    "merge-lora": f"{ADAPTER} --out new",
    "serve": f"-m {RUN} --port 0",
    "train-tokenizer": "corpus.txt --out new.json --vocab-size 280",
}


def all_options() -> list[tuple[str, Any]]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    options = ((name, option) for name in sorted(commands) for option in commands[name].params)
    return [(name, option) for name, option in options if option.param_type_name == "option"]


def is_quick(option: Any, value: Any) -> bool:
    return option.name not in LARGE or not isinstance(value, (int, float)) or not 8 < value < 1 << 60


def plan_options(place: Place | None, cases: int, rng: random.Random) -> list[Any]:
    """Each option that takes a number alone with each extreme value, then random options."""
    alone = [
        (index, value)
        for index, (_, option) in enumerate(all_options())
        for value in EXTREMES.get(option.type_descriptor.annotation, ())
        if is_quick(option, value)
    ]
    return alone + [(number, None) for number in range(RANDOM_OPTIONS)]


def attack_by_options(place: Place, unit: tuple[int, Any], rng: random.Random) -> str:
    """Run a command with one option of an extreme value, or with one to six options of random values, of which some
    come from the environment or a file.
    """
    number, alone = unit
    place.restore("runs")
    options = all_options()
    name, first = options[number % len(options)]  # each option has its turn
    others = [option for command, option in options if command == name and option is not first]
    more = rng.sample(others, min(len(others), rng.choice((0, 0, 0, 1, 2, 5)))) if alone is None else []
    dry = alone is None and name in ("train", "finetune-lora", "finetune-adapter") and rng.random() < 0.4
    words, env = ["--dry-run"] if dry else [], dict[str, str]()
    for option in (*more, first):
        spelling = rng.choice([*option.opts, *option.secondary_opts])
        value = random_value(rng, option, dry) if alone is None else alone
        source = rng.random() if alone is None else 1
        if getattr(option, "is_flag", False):
            words.append(spelling)
        elif source < 0.15:
            env[f"TINYLM_{name.replace('-', '_').upper()}_{option.name.upper()}"] = str(value)
        elif source < 0.25 and spelling.startswith("--"):
            (place.work / "options.toml").write_text(f"{option.name} = {json.dumps(value)}\n", errors="replace")
            words += ["--config", "options.toml"]
        else:
            words += [spelling, str(value)]
    if alone is None and rng.random() < 0.1:
        words.append(rng.choice(("corpus.txt", "-", "", "missing.txt", "checkpoints", "../outside")))
    serves = {"codes": (*CODES, -signal.SIGINT), "hooks": (interrupt_later, nothing)} if name == "serve" else {}
    with untouched(place, place.outside):
        place.run(f"{name} {BASES.get(name, '')}", *words, env=env, **serves)
    return f"{env} {name} {words}"[:400]


def interrupt_later() -> None:
    """In a fork: Ctrl-C after some seconds, which ends a server."""
    timer = threading.Timer(LIMIT / 4, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def random_value(rng: random.Random, option: Any, dry: bool) -> Any:
    """A value that is valid, out of range, enormous or of another type."""
    kind, metavar = option.type_descriptor.annotation, option.metavar or ""
    if rng.random() < 0.15:
        return rng.choice(WRONG)
    if "|" in metavar and option.name not in SMALL:
        return rng.choice([*metavar.split("|"), "none", "AUTO"])
    values = SMALL.get(option.name) or (NUMBERS if kind in (int, float) else PATHS)
    return rng.choice([value for value in values if dry or is_quick(option, value)])


# Combinations of the parts of a model.

PARTS = """--preset=modern|gpt2|original --norm=rmsnorm|layernorm|none --norm-placement=pre|post
--ffn-width=1|7|16|40 --activation=swiglu|gelu|relu --initialisation=modern|gpt2|original --dropout=0.2
--attention-dropout=0.2 --position=learned|sinusoidal|none --position=relative+--relative-clip=1|3|100
--position=rope+--rope-theta=2|100|1e6 --experts=2|3+--expert-mode=route|merge --tokenizer=char|bpe
--optimizer=adamw|adam|muon --average=0.2 --micro-batch=2 --schedule=trapezoid|cosine|linear|inverse-sqrt|constant
--label-smoothing=0.1 --norm-gain --no-norm-gain --norm-bias --no-residual --bias --no-bias
--no-attention-scale --qk-norm --no-qk-norm --tie --scale-embedding"""
PARTS_OF = {
    "decoder": "--local-window=1|3|8 --mtp-weight=0.3",
    "encoder": "",
    "encoder-decoder": "--local-window=1|3|8 --encoder-layers=1|2",
}


def attack_by_combination(place: Place, number: int, rng: random.Random) -> str:
    """Train, sample with and without the cache, evaluate and resume a model of random parts."""
    for _ in range(20):
        place.restore("empty")
        architecture = rng.choice(("decoder",) * 4 + ("encoder", "encoder-decoder"))
        heads = rng.choice((1, 2, 4))
        groups = [group for group in f"{PARTS} {PARTS_OF[architecture]}".split() if rng.random() < 0.2]
        parts = [part.partition("=") for group in groups for part in group.split("+")]
        options = " ".join(f"{name}{equals}{rng.choice(values.split('|'))}" for name, equals, values in parts)
        shape = f"--heads {heads} --kv-heads {rng.choice([n for n in (1, 2, 4) if heads % n == 0])}"
        shape += f" --width {heads * rng.choice((2, 4, 6, 8))} --layers {rng.randint(1, 3)}"
        text = "pairs.tsv" if architecture == "encoder-decoder" else "corpus.txt"
        start = f"train {text} --out {RUN} --architecture {architecture} --steps 2 --batch-size 3 --dtype fp32"
        trained = place.run(f"{start} {shape} --context {rng.choice((7, 8, 16, 24))} {options}")
        if trained.code != 2 or place.wrong:
            break  # parts that do not go together are refused
    place.wrong += [str(trained)] if trained.code else []
    if not trained.code:
        more = {"encoder": "--prompt th<mask>ld", "encoder-decoder": "--prompt the -n 40"}
        sample = f"sample -m {RUN} {more.get(architecture, '--prompt the -n 40 -t 0')}"
        cached = place.must(sample)
        if architecture == "decoder" and cached.stdout != (slow := place.must(f"{sample} --no-cache")).stdout:
            place.wrong.append(f"cached {cached.stdout[:80]!r}, not cached {slow.stdout[:80]!r}")
        scored = place.must(f"eval {text} -m {RUN} --json")
        if not scored.code and not math.isfinite(json.loads(scored.stdout)["loss"]):
            place.wrong.append(f"eval prints {scored.stdout[:100]}")
        place.must(f"{RESUME} --steps 3")
    return f"{architecture} {shape} {options}"


# Ctrl-C.

INTERRUPTED = {
    "train": f"train corpus.txt --out {RUN} --steps 300 {EVERY}",
    "sample": f"sample -m {GOOD} -n 1500 --seed 1",
    "eval": f"eval corpus.txt -m {GOOD} --stride 1",
    "chat": CHAT,
    **CONVERSIONS,
}


def plan_interrupts(place: Place, cases: int, rng: random.Random) -> list[Any]:
    """Commands, each with shares of its time; moments are denser near the start, where Python and torch are loaded."""
    kinds, each = sorted(INTERRUPTED), math.ceil(cases / len(INTERRUPTED))
    return [(kinds[n % len(kinds)], ((n // len(kinds) + rng.random()) / each) ** 1.3) for n in range(cases)]


def attack_by_interrupt(place: Place, unit: tuple[str, float], rng: random.Random) -> str:
    """Interrupt a command in a new process at a random moment between its start and its end."""
    name, share = unit
    undisturbed, seconds = _undisturbed(place, name)
    place.restore(STARTS.get(name, "runs"))
    files = {path.name for path in place.work.iterdir()}
    ran = run_and_interrupt(place, name, share * seconds)
    # Until tinylm's `main` has installed its handlers, the interpreter handles the signal. (`site` has a `main` too.)
    if "Traceback" not in ran.stderr or re.search(r'tinylm/__main__\.py", line \d+, in main\n', ran.stderr):
        place.wrong += ran.defects((0, 130, -signal.SIGINT))
        place.wrong += [f"not quiet: {ran}"] if ran.code and "rror" in ran.stderr else []
    if name == "train":
        place.must(continued(place, INTERRUPTED[name]))
        same_as_undisturbed(place, undisturbed)
    else:
        check_left_over(place, files, name)
    if name in CONVERSIONS:
        place.must(f"{INTERRUPTED[name]} --force")
    return f"{name} interrupted after {share * seconds:.2f} s"


@functools.cache
def _undisturbed(place: Place, name: str) -> tuple[Path, float]:
    """The run that a command makes if it is not interrupted, and the seconds that it takes."""
    place.restore(STARTS.get(name, "runs"))
    ran, kept = run_and_interrupt(place, name, LIMIT), place.path.with_name(f"undisturbed-{name}")
    assert ran.code == 0, str(ran)
    (place.work / RUN).rename(kept)
    return kept, ran.seconds


def run_and_interrupt(place: Place, name: str, after: float) -> Ran:
    """Run a command in a new process, which can also be interrupted while Python starts."""
    words, begun = INTERRUPTED[name].split(), time.monotonic()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    where: dict[str, Any] = {"cwd": place.work, "env": place.environment()}
    text = (place.work / "questions.txt").read_text() if name == "chat" else ""
    with child_process([sys.executable, "-m", "tinylm", *words], LIMIT, **pipes, **where) as child:
        try:
            stdout, stderr = child.communicate(text, timeout=after)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            stdout, stderr = child.communicate()
    return Ran(tuple(words), child.returncode, stdout, stderr, time.monotonic() - begun)


# Trying the cases.

Plan = Callable[[Place, int, random.Random], list[Any]]
CLASSES: dict[str, tuple[int, Plan, Callable[[Place, Any, random.Random], str]]] = {  # with the number of cases
    "kills": (4, plan_kills, attack_by_kills),
    "disks": (12, plan_full_disks, attack_by_full_disk),
    "flips": (8, plan_flips, attack_by_flip),
    "forgeries": (12, plan_numbers, attack_by_forgery),
    "foreign": (12, plan_numbers, attack_by_foreign_model),
    "options": (40, plan_options, attack_by_options),
    "combinations": (6, plan_numbers, attack_by_combination),
    "interrupts": (8, plan_interrupts, attack_by_interrupt),
}
SHARES = 4  # tests per class, which can run at once


@functools.cache
def planned(name: str, place: Place, cases: int, seed: int) -> list[Any]:
    place.wrong = []
    units = CLASSES[name][1](place, cases, random.Random(f"{name} {seed}"))
    assert not place.wrong, place.wrong
    return units


@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("name", CLASSES)
def test_every_case_is_survived(
    name: str, share: int, place: Place, request: pytest.FixtureRequest, record_property: Callable[[str, object], None]
) -> None:
    few, _, attack = CLASSES[name]
    most, seed = (request.config.getoption(option, None) for option in ("--cases", "--seed"))
    most, seed = few if most is None else most, seed or 0
    units = planned(name, place, most, seed)
    wanted = sorted(random.Random(seed).sample(range(len(units)), min(most, len(units))))[share::SHARES]
    tried, begun, failed = 0, time.monotonic(), []
    for number in wanted:
        place.wrong = []
        label = attack(place, units[number], random.Random(f"{name} {seed} {number}"))
        tried += units[number] if name == "kills" else 1
        failed += [f"{name} {number}: {label}\n    " + "\n    ".join(place.wrong)] if place.wrong else []
    record_property("faults", (name, tried, tried - len(failed), time.monotonic() - begun))
    assert not failed, "\n".join(failed)
