"""Which weights of a run are kept for inference, and the last ones by the name of their folder."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.shell import TINY, assert_error, records, run_ok, same_tensors, tinylm
from tinylm.run_directory.weights import read_header

OVERFIT = ("--steps", 30, "--eval-every", 5, "--lr", 3, "--schedule", "constant", *TINY)  # the validation loss rises


def losses(run: Path) -> dict[int, float]:
    """The validation losses in metrics.jsonl by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


def facts(here: Path, number: int) -> None:
    """Write a file of this number of lines that cannot be predicted from others."""
    words = random.Random(1)
    (here / "facts.txt").write_text("".join("".join(words.choices("abcd ", k=20)) + "\n" for _ in range(number)))


def trained(here: Path, number: int, *options: Any) -> str:
    """Train on this number of facts, and return what was said."""
    facts(here, number)
    return run_ok("train", "facts.txt", "--format", "lines", "--out", "run", *OVERFIT, *options).stderr


def kept_step(run: Path) -> int:
    return read_header(run / "model.safetensors").step


def test_few_validation_records_keep_the_last_weights_and_say_why(here: Path) -> None:
    """Regression: of 40 questions, 4 were for validation, and an adapter that had learned nothing was kept."""
    said = trained(here, 49)
    assert "weights:   the last ones are kept: 4 records to validate with do not show which are better" in said
    found = losses(here / "run")
    best = min(found, key=lambda step: found[step])
    assert best < 30
    assert kept_step(here / "run") == 30
    assert same_tensors(here / "run/model.safetensors", here / "run/last/model.safetensors")
    assert "The last weights are kept, since the validation data are too few to choose by." in said
    assert re.search(rf"Best validation loss: .*, at step {best}\.", said)
    run_ok("train", "--resume", "run", "--steps", 36)
    assert kept_step(here / "run") == 36


def test_enough_records_or_a_patience_keep_the_best_weights(here: Path) -> None:
    for number, options in ((49, ("--patience", 9)), (200, ("--force",))):
        said = trained(here, number, *options)
        found = losses(here / "run")
        assert "the last ones are kept" not in said
        assert kept_step(here / "run") == min(found, key=lambda step: found[step]) < 30
        assert "those of the last step are in run/last." in said


def test_the_plan_decides_by_the_length_of_the_validation_text_and_sees_few_records_forty_times(here: Path) -> None:
    for characters, keep in ((6400, "last"), (6410, "best")):
        (here / "t.txt").write_text(("ab cd\n" * 2000)[:characters])
        (plan,) = records(run_ok("train", "t.txt", *TINY, "--dry-run", "--json"))
        assert (plan["data"]["val_tokens"], plan["training"]["keep"]) == (characters // 10, keep)
    facts(here, 199)
    (plan,) = records(run_ok("train", "facts.txt", *TINY, "--format", "lines", "--dry-run", "--json"))
    assert (plan["training"]["budget"]["epochs"], plan["training"]["patience"]) == (40, None)


def test_the_last_weights_of_a_model_are_named_by_their_folder(here: Path) -> None:
    trained(here, 200)
    (scored,) = records(run_ok("eval", "-m", "run/last", "--json"))
    assert scored["loss"] == pytest.approx(losses(here / "run")[30], rel=1e-5)
    (best,) = records(run_ok("eval", "-m", "run", "--json"))
    assert best["loss"] == pytest.approx(min(losses(here / "run").values()), rel=1e-5)
    assert run_ok("sample", "-m", "run/last", "-n", 5, "--seed", 1).stdout
    run_ok("export", "run/last", "--to", "hf", "--out", "hf")
    text = ("eval", "facts.txt", "--format", "lines", "--json", "-m")
    exported, own = (records(run_ok(*text, model))[0]["loss"] for model in ("hf", "run/last"))
    assert exported == pytest.approx(own, rel=1e-4)
    run_ok("train", "--resume", "run/last", "--steps", 31)
    assert 31 in losses(here / "run")
    assert_error(tinylm("sample", "-m", "run/lost"), 2, "There is no file or folder at run/lost")


def test_the_last_weights_of_an_adapter_are_named_by_their_folder_and_can_be_a_base(run: Path, here: Path) -> None:
    (here / "facts.txt").write_text("the old man\n" * 400)
    options = ("--format", "lines", "--steps", 8, "--eval-every", 2, "--lr", 0.1)
    run_ok("finetune-lora", "facts.txt", "-m", run, "--out", "ad", *options)
    (scored,) = records(run_ok("eval", "--adapter", "ad/last", "-m", run, "--json"))
    assert scored["loss"] == pytest.approx(losses(here / "ad")[8], rel=1e-4)
    run_ok("merge-lora", "ad/last", "-m", run, "--out", "merged")
    text = ("eval", "facts.txt", "--format", "lines", "--json", "-m")
    merged, adapted = (records(run_ok(*text, *m))[0]["loss"] for m in (("merged",), (run, "--adapter", "ad/last")))
    assert merged == pytest.approx(adapted, rel=1e-4)
    run_ok("train", "facts.txt", "--format", "lines", "--out", "checkpoints/base", "--steps", 4, *TINY)
    last = here / "checkpoints/base/last"
    assert run_ok("finetune-lora", "facts.txt", "-m", last, *options).stdout.strip().endswith("checkpoints/base-lora")
    assert run_ok("sample", "--adapter", "base-lora", "-n", 3).stdout
