"""Attack the command line: kills, full disks, damaged files, forged folders and models, odd options, combinations,
Ctrl-C.

    python benchmarks/faults.py [--class NAME ...] [--cases N] [--seed S] [--keep FOLDER]

Prints a row for each class: cases tried and survived. A case survives when no command crashes, hangs, prints a
traceback or ends with an undocumented exit code, and the conditions of its class in docs/reliability.md hold. Each
failure is printed with the command that repeats it. The same seed makes the same cases, except for the moments of kills
and interrupts. All files are in a temporary folder.
"""

import argparse
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fault_disk

TEXT = "the old man said it was a cold morning by the sea, and he went home to his bed in a quick boat; I saw no joy."
TINY = ("--layers", 1, "--heads", 2, "--width", 16, "--context", 16, "--batch-size", 4, "--dtype", "fp32")
EVERY = ("--eval-every", 7, "--save-every", 5, "--log-every", 2)
RUN, ADAPTER = "checkpoints/run", "checkpoints/adapter"
RESUMING = ("train", "--resume", RUN)


@dataclass(frozen=True)
class Trial:
    """One case: its label, the defects that were found (none if it survived), and the commands that ran."""

    label: str
    defects: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class FaultClass:
    """cases: default number. plan: (place, cases, seed) -> units of work. attack: tries a unit; a Trial is a case."""

    title: str
    cases: int
    plan: "Callable[[Any, int, int], list[Any]]"
    attack: "Callable[[Any, Any], list[Trial]]"


