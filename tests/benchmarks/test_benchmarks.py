"""The programs of benchmarks/: each prints its table for tiny sizes, and the statistics that they share."""

import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.shell import ROOT, run_child, story
from tests.variants import small

SHAPE = "--layers 1 --heads 2 --width 16 --context 24 --rounds 1 --warmup 0"
COMMANDS = {  # by program, or by program and its first argument: options, a title of a column, and rows of the table
    "ablation.py": (
        'TEXT --groups residuals --steps 2 --options "--size nano --context 16 --batch-size 2"',
        "residuals",
        2,
    ),
    "finetuning.py": ("--shape tiny --steps 3 --context 32 --peers fp32", "speedup of tinylm", 2),
    "formats.py differences": ("--families gpt2", "cached logits", 1),
    "formats.py encoding": ("TEXT --megabytes 0.01 --vocab-size 300 --rounds 1", "times tokenizers", 6),
    "formats.py opening": ("--layers 1 --width 64", "MB, anonymous", 4),
    "formats.py startup": ("--rounds 1", "times import torch", 3),
    "gpu.py": ("--small --rounds 1 --device cpu", "of the measured limit", 6),
    "learning.py": ('TEXT --steps 2 --seeds 1 --options "--size nano --context 16"', "of the peak", 1),
    "sampling.py": ("--models 4x128 --kinds f32 --rounds 1", "times llama.cpp", 3),
    "scale.py corpora": ("--gigabytes 0.002", "1 TB", 9),
    "scale.py memory": ("--models 1x32 --kinds adamw lora", "estimate, MB", 2),
    "scale.py ranks": (f"{SHAPE} --rows 2 --dtypes fp32", "efficiency", 1),
    "training.py": (f"{SHAPE} --batch-size 2", "share of product rate", 9),
}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a program, as it finds the others beside it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_program_prints_its_table_and_the_machine(command: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(story(6000))
    options, column, rows = COMMANDS[command]
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', f"{command} {options.replace('TEXT', 'text.txt')}")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = run_child([sys.executable, f"{ROOT}/benchmarks/{words[0]}", *words[1:]], limit=280, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr
    header, _, *found = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert column in header
    assert len(found) >= rows, result.stdout
    assert f"torch {torch.__version__}" in result.stdout or command == "formats.py encoding"


def test_programs_find_what_they_import(programs: Callable[[str], ModuleType]) -> None:
    names = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert names == {"measure", *(command.split(".")[0] for command in COMMANDS)}
    assert all(programs(name).__doc__ for name in names)


def test_functions_take_turns_and_ratios_are_computed_per_round(programs: Callable[[str], ModuleType]) -> None:
    """A machine that is ten times slower in one round does not change the ratio."""
    measure = programs("measure")
    seconds = {"slow": iter([90, 4, 40, 6]), "fast": iter([90, 2, 20, 2])}
    now, calls = 0.0, list[str]()

    def function(name: str) -> Callable[[], None]:
        def work() -> None:
            nonlocal now
            calls.append(name)
            now += next(seconds[name])

        return work

    functions = {name: function(name) for name in seconds}
    times = measure.take_turns(functions, rounds=3, warmup=1, clock=lambda: now)
    assert calls == ["slow", "fast"] * 4
    assert times == {"slow": [4, 40, 6], "fast": [2, 20, 2]}
    assert str(measure.speedup(times, "fast", base="slow")) == "2.00 (2.00 to 3.00)"
    assert measure.tokens_per_second(times, "slow", 9000) == "1,500"
    assert measure.table(["name", "x"], [["a", "10"]]) == "| name | x  |\n| ---- | -- |\n| a    | 10 |"
    with pytest.raises(ValueError, match="0 rounds"):
        measure.take_turns({}, rounds=0)


@pytest.mark.slow
def test_tinylm_and_the_peer_take_the_same_gradient_step(programs: Callable[[str], ModuleType]) -> None:
    """Compares a weight after a step by the same gradient: the same logits, loss, clipping and number of steps."""
    training = programs("training")
    model, peer = training.build_pair(small("gpt2", kv_heads=4))
    batch = training.random_batch(small("gpt2", kv_heads=4), rows=2)
    gradients: dict[int, torch.Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        found = {id(p): p.grad.clone() for group in optimizer.param_groups for p in group["params"]}
        assert not gradients.keys() & found.keys()
        gradients.update(found)

    hook = register_optimizer_step_pre_hook(keep)  # of all optimizers
    try:
        training.tinylm_step(model, batch, "fp32")()
        training.peer_step(peer, training.peer_loss(peer, batch), "fp32", fused=True)()
    finally:
        hook.remove()
    ours, theirs = (gradients[id(weight)] for weight in (model.embedding.weight, peer.transformer.wte.weight))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
