"""Errors of the command line: what the message of each says, with its exit code, and that nothing is written.

To add one, add a row to the group of its command: (command line, exit code, what the message says).

- The command line is written as in a shell: words are quoted, `NAME=value` before it sets a variable, and `< file`
  after it is standard input. It runs in a folder with the FILES. `{run}` is the path of a run of
  tests/trained_runs.py, by the name of its fixture.
- The message contains the parts between ` ... ` in this order. Settings are flags in it, without backticks.
- A message of the library is tested at the library. Here, a row per kind shows that it reaches the user, with flags.
- All rows of a group are one test, which names every row that fails. Rows on runs are in groups of their own, so that
  the others do not wait for their training.
"""

import re
import shlex
from pathlib import Path

import pytest

from tests.shell import TINY, Result, snapshot, story, tinylm

FILES: dict[str, str | bytes] = {
    "corpus.txt": story(3000),
    "empty.txt": "",
    "x.txt": "x",
    "photos/beach.jpg": b"sand",
}
SHAPE = " ".join(TINY)
TRAIN = f"train corpus.txt --steps 2 {SHAPE}"
BUDGET = "--steps 2 --batch-size 4"

Row = tuple[str, int, str]
ERRORS: dict[str, list[Row]] = {
    "train": [
        ("train", 2, "tinylm train corpus.txt ... standard input"),
        (
            "train absent.txt",
            2,
            "There is no file or folder 'absent.txt'; check the path, or use - for standard input.",
        ),
        (f"{TRAIN} --steps 0", 2, "--steps is 0; it must be from 1 to 9007199254740992."),
        (f"{TRAIN} --preset bert", 2, "--preset is 'bert'; it must be one of: modern, gpt2, original"),
        (f"{TRAIN} --epochs 1", 2, "--steps and --epochs contradict each other"),
        (f"{TRAIN} --steps many", 2, "Invalid value for '--steps' ... valid integer"),
        (f"{TRAIN} --out photos --force", 2, "photos contains files that do not belong to a run (beach.jpg) ... --out"),
        ("TINYLM_TRAIN_STEPS=few train corpus.txt", 2, "'--steps' ... in the environment variable TINYLM_TRAIN_STEPS"),
        ("train - < empty.txt", 2, "standard input contains no text"),
    ],
    "train-tokenizer": [
        ("train-tokenizer absent.txt", 2, "'absent.txt'"),
        ("train-tokenizer corpus.txt --kind word", 2, "--kind is 'word'; it must be one of: char, bpe"),
    ],
    "finetune-lora": [
        ("finetune-lora", 2, "tinylm finetune-lora corpus.txt ... standard input"),
        ("finetune-lora corpus.txt", 2, "no trained model under checkpoints/"),
    ],
    "finetune-lora of a run": [
        (f"finetune-lora corpus.txt -m {{run}} {BUDGET} --rank 0", 2, "--rank is 0"),
        (f"finetune-lora corpus.txt -m {{run}} {BUDGET} --lr 0", 2, "--lr is 0.0"),
    ],
    "sample": [
        ("sample --temp 0.5", 2, "No such option: --temp. Did you mean --temperature?"),
    ],
    "sample of a run": [
        ("sample -m {run} -n 0", 2, "--max-tokens is 0"),
    ],
    "chat": [
        ("chat --temp 0", 2, "No such option: --temp. Did you mean --temperature?"),
    ],
    "eval": [
        ("eval --temp 0", 2, "No such option: --temp. Did you mean --temperature?"),
        ("eval --dataset a.txt", 2, "It is an argument without a flag: tinylm eval TEXT."),
    ],
    "eval of a run": [
        ("eval -m {run} --stride 0", 2, "--stride is 0; it must be from 1 to"),
    ],
    "info": [
        ("info absent", 2, "There is no run at absent. List the runs with: tinylm runs."),
        ("info --model a", 2, "It is an argument without a flag: tinylm info RUN."),
    ],
    "export": [
        ("export --model a", 2, "It is an argument without a flag: tinylm export MODEL."),
    ],
}


@pytest.fixture
def files(here: Path) -> Path:
    for name, content in FILES.items():
        path = here / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return here


def run_line(line: str, request: pytest.FixtureRequest) -> Result:
    """The result of a command line of a row."""
    paths = {name: request.getfixturevalue(name) for name in re.findall(r"\{(\w+)\}", line)}
    for name, path in paths.items():
        line = line.replace(f"{{{name}}}", str(path))
    words = shlex.split(line)
    env = {}
    while re.match("[A-Z_]+=", words[0]):
        name, _, env[name] = words.pop(0).partition("=")
    stdin = b""
    if words[-2:-1] == ["<"]:
        stdin = Path(words.pop()).read_bytes()
        words.pop()
    return tinylm(*words, stdin=stdin, env=env)


def message_of(result: Result) -> str:
    """The line of an error of tinylm, or the text in the box of an error of the option parser."""
    line = result.stderr.splitlines()[-1] if result.stderr else ""
    return line if line.startswith("Error: ") else " ".join(re.sub("[│╭╮╰╯─]", " ", result.stderr).split())


def complaints(result: Result, code: int, says: str) -> list[str]:
    """What is wrong with an error."""
    message = message_of(result)
    found = []
    if result.exit_code != code:
        found.append(f"the exit code is {result.exit_code}")
    if result.stdout:
        found.append(f"stdout is {result.stdout!r}")
    if not re.search(".*".join(map(re.escape, says.split(" ... "))), message):
        found.append(f"the message does not say {says!r}")
    if "Traceback" in result.stderr or "`" in message:
        found.append("it has a traceback, or the name of a setting in place of a flag")
    if message.startswith("Error: ") and not re.search(r"[^.]\.$", message):
        found.append("it is not a sentence")
    return [f"{problem}: {message!r}" for problem in found]


@pytest.mark.parametrize("group", ERRORS)
def test_an_error_has_its_exit_code_and_message_and_nothing_is_written(
    group: str, files: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 1000)
    before = snapshot(files)
    wrong = []
    for line, code, says in ERRORS[group]:
        result = run_line(line, request)
        wrong += [f"{line}\n    {problem}" for problem in complaints(result, code, says)]
        if snapshot(files) != before:
            wrong.append(f"{line}\n    wrote {sorted(snapshot(files).keys() ^ before.keys())}")
    assert not wrong, "\n".join(wrong)