def story(characters: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    lines = [TEXT]
    while sum(map(len, lines)) < characters:
        lines.append(" ".join(rng.choices(TEXT.split(), k=rng.randint(4, 9))))
    return "\n".join(lines) + "\n"


# The folders that cases start from.


def prepare(place: Any) -> None:
    """Make the folders that cases start from: `runs` with runs of each kind, adapters, a tokenizer and a token cache,
    and `empty` without runs.
    """
    from fault_process import remove

    remove(place.path)
    place.make()
    work = place.work
    (work / "corpus.txt").write_text(story(3000))
    (work / "other.txt").write_text(story(1500, seed=1))
    (work / "pairs.tsv").write_text("".join(f"{w}\t{w[::-1]}\n" for w in TEXT.split()) * 6)
    chats = [{"prompt": line, "completion": "I saw no joy."} for line in story(400, seed=2).splitlines()]
    (work / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    (work / "questions.txt").write_text("the old man\n/save saved.jsonl\nby the sea\n/save saved.jsonl\n")
    place.keep("empty")
    short = ("--steps", 6, "--eval-every", 3, "--save-every", 2, "--log-every", 1, *TINY)
    adapter = ("--model", RUN, "--steps", 3, "--batch-size", 4, "--dtype", "fp32")
    for words, stdin in (
        (("train", "corpus.txt", "--out", RUN, *short), None),
        (("train", "-", "--out", "checkpoints/piped", *short), work / "corpus.txt"),
        (("train", "corpus.txt", "--out", "checkpoints/bpe", "--tokenizer", "bpe", "--vocab-size", 280, *short), None),
        (("train", "corpus.txt", "--out", "checkpoints/encoder", "--architecture", "encoder", *short), None),
        (("train", "pairs.tsv", "--out", "checkpoints/pairs", "--architecture", "encoder-decoder", *short), None),
        (("finetune-lora", "other.txt", "--out", ADAPTER, *adapter), None),
        (("finetune-adapter", "other.txt", "--out", "checkpoints/bottleneck", *adapter), None),
        (("train-tokenizer", "corpus.txt", "--out", "tokenizer.json", "--kind", "bpe", "--vocab-size", 280), None),
        (("train", "chats.jsonl", "--out", "checkpoints/chat", *short, "--context", 64), None),
        (("export", RUN, "--to", "hf", "--out", "model-hf"), None),
        (("train", "corpus.txt", "--out", "checkpoints/good", *short), None),  # the newest
    ):
        ran = place.run(*words, stdin=stdin)
        if ran.code:
            raise RuntimeError(f"tinylm {' '.join(map(str, ran.words))} failed:\n{ran.stderr}")
    place.ran = []
    place.keep("runs")


def commands_of(place: Any) -> tuple[tuple[str, ...], ...]:
    return tuple(ran.words for ran in place.ran)


def defects_of(place: Any, codes: Sequence[int] = (0, 1, 2, 3)) -> list[str]:
    """Defects of all commands that the case has run."""
    return [f"tinylm {' '.join(ran.words)[:150]}: {defect}" for ran in place.ran for defect in ran.defects(codes)]


def shown(ran: Any) -> str:
    last = ran.stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
    return f"tinylm {' '.join(ran.words)[:150]}: exit {ran.code}, {last[0][:250]}"


def same_save(one: Path, other: Path) -> bool:
    """Whether the best weights, the last weights and the optimizer state of two runs are equal to the bit."""
    import safetensors.torch
    import torch

    for name in ("model.safetensors", "last/model.safetensors", "last/optimizer.safetensors"):
        a, b = (safetensors.torch.load_file(run / name) for run in (one, other))
        if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
            return False
    return True


# 1. Kills.

KILLED = ("train", "corpus.txt", "--out", RUN, "--steps", 40, "--dropout", 0.1, *EVERY, *TINY)
MOST_KILLS = 8  # of one run


def plan_kills(place: Any, cases: int, seed: int) -> list[Any]:
    numbers = range(math.ceil(cases / MOST_KILLS))
    return [(seed, number, min(MOST_KILLS, cases - number * MOST_KILLS)) for number in numbers]


def attack_by_kills(place: Any, unit: tuple[int, int, int]) -> list[Trial]:
    """Kill and resume one run many times, then let it finish. Each kill is a case."""
    seed, number, kills = unit
    rng = random.Random(f"kills {seed} {number}")
    place.restore("empty")
    begun = time.monotonic()
    place.run(*KILLED)
    seconds = time.monotonic() - begun
    files = {path.relative_to(place.work / RUN) for path in (place.work / RUN).rglob("*")}
    (place.work / RUN).rename(place.path.with_name("undisturbed"))
    trials: list[Trial] = []
    while len(trials) < kills:
        place.restore("empty")
        while len(trials) < kills:
            command = RESUMING if (place.work / RUN).exists() else KILLED
            place.ran = []
            if not place.run_and_kill(*command, after=rng.uniform(0.02, 0.6 * seconds)):
                break  # it had ended before
            if (place.work / RUN).exists():
                place.run("sample", "-m", RUN, "-n", 5, "--seed", 1)
            wrong = [*defects_of(place), *(shown(ran) for ran in place.ran if ran.code)]
            trials.append(Trial(f"kill {len(trials)} of run {number}", tuple(wrong), commands_of(place)))
        place.ran = []
        ended = place.run(*(RESUMING if (place.work / RUN).exists() else KILLED))
        wrong = defects_of(place)
        if ended.code:
            wrong.append(shown(ended))
        elif not same_save(place.work / RUN, place.path.with_name("undisturbed")):
            wrong.append("the weights are not those of an undisturbed run")
        elif files != (left := {path.relative_to(place.work / RUN) for path in (place.work / RUN).rglob("*")}):
            wrong.append(f"files that an undisturbed run does not have, or lacks: {sorted(map(str, files ^ left))}")
        if wrong:
            trials[-1:] = [Trial(f"end of run {number}", tuple(wrong), commands_of(place))]
    shutil.rmtree(place.path.with_name("undisturbed"))
    return trials


# 2. Full disks.

CHAT = ("chat", "-m", "checkpoints/chat", "-n", 20, "--seed", 1)
CONVERSIONS: dict[str, tuple[Any, ...]] = {  # each writes `new`, or files whose names begin with it
    "import": ("import", "model-hf", "--out", "new"),
    "export hf": ("export", "checkpoints/good", "--to", "hf", "--out", "new"),
    "export gguf": ("export", "checkpoints/good", "--to", "gguf", "--out", "new.gguf"),
    "export peft": ("export", ADAPTER, "--to", "peft", "--out", "new"),
}
DISK_RUN = ("--steps", 4, "--eval-every", 2, "--save-every", 2, "--log-every", 1, *TINY)
ON_FULL_DISK: dict[str, tuple[str, tuple[Any, ...]]] = {  # name: folders to start from, and the command
    "train": ("empty", ("train", "corpus.txt", "--out", RUN, *DISK_RUN)),
    "train --force": ("runs", ("train", "corpus.txt", "--out", RUN, "--force", *DISK_RUN)),
    "train --resume": ("runs", (*RESUMING, "--steps", 8)),
    "finetune-lora": ("runs", ("finetune-lora", "other.txt", "-m", RUN, "-o", "new", "--steps", 2, "--batch-size", 4)),
    "merge-lora": ("runs", ("merge-lora", ADAPTER, "--out", "new")),
    "train-tokenizer": ("empty", ("train-tokenizer", "corpus.txt", "--out", "t.json", "--vocab-size", 280)),
    "sample": ("runs", ("sample", "-m", RUN, "-n", 200, "-t", 0)),
    "eval": ("runs", ("eval", "other.txt", "-m", RUN)),
    "chat": ("runs", CHAT),
    **{name: ("runs", command) for name, command in CONVERSIONS.items()},
}
STREAMS = [
    *((name, stream, target) for name in ON_FULL_DISK for stream in ("stdout", "stderr") for target in ("full",)),
    *((name, stream, "json") for name in ("train", "sample", "eval") for stream in ("stdout", "stderr")),
    *((word, "stdout", "full") for word in ("--help", "--version", "runs", "info")),
]


def plan_full_disks(place: Any, cases: int, seed: int) -> list[Any]:
    """The units of STREAMS, and two for each write of each command: it alone fails, or all later ones as well."""
    units: list[Any] = list(STREAMS)
    if not fault_disk.is_loaded():
        print("Full disks at each write are not tried: that needs Linux and a C compiler.", file=sys.stderr)
        return units
    for name, (before, command) in ON_FULL_DISK.items():
        place.restore(before)
        counted = place.streams / "count"
        stdin = questions_of(place, name)
        full = fault_disk.full_at(place.path, 0, False)
        place.run(*command, stdin=stdin, before=full, after=fault_disk.write_count(counted))
        writes = int(counted.read_text())
        units += [(name, number, lasting) for number in range(1, writes + 1) for lasting in (True, False)]
    return units


def questions_of(place: Any, name: str) -> Path | None:
    return place.work / "questions.txt" if name == "chat" else None


def left_over(place: Any, before: set[str], name: str) -> list[str]:
    """Files that a failed or interrupted command left in the working folder, besides its complete output."""
    found = {path.name for path in place.work.iterdir()} - before
    written = (
        {"new", "new.gguf", "new.Modelfile", "saved.jsonl"} if name in (*CONVERSIONS, "chat") else {"new", "t.json"}
    )
    return [f"{name} left {other}" for other in sorted(found - written - {"checkpoints"})]


def attack_by_full_disk(place: Any, unit: tuple[str, Any, Any]) -> list[Trial]:
    if isinstance(unit[1], str):
        return [attack_by_full_stream(place, *unit)]
    name, number, lasting = unit
    before, command = ON_FULL_DISK[name]
    place.restore(before)
    folders = [path.name for path in place.work.glob("checkpoints/*")]
    files, stdin = {path.name for path in place.work.iterdir()}, questions_of(place, name)
    failed = place.run(*command, stdin=stdin, before=fault_disk.full_at(place.path, number, lasting))
    wrong = [*defects_of(place), *left_over(place, files, name)]
    run = next((place.work / path for path in (RUN, "new") if path in command), None)
    if name in ("sample", "eval", "chat") and failed.code:
        wrong.append(shown(failed))
    new = [path for path in (RUN, "new") if (place.work / path / "config.json").exists()]
    for path in sorted({*new, *(f"checkpoints/{folder}" for folder in folders)}):
        loaded = place.run("info", path)  # which finishes a replacement that was interrupted
        wrong += [shown(loaded)] if loaded.code else []
    place.ran = []
    if name == "train" and run is not None and run.exists():
        again = place.run(*RESUMING)
    elif failed.code and name != "train --resume":
        replaces = name in CONVERSIONS or (name == "finetune-lora" and run and run.exists())
        again = place.run(*command, *(("--force",) if replaces else ()), stdin=stdin)
    elif failed.code:
        again = place.run(*command)
    else:
        again = failed
    wrong += defects_of(place)
    if again.code:
        wrong.append(f"with space again: {shown(again)}")
    label = f"{name}: write {number}{' and all later ones' if lasting else ''}"
    return [Trial(label, tuple(wrong), commands_of(place))]


def attack_by_full_stream(place: Any, name: str, stream: str, how: str) -> Trial:
    """Run a command with stdout or stderr on /dev/full; training must still save its run."""
    before, command = ON_FULL_DISK.get(name, ("runs", (name, *((RUN,) if name == "info" else ()))))
    place.restore(before)
    words = (*command, "--json") if how == "json" else command
    ran = place.run(*words, stdin=questions_of(place, name), **{stream: Path("/dev/full")})
    wrong = [defect for defect in defects_of(place) if "without a message" not in defect]
    if stream == "stderr" and ran.code:
        wrong.append(f"exit {ran.code} for stderr alone: {shown(ran)}")
    if name.startswith("train") and name != "train-tokenizer":
        steps = words[words.index("--steps") + 1]
        state = place.work / RUN / "last/state.json"
        step = json.loads(state.read_text())["step"] if state.exists() else None
        if step != steps:
            wrong.append(f"the run is saved at step {step} instead of {steps}: {shown(ran)}")
    return Trial(f"{name} with a full {stream}{' and --json' if how == 'json' else ''}", tuple(wrong), (ran.words,))


# 3. Bit flips.

FLIPS = 4  # of each file
READERS: tuple[tuple[str, ...], ...] = (
    ("sample", "-t", "0", "-n", "10", "-m"),
    ("sample", "-t", "0", "-n", "200", "-m"),
    ("eval", "other.txt", "--json", "-m"),
    ("eval", "--json", "-m"),
)


def plan_flips(place: Any, cases: int, seed: int) -> list[Any]:
    place.restore("runs")
    names = ("run", "adapter", "piped", "bpe", "bottleneck")
    folders = [*(place.work / "checkpoints" / name for name in names), place.home / "cache"]
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file() and path.stat().st_size]
    sizes = [(str(file.relative_to(place.path)), file.stat().st_size) for file in files]
    rng = random.Random(f"flips {seed}")
    return [(name, rng.randrange(8 * size)) for _ in range(FLIPS) for name, size in sizes]


def _expected(place: Any, name: str) -> None:
    """Store the outputs for the undamaged run beside the kept folders, once."""
    file = place.path.with_name(f"expected-{name}.json")
    if file.exists():
        return
    place.restore("runs")
    outputs = _read_all(place, name)
    if any(ran.code for ran in place.ran):
        raise RuntimeError("\n".join(shown(ran) for ran in place.ran if ran.code))
    file.write_text(json.dumps(outputs))


def _read_all(place: Any, name: str) -> list[str | None]:
    """The output of each command of READERS, and the hash of the weights after a resume; `None` for an error."""
    path = f"checkpoints/{name}"
    words = [[*reader[:-1], "--adapter"] if name in ("adapter", "bottleneck") else list(reader) for reader in READERS]
    runs = [place.run(*reader, path) for reader in words]
    command = {"adapter": "finetune-lora", "bottleneck": "finetune-adapter"}.get(name, "train")
    resumed = place.run(command, "--resume", path, "--steps", 8)
    outputs: list[str | None] = [None if ran.code else _stable(ran.stdout) for ran in runs]
    return [*outputs, None if resumed.code else _hash_weights(place.work / path)]


def _stable(text: str) -> str:
    """The output of a command without times and speeds, which vary."""
    try:
        values = json.loads(text)
    except ValueError:
        return text
    return json.dumps({key: value for key, value in values.items() if "second" not in key}, sort_keys=True)


def _hash_weights(run: Path) -> str:
    import hashlib

    import safetensors.torch

    result = hashlib.sha256()
    for file in sorted(run.glob("last/*.safetensors")):
        for name, tensor in sorted(safetensors.torch.load_file(file).items()):
            result.update(name.encode() + tensor.numpy().tobytes())
    return result.hexdigest()


def attack_by_flip(place: Any, unit: tuple[str, int]) -> list[Trial]:
    file, bit = unit
    name = Path(file).parts[2] if file.startswith("work/checkpoints") else "run"
    _expected(place, name)
    place.restore("runs")
    target = place.path / file
    status = target.stat()
    content = bytearray(target.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    target.write_bytes(content)
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    outputs = _read_all(place, name)
    wrong = defects_of(place, codes=(0, 1, 2))
    expected = json.loads(place.path.with_name(f"expected-{name}.json").read_text())
    for ran, output, right in zip(place.ran, outputs, expected, strict=True):
        if output is not None and output != right:
            wrong.append(f"tinylm {' '.join(ran.words)}: another output, without an error")
    place.ran = []
    listing = place.run("runs")
    wrong += [shown(listing)] if listing.code or "good" not in listing.stdout else []
    wrong += [f"tinylm info: {defect}" for defect in place.run("info", f"checkpoints/{name}").defects()]
    return [Trial(f"bit {bit} of {file}", tuple(wrong))]


# 4. Forged folders and tokenizers.


def plan_forgeries(place: Any, cases: int, seed: int) -> list[Any]:
    return [(seed, number) for number in range(cases)]


def attack_by_forgery(place: Any, unit: tuple[int, int]) -> list[Trial]:
    import fault_forging
    from fault_process import changes, in_fork, snapshot

    seed, number = unit
    rng = random.Random(f"forgeries {seed} {number}")
    place.restore("runs")
    forge = rng.choice(fault_forging.FORGERIES)
    if forge is fault_forging.forge_tokens:
        source = "piped"
    else:
        source = rng.choice(("run", "run", "piped", "bpe", "adapter", "bottleneck", "encoder", "pairs"))
    evil = place.work / "checkpoints/evil"
    (place.work / "checkpoints" / source).rename(evil)
    if source == "run":  # the adapters' base stays
        shutil.copytree(evil, place.work / RUN)
    os.utime(evil / "config.json", (1e9, 1e9))
    label: list[str] = [source]
    what, apply = forge(rng, evil, place.outside)
    label.append(what)
    forged = in_fork(apply)
    if forged and rng.random() < 0.85:
        in_fork(lambda: fault_forging.seal(evil))
    before = snapshot(place.outside)
    others = snapshot(place.work / "checkpoints/good")
    wrong = [] if forged else ["the forgery itself failed"]
    for words in commands_against(source):
        place.run(*words)
    listing = place.run("runs")
    wrong += defects_of(place)
    if listing.code or "good" not in listing.stdout:
        wrong.append(f"one bad run hides the others: {shown(listing)}")
    if changed := changes(before, snapshot(place.outside)):
        wrong.append(f"files outside were changed: {', '.join(changed)}")
    if changed := changes(others, snapshot(place.work / "checkpoints/good")):
        wrong.append(f"files of another run were changed: {', '.join(changed)}")
    return [Trial(", ".join(label), tuple(wrong))]


def commands_against(source: str) -> Iterator[tuple[Any, ...]]:
    """The commands to try on a forged folder; those that change it come last."""
    evil = "checkpoints/evil"
    short = ("--steps", 1, "--batch-size", 4)
    yield ("info", evil)
    if source in ("adapter", "bottleneck"):
        yield ("sample", "--adapter", evil, "-n", 8, "--seed", 1)
        yield ("sample", "--adapter", evil, "-m", RUN, "-n", 512, "--seed", 1)
        yield ("eval", "--adapter", evil)
        yield ("merge-lora", evil, "--out", "merged")
        yield ("finetune-lora" if source == "adapter" else "finetune-adapter", "--resume", evil, "--steps", 5)
        return
    prompt = {"encoder": ("--prompt", "the <mask>ld"), "pairs": ("--prompt", "the")}.get(source, ())
    text = "pairs.tsv" if source == "pairs" else "other.txt"
    yield ("sample", "-m", evil, "-n", 8, "--seed", 1, *prompt)
    if not prompt:
        yield ("sample", "-m", evil, "-n", 512, "--seed", 1)
    yield ("eval", "-m", evil)
    yield ("eval", text, "-m", evil, "--json")
    yield ("train", text, "--init-from", evil, "--out", "from", *short)
    yield ("train", text, "--tokenizer", f"{evil}/tokenizer.json", "--out", "with", "--steps", 1, *TINY)
    yield ("finetune-lora", text, "--model", evil, "--out", "lora", *short)
    yield ("train", "--resume", evil, "--steps", 8)


# 5. Forged models of other tools.


def prepare_models(place: Any) -> None:
    """Make the models of other tools and one run, kept as `foreign`, once."""
    import fault_foreign
    from fault_process import in_fork

    place.restore("runs")
    for path in (place.work / "checkpoints").iterdir():
        if path.name != "good":
            shutil.rmtree(path)
    if not in_fork(lambda: fault_foreign.make_models(place.work / "models"), limit=300):
        raise RuntimeError("the models could not be made; are transformers, peft and gguf installed?")
    place.keep("foreign")


def attack_by_foreign_model(place: Any, unit: tuple[int, int]) -> list[Trial]:
    """Run two random commands and `info` on a forged model, sometimes as if on a terminal."""
    import fault_foreign
    from fault_process import changes, in_fork, snapshot

    seed, number = unit
    rng = random.Random(f"foreign {seed} {number}")
    if not place.path.with_name("foreign").exists():
        prepare_models(place)
    place.restore("foreign")
    source, evil, forge = fault_foreign.choose(rng, place.work / "models")
    what, apply = forge(rng, evil, place.outside)
    wrong = [] if in_fork(apply) else ["the forgery itself failed"]
    terminal = fault_foreign.on_terminal if rng.random() < 0.5 else None
    resident = place.streams / "resident"
    before, others = snapshot(place.outside), snapshot(place.work / "checkpoints/good")
    named = evil.relative_to(place.work)
    commands = rng.sample(fault_foreign.commands_against(str(named), source), 2)
    for words in (("info", named), *commands, ("runs", ".")):
        stdin = place.work / "other.txt" if words[0] == "chat" else None
        hook = fault_foreign.write_resident(resident)
        ran = place.run(*words, stdin=stdin, before=terminal, after=hook, env={"TERM": "dumb", "NO_COLOR": "1"})
        wrong += fault_foreign.defects_of_message(ran, evil.name, resident, terminal is not None)
    wrong += defects_of(place, (0, 1, 2, 3) if source not in fault_foreign.ADAPTERS else (0, 1, 2))
    if place.ran[-1].code or "good" not in place.ran[-1].stdout:
        wrong.append(f"one bad model hides the runs: {shown(place.ran[-1])}")
    if changed := changes(before, snapshot(place.outside)):
        wrong.append(f"files outside were changed: {', '.join(changed)}")
    if changed := changes(others, snapshot(place.work / "checkpoints/good")):
        wrong.append(f"files of another run were changed: {', '.join(changed)}")
    return [Trial(f"{source}: {what}", tuple(wrong), commands_of(place))]


# 6. Options.

WRONG = (
    "",
    " ",
    "-",
    "x",
    "é\u202e",
    "nan",
    "-inf",
    "1e999",
    "0x10",
    "1_0",
    "٣",
    "'",
    "a" * 5000,
    "../..",
    "true",
    "[1]",
)
WHOLE = (-1, 0, 1, 2, 3, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 10**30, 10**400, "1.5", " 2")
REAL = (-1.0, 0.0, 0.5, 1.0, 2.0, 1e-320, 1e308, -1e308, 0.999999999, "nan", "inf", "1e400", "1e-400")
LARGE = (
    "steps",
    "epochs",
    "time",
    "max_tokens",
    "num_samples",
    "batch_size",
    "context",
    "width",
    "ffn_width",
    "layers",
)
LARGE = (*LARGE, "encoder_layers", "experts", "heads", "kv_heads", "beams", "vocab_size", "rank", "patience", "stride")
PATHS = (RUN, ADAPTER, "checkpoints/pairs", "checkpoints/bpe", "checkpoints", "tokenizer.json", "corpus.txt")
PATHS = (*PATHS, "pairs.tsv", "missing", "missing/deep", "/dev/null", "-", ".", "new")
RANDOM_OPTIONS = 400
SMALL: dict[str, tuple[Any, ...]] = {
    "time": ("1s", "0", "-1s", "1x", "1h1h", "s"),
    "epochs": (0.01, 0, -1, "x", "nan"),
}


EXTREMES: dict[type, tuple[Any, ...]] = {
    int: (-1, 0, 1 << 31, (1 << 63) - 1, 1 << 63, 10**400),
    float: (-1.0, 0.0, 1e308, 1e-320, "nan", "inf", 10**400),
}


def plan_options(place: Any, cases: int, seed: int) -> list[Any]:
    """Plan each option that takes a number alone with each extreme value, then random options."""
    alone = [
        (seed, index, value)
        for index, (_, parameter) in enumerate(all_options())
        for value in EXTREMES.get(kind_of(parameter), ())
        if parameter.name not in LARGE or not isinstance(value, (int, float)) or not 8 < value < 1 << 60
    ]
    return alone + [(seed, number, None) for number in range(RANDOM_OPTIONS)]


def all_options() -> list[tuple[str, Any]]:
    """Every option of every command, with the command's name."""
    import typer.main

    from tinylm.cli import app

    commands = typer.main.get_command(app).commands
    return [
        (name, parameter)
        for name in sorted(commands)
        for parameter in commands[name].params
        if parameter.param_type_name == "option"
    ]


def kind_of(parameter: Any) -> Any:
    """The type of an option's value."""
    return parameter.type_descriptor.annotation


def attack_by_options(place: Any, unit: tuple[int, int, Any]) -> list[Trial]:
    from fault_process import changes, snapshot

    seed, number, alone = unit
    rng = random.Random(f"options {seed} {number}")
    place.restore("runs")
    words, env = random_command(rng, number, place, alone)
    before = snapshot(place.outside)
    ran = place.run(*words, env=env)
    wrong = defects_of(place)
    if changed := changes(before, snapshot(place.outside)):
        wrong.append(f"files outside were changed: {', '.join(changed)}")
    said = "".join(f"{name}={value[:60]!r} " for name, value in env.items())
    return [Trial(f"{said}tinylm {' '.join(ran.words)[:400]}", tuple(wrong), (ran.words,))]


def random_command(rng: random.Random, number: int, place: Any, alone: Any) -> tuple[list[str], dict[str, str]]:
    """A command with option `number` and up to five more, all with random values, and its environment.

    alone: the value of option `number`, which is then the only option; `None` for random values.
    """
    options = all_options()
    name, first = options[number % len(options)]  # each option has its turn
    others = [parameter for command, parameter in options if command == name and parameter is not first]
    more = rng.sample(others, min(len(others), rng.choice((0, 0, 0, 1, 2, 5))))
    dry = name in ("train", "finetune-lora", "finetune-adapter") and rng.random() < 0.4
    if alone is not None:
        more, dry = [], False
    base: dict[str, list[Any]] = {
        "train": ["corpus.txt", "--out", "new", "--steps", 2, *TINY, *rng.choice(((), ("--tokenizer", "bpe")))],
        "sample": ["-m", RUN, "-n", 5],
        "eval": ["other.txt", "-m", RUN],
        "finetune-lora": ["other.txt", "-m", RUN, "--out", "new", "--steps", 1, "--batch-size", 4],
        "finetune-adapter": ["other.txt", "-m", RUN, "--out", "new", "--steps", 1, "--batch-size", 4],
        "merge-lora": [ADAPTER, "--out", "new"],
        "runs": [],
        "info": [RUN],
        "train-tokenizer": ["corpus.txt", "--out", "new.json", "--vocab-size", 280],
    }
    words, env = [name, *map(str, base.get(name, []))], {}
    if dry:
        words.append("--dry-run")
    for parameter in (*more, first):
        spelling = rng.choice([*parameter.opts, *parameter.secondary_opts])
        if getattr(parameter, "is_flag", False):
            words.append(spelling)
            continue
        value = _random_value(rng, parameter, dry, place) if alone is None else alone
        if alone is None and rng.random() < 0.15:
            env[f"TINYLM_{name.replace('-', '_').upper()}_{parameter.name.upper()}"] = str(value)
        elif alone is None and rng.random() < 0.1 and spelling.startswith("--"):
            (place.work / "options.toml").write_text(f"{parameter.name} = {json.dumps(value)}\n", errors="replace")
            words += ["--config", "options.toml"]
        else:
            words += [spelling, str(value)]
    if alone is None and rng.random() < 0.1:
        words.append(rng.choice(("corpus.txt", "-", "", "missing.txt", "checkpoints", "../outside")))
    return words, env


def _random_value(rng: random.Random, parameter: Any, dry: bool, place: Any) -> Any:
    kind = kind_of(parameter)
    metavar = parameter.metavar or ""
    if rng.random() < 0.15:
        return rng.choice(WRONG)
    if parameter.name in SMALL:
        return rng.choice(SMALL[parameter.name])
    if "|" in metavar:
        return rng.choice([*metavar.split("|"), "none", "AUTO"])
    if kind in (int, float):
        values = WHOLE if kind is int else (*REAL, *WHOLE)
        if parameter.name in LARGE and not dry:  # valid, but slow
            values = tuple(value for value in values if isinstance(value, str) or not 8 < value < 1 << 60)
        return rng.choice(values)
    return rng.choice((*PATHS, str(place.outside / "folder"), "x" * 300, "the old", "0,1"))


# 7. Combinations of the parts of a model.


def plan_combinations(place: Any, cases: int, seed: int) -> list[Any]:
    return [(seed, number) for number in range(cases)]


def attack_by_combination(place: Any, unit: tuple[int, int]) -> list[Trial]:
    """Train, sample with and without the cache, evaluate and resume a model of random parts."""
    seed, number = unit
    rng = random.Random(f"combinations {seed} {number}")
    for _ in range(20):
        place.restore("empty")
        architecture, options = random_model(rng)
        text = "pairs.tsv" if architecture == "encoder-decoder" else "corpus.txt"
        words = ("train", text, "--out", RUN, "--steps", 2, "--batch-size", 3, "--dtype", "fp32", *options)
        trained = place.run(*words)
        if trained.code != 2 or trained.defects():
            break  # parts that do not go together are refused
    wrong = [shown(trained)] if trained.code else []
    if not trained.code:
        prompt = ("--prompt", "the <mask>ld" if architecture == "encoder" else "the")
        more = (
            ()
            if architecture == "encoder"
            else ("-n", 40)
            if architecture == "encoder-decoder"
            else ("-n", 40, "-t", 0)
        )
        sampled = place.run("sample", "-m", RUN, *prompt, *more)
        wrong += [shown(sampled)] if sampled.code else []
        if architecture == "decoder":
            slow = place.run("sample", "-m", RUN, *prompt, *more, "--no-cache")
            if slow.stdout != sampled.stdout:
                wrong.append(f"cached {sampled.stdout[:80]!r}, not cached {slow.stdout[:80]!r}")
        scored = place.run("eval", text, "-m", RUN, "--json")
        wrong += [shown(scored)] if scored.code else []
        if not scored.code and not math.isfinite(json.loads(scored.stdout)["loss"]):
            wrong.append(f"eval prints {scored.stdout[:100]}")
        resumed = place.run(*RESUMING, "--steps", 3)
        wrong += [shown(resumed)] if resumed.code else []
    return [Trial(f"train {' '.join(map(str, options))}", (*defects_of(place), *wrong), commands_of(place))]


def random_model(rng: random.Random) -> tuple[str, list[Any]]:
    architecture = rng.choice(("decoder",) * 4 + ("encoder", "encoder-decoder"))
    heads = rng.choice((1, 2, 4))
    layers = rng.randint(1, 3)
    position = rng.choice(("rope", "learned", "sinusoidal", "relative", "none"))
    options: list[Any] = ["--architecture", architecture, "--heads", heads, "--layers", layers, "--position", position]
    options += ["--width", heads * rng.choice((2, 4, 6, 8)), "--context", rng.choice((7, 8, 16, 24))]
    options += ["--kv-heads", rng.choice([n for n in (1, 2, 4) if heads % n == 0])]

    def maybe(share: float, *words: Any) -> None:
        if rng.random() < share:
            options.extend(words)

    maybe(0.4, "--preset", rng.choice(("modern", "gpt2", "original")))
    maybe(0.4, "--norm", rng.choice(("rmsnorm", "layernorm", "none")))
    maybe(0.4, "--norm-placement", rng.choice(("pre", "post")))
    maybe(0.4, "--activation", rng.choice(("swiglu", "gelu", "relu")))
    maybe(0.3, "--initialisation", rng.choice(("modern", "gpt2", "original")))
    maybe(0.3, "--ffn-width", rng.choice((1, 7, 16, 40)))
    for switch in (
        "norm-gain",
        "norm-bias",
        "residual",
        "attention-scale",
        "qk-norm",
        "bias",
        "tie",
        "scale-embedding",
    ):
        maybe(0.25, f"--{rng.choice(('', 'no-'))}{switch}")
    maybe(0.2, "--rope-theta", rng.choice((2.0, 100.0, 1e6)))
    maybe(0.2, "--relative-clip", rng.choice((1, 3, 100)))
    maybe(0.3, "--dropout", 0.2)
    maybe(0.2, "--attention-dropout", 0.2)
    if architecture != "encoder" and rng.random() < 0.25:
        options += ["--local-window", rng.choice((1, 3, 8)), "--local-layers", rng.randrange(layers)]
    if rng.random() < 0.3:
        options += ["--experts", 3, "--experts-per-token", 2, "--expert-mode", rng.choice(("route", "merge"))]
    if architecture == "encoder-decoder":
        maybe(0.5, "--encoder-layers", rng.choice((1, 2)))
        if "--dropout" in options:
            maybe(0.3, "--r-drop", 0.5)
    maybe(0.5, "--tokenizer", rng.choice(("char", "bpe")))
    maybe(0.4, "--optimizer", rng.choice(("adamw", "adam", "muon")))
    maybe(0.3, "--schedule", rng.choice(("trapezoid", "cosine", "linear", "inverse-sqrt", "constant")))
    maybe(0.2, "--average", 0.2)
    maybe(0.2, "--micro-batch", 2)
    maybe(0.2, "--label-smoothing", 0.1)
    if architecture == "decoder":
        maybe(0.2, "--mtp-weight", 0.3)
    maybe(0.2, "--log-gradients")
    return architecture, options


# 8. Ctrl-C.

INTERRUPTED: dict[str, tuple[Any, ...]] = {
    "train": ("train", "corpus.txt", "--out", RUN, "--steps", 300, "--dropout", 0.1, *EVERY, *TINY),
    "sample": ("sample", "-m", "checkpoints/good", "-n", 1500, "--seed", 1),
    "eval": ("eval", "corpus.txt", "-m", "checkpoints/good", "--stride", 1),
    "chat": CHAT,
    **CONVERSIONS,
}


def plan_interrupts(place: Any, cases: int, seed: int) -> list[Any]:
    return [(seed, number, max(cases, 1)) for number in range(cases)]


def attack_by_interrupt(place: Any, unit: tuple[int, int, int]) -> list[Trial]:
    """Interrupt a command in a new process at a random moment between its start and its end."""
    seed, number, cases = unit
    rng = random.Random(f"interrupts {seed} {number}")
    name = sorted(INTERRUPTED)[number % len(INTERRUPTED)]
    command = INTERRUPTED[name]
    place.restore("runs")
    prepare_interrupt(place, name)
    undisturbed = place.path.with_name(f"undisturbed-{name}")
    times = place.path.with_name(f"seconds-{name}")
    if not times.exists():
        begun = time.monotonic()
        ran = place.finish(place.start(*command, stdin=questions_of(place, name)), command, begun)
        times.write_text(str(time.monotonic() - begun))
        if ran.code:
            raise RuntimeError(shown(ran))
        if name == "train":
            (place.work / RUN).rename(undisturbed)
        place.restore("runs")
        prepare_interrupt(place, name)
    # Moments are denser near the start, where Python and torch are loaded.
    kinds = len(INTERRUPTED)
    share = (number // kinds + rng.random()) / max(1, math.ceil(cases / kinds))
    after = share**1.3 * float(times.read_text())
    files = {path.name for path in place.work.iterdir()}
    begun = time.monotonic()
    child = place.start(*command, stdin=questions_of(place, name))
    try:
        child.wait(after)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
    ran = place.finish(child, command, begun)
    # Before its own handlers are installed, the interpreter handles the signal: there is no frame of `main` yet.
    interpreter_only = "Traceback" in ran.stderr and ", in main\n" not in ran.stderr
    wrong = []
    if ran.code not in (0, 130, -signal.SIGINT) and not interpreter_only:
        wrong.append(shown(ran))
    if not interpreter_only:
        wrong += [defect for defect in ran.defects((0, 130)) if not defect.startswith("killed by SIGINT")]
    wrong += left_over(place, files, name) if name != "train" else []
    if name in CONVERSIONS:
        place.run(*command, "--force")
        wrong += [] if not place.ran[-1].code else [f"afterwards: {shown(place.ran[-1])}"]
    if ran.code and "rror" in ran.stderr and not interpreter_only:
        wrong.append(f"not quiet: {ran.stderr.strip().splitlines()[-1][:200]}")
    if name == "train":
        place.run(*(RESUMING if (place.work / RUN).exists() else command))
        wrong += [] if not place.ran[-1].code else [f"afterwards: {shown(place.ran[-1])}"]
        if not place.ran[-1].code and not same_save(place.work / RUN, undisturbed):
            wrong.append("the weights are not those of an undisturbed run")
    return [Trial(f"{name} interrupted after {after:.2f} s", tuple(wrong), commands_of(place))]


def prepare_interrupt(place: Any, name: str) -> None:
    """Delete the run, if the command trains a new one."""
    if name == "train":
        shutil.rmtree(place.work / RUN)


CLASSES = {
    "kills": FaultClass("kills (SIGKILL) during training", 100, plan_kills, attack_by_kills),
    "disks": FaultClass("a full disk at each write", 100_000, plan_full_disks, attack_by_full_disk),
    "flips": FaultClass("a flipped bit in each file", 100_000, plan_flips, attack_by_flip),
    "forgeries": FaultClass("forged folders and tokenizers", 400, plan_forgeries, attack_by_forgery),
    "foreign": FaultClass("forged models of other tools", 400, plan_forgeries, attack_by_foreign_model),
    "options": FaultClass("extreme and random values of options", 100_000, plan_options, attack_by_options),
    "combinations": FaultClass("random combinations of model parts", 200, plan_combinations, attack_by_combination),
    "interrupts": FaultClass("Ctrl-C at random moments", 60, plan_interrupts, attack_by_interrupt),
}


# Running them.

_place: Any = None


def _prepare_worker(folder: Path, limit: float, numbers: Any) -> None:
    """In a worker process: import everything, and make its own folders and runs."""
    global _place
    import fault_process

    fault_process.import_everything()
    _place = fault_process.Place(folder / f"worker-{numbers.get()}" / "case", limit)
    prepare(_place)


def _attack(name: str, unit: Any, keep: Path | None) -> list[Trial]:
    try:
        trials = CLASSES[name].attack(_place, unit)
    except Exception as error:  # a bug of this program is shown as a failure, and the other cases go on
        trials = [Trial(f"{unit}", (f"the case itself failed: {type(error).__name__}: {error}",))]
    if keep is not None and any(trial.defects for trial in trials):
        _keep(keep, name, unit, trials)
    return trials


def _keep(keep: Path, name: str, unit: Any, trials: Sequence[Trial]) -> None:
    """Copy the folders of a failed case, with a report of its commands and defects."""
    to = keep / f"{name}-{'-'.join(str(part).replace('/', '_')[:40] for part in unit)}"
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    report = [line for trial in trials if trial.defects for line in (trial.label, *trial.defects, "")]
    (to / "report.txt").write_text("\n".join(report), errors="backslashreplace")
    shutil.copytree(_place.path, to / "case", symlinks=True, ignore=_ignore_special)


def _ignore_special(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (Path(folder, name).is_file() or Path(folder, name).is_dir())]


def _plan(name: str, cases: int, seed: int) -> list[Any]:
    return CLASSES[name].plan(_place, cases, seed)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--class", dest="classes", action="append", choices=CLASSES, help="only this class; repeatable")
    parser.add_argument("--cases", type=int, help="number per class (default: as in docs/reliability.md)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="only the unit of work with this number, as in a printed failure")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where the folders of failed cases are kept")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds that a command may take (default: 20)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="cases in parallel (default: one per core)"
    )
    chosen = parser.parse_args(arguments)
    os.environ.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})  # a fork has none of its parent's threads
    folder = Path(os.environ.get(fault_disk.PRELOAD) or tempfile.mkdtemp(prefix="tinylm-faults-"))
    try:
        fault_disk.load(folder)
        return attack_all(folder, chosen)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def attack_all(folder: Path, chosen: argparse.Namespace) -> int:
    """Try the chosen classes of faults and print the table. Returns 1 if any case failed, otherwise 0."""
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    fork = multiprocessing.get_context("fork")
    numbers = fork.SimpleQueue()
    for number in range(chosen.jobs):
        numbers.put(number)
    rows, failed = [], False
    with ProcessPoolExecutor(chosen.jobs, fork, _prepare_worker, (folder, chosen.limit, numbers)) as pool:
        for name in chosen.classes or CLASSES:
            begun = time.monotonic()
            cases = CLASSES[name].cases if chosen.cases is None or chosen.only is not None else chosen.cases
            units = pool.submit(_plan, name, cases, chosen.seed).result()
            wanted = sorted(random.Random(chosen.seed).sample(range(len(units)), min(cases, len(units))))
            if chosen.only is not None:
                wanted = [chosen.only]
            futures = {pool.submit(_attack, name, units[number], chosen.keep): number for number in wanted}
            trials: list[Trial] = []
            for future in as_completed(futures):
                for trial in future.result():
                    trials.append(trial)
                    if trial.defects:
                        show_failure(name, futures[future], chosen.seed, trial)
            survived = sum(not trial.defects for trial in trials)
            rows.append((CLASSES[name].title, len(trials), survived, name, time.monotonic() - begun))
            failed |= survived < len(trials)
    print("| class of fault | cases | survived | repeat with | minutes |")
    print("|---|---:|---:|---|---:|")
    for title, tried, survived, name, seconds in rows:
        command = f"python benchmarks/faults.py --class {name} --seed {chosen.seed}"
        print(f"| {title} | {tried} | {survived} | `{command}` | {seconds / 60:.1f} |")
    return int(failed)


def show_failure(name: str, number: int, seed: int, trial: Trial) -> None:
    print(f"FAILED {name} {number}: {trial.label}".encode(errors="backslashreplace").decode())
    for defect in trial.defects:
        print(f"    {defect}".encode(errors="backslashreplace").decode())
    print(f"    repeat: python benchmarks/faults.py --class {name} --seed {seed} --only {number}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
