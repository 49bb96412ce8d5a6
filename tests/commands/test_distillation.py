"""Distillation on the command line: training, resume, and teachers that cannot be used."""

import dataclasses
from pathlib import Path

import pytest

from tests.shell import TINY, assert_error, run_ok, same_tensors, story, tinylm
from tinylm.config.run import TeacherConfig
from tinylm.errors import UsageError
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import read_config, read_weights
from tinylm.run_directory.metrics_log import read_metrics

FIXED = (*TINY, "--steps", 8, "--eval-every", 4, "--save-every", 4, "--dropout", "0.1", "--schedule", "constant")


@pytest.fixture
def text(here: Path) -> Path:
    (here / "text.txt").write_text(story(6000))
    for seed in (1, 2):
        run_ok("train", "text.txt", "--out", f"teacher{seed}", "--seed", seed, "--steps", 20, *TINY)
    return here / "text.txt"


def test_a_run_records_its_teachers_and_has_their_tokenizer(text: Path, here: Path) -> None:
    both = ("--teacher", "teacher1", "--teacher", "teacher2")
    run_ok("train", text, "--out", "whole", *both, *FIXED)
    run_ok("train", text, "--out", "alone", *FIXED)
    assert not same_tensors(here / "whole/model.safetensors", here / "alone/model.safetensors")
    config = read_config(here / "whole")
    teachers = [read_config(here / f"teacher{n}") for n in (1, 2)]
    assert config.tokenizer == teachers[0].tokenizer
    assert config.training.objective == "distillation"
    digests = [read_weights(here / f"teacher{n}", teachers[n - 1]).digest for n in (1, 2)]
    assert [teacher.digest for teacher in config.teachers] == digests
    assert all(record["val_bits_per_byte"] > 0 for record in read_metrics(here / "whole") if "val_loss" in record)
    planned = run_ok("train", text, "--teacher", "teacher1", "--layers", 1, "--dry-run").stdout
    assert "context 16" in planned  # that of the teacher, not of the planned size
    assert "teachers: " in planned and "teacher1" in planned
    run_ok("train", text, "--out", "further", "--init-from", "teacher1", *both, "--teacher-weight", 1, "--steps", 2)
    assert_error(tinylm("train", "--resume", "alone", "--teacher", "teacher1"), 2, "alone learns from no teacher")
    run_ok("sample", "-m", "whole", "-n", 5)
    run_ok("eval", "-m", "whole")


def test_a_teacher_that_was_moved_is_found_by_its_weights_or_named_again(text: Path, here: Path) -> None:
    run_ok("train", text, "--out", "student", "--teacher", "teacher1", *FIXED, "--steps", 4)
    (here / "teacher1").rename(here / "renamed")
    run_ok("train", "--resume", "student", "--steps", 5)
    (here / "elsewhere").mkdir()
    (here / "renamed").rename(here / "elsewhere/moved")
    failed = tinylm("train", "--resume", "student", "--steps", 6)
    assert_error(failed, 2, "was not found, or has other weights now; name it with --teacher")
    other = tinylm("train", "--resume", "student", "--steps", 6, "--teacher", "teacher2")
    assert_error(other, 2, "teacher2 is no teacher of student, or has other weights now")
    run_ok("train", "--resume", "student", "--steps", 6, "--teacher", "elsewhere/moved")


def test_only_the_teacher_that_was_moved_has_to_be_named_again(text: Path, here: Path) -> None:
    run_ok("train", text, "--out", "student", "--teacher", "teacher1", "--teacher", "teacher2", *FIXED, "--steps", 4)
    (here / "elsewhere").mkdir()
    (here / "teacher1").rename(here / "elsewhere/moved")
    run_ok("train", "--resume", "student", "--steps", 5, "--teacher", "elsewhere/moved")


def test_a_forged_run_that_names_an_unfitting_teacher_is_refused(text: Path, here: Path) -> None:
    """Its digest leads to another model of the user, or its objective has no teachers."""
    (here / "other.txt").write_text(story(3000).upper())
    run_ok("train", "other.txt", "--out", "other", "--steps", 4, *TINY)
    run_ok("train", text, "--out", "student", "--teacher", "teacher1", *FIXED, "--steps", 4)
    config, digest = read_config(here / "student"), read_weights(here / "other", read_config(here / "other")).digest
    forged = TeacherConfig(path="/etc/other", digest=digest, parameters=1)
    RunDirectory(here / "student").write_config(dataclasses.replace(config, teachers=(forged,)))
    assert_error(tinylm("train", "--resume", "student", "--steps", 5), 2, "other has another vocabulary than the model")
    with pytest.raises(UsageError, match="has teachers if its objective learns from them, and only then"):
        dataclasses.replace(config, teachers=())


def test_teachers_that_cannot_be_used_are_errors_before_training(text: Path, here: Path) -> None:
    (here / "other.txt").write_text(story(3000).upper())
    run_ok("train", "other.txt", "--out", "other", "--steps", 4, *TINY)
    run_ok("train", text, "--out", "masked", "--architecture", "encoder", "--steps", 4, *TINY)
    run_ok("finetune-lora", text, "-m", "teacher1", "--out", "lora", "--steps", 2, "--batch-size", 2)
    for arguments, code, message in (
        (("--teacher", "teacher1", "--teacher", "other"), 2, "have different tokenizers; name teachers that share one"),
        (("--teacher", "teacher1", "--tokenizer", "bpe"), 2, "--teacher fixes --tokenizer; leave it out"),
        (("--teacher", "teacher1", "--context", 64), 2, "a context of 16 tokens, and the training sequences have"),
        (("--teacher", "masked"), 2, "--teacher is for decoders"),
        (("--teacher", "lora"), 2, "is an adapter, not a model"),
        (("--teacher", "missing"), 2, "missing"),
        (("--teacher", "teacher1", "--objective", "next-token"), 2, "--teacher fixes --objective"),
        (("--teacher", "teacher1", "--label-smoothing", 0.1), 2, "--teacher fixes --label-smoothing"),
        (("--teacher", "teacher1", "--init-from", "teacher1", "--extend-vocab"), 2, "--teacher fixes --extend-vocab"),
        (("--teacher", "teacher1", "--out", "teacher1", "--force"), 2, "is a teacher, which is never written to"),
        (("--teacher", "teacher1/last", "--out", "teacher1", "--force"), 2, "is a teacher, which is never written to"),
        (
            ("--objective", "distillation"),
            2,
            "--objective distillation needs a model to learn from; name it with --teacher",
        ),
        (("--teacher", "teacher1", "--init-from", "other"), 2, "have different tokenizers"),
    ):
        options = ("--steps", 2) if "--init-from" in arguments else FIXED
        assert_error(tinylm("train", text, "--out", "student", *options, *arguments), code, message)
    assert not (here / "student").exists()
    adapter = tinylm("finetune-lora", text, "--model", "teacher1", "--out", "adapter", "--objective", "distillation")
    assert_error(adapter, 2, "--objective distillation needs a model to learn from; adapters take none; leave it out")
    assert not (here / "adapter").exists()
