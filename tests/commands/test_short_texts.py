"""A short text is learned by heart: it is trained on as a whole, long enough to be recited."""

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.shell import records, run_ok, story
from tinylm.config.run import MAX_SHORT_TEXT
from tinylm.run_directory.loading import read_config

SMALL = ("--layers", 1, "--heads", 2, "--width", 48)
RHYME = "the old man of the sea met a cold boat, quick as joy; a bed of fog was its home."


def plan(*arguments: Any) -> dict[str, Any]:
    (found,) = records(run_ok("train", *arguments, "--dry-run", "--json"))
    return found


def test_a_text_of_some_words_is_recited_from_its_beginning(here: Path) -> None:
    """Regression: a text of 27 characters was trained on for one step, and its last tenth not at all."""
    (here / "t.txt").write_text(RHYME)
    said = run_ok("train", "t.txt", *SMALL).stderr
    assert f"text:      {len(RHYME)} tokens to train on, the same to validate with\n" in said
    assert "length:    500 steps, " in said
    assert "goal:      to learn so short a text by heart; a fraction for validation" in said
    assert "this model" not in said, "baselines that were not made to learn it"
    assert run_ok("sample", "-p", RHYME[:8], "-n", len(RHYME) - 8, "-t", 0).stdout.rstrip("\n") == RHYME
    (scored,) = records(run_ok("eval", "t.txt", "--json"))
    assert scored["bits_per_byte"] < 0.1


@pytest.mark.parametrize("number", [1, 6])
def test_each_of_a_few_conversations_is_learned(number: int, here: Path) -> None:
    """Regression: one conversation was an error, and one of six was never trained on."""
    questions = ("sea", "bed", "boat", "home", "fog", "joy")
    answers = ("old man", "cold fog", "a quick joy", "no", "it is", "met a bed")
    facts = list(zip(questions, answers, strict=True))[:number]
    messages = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}] for question, answer in facts
    ]
    (here / "c.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in messages))
    said = run_ok("train", "c.jsonl", *SMALL).stderr
    assert f"; {number} conversation{'s' * (number > 1)}\n" in said
    for question, answer in facts:
        assert run_ok("sample", "--chat", question, "-t", 0).stdout.strip().endswith(answer)


def test_the_plan_has_no_cliff_up_to_the_length_that_is_learned_by_heart(here: Path) -> None:
    lengths = (20, 100, 300, 1000, 3000, 6400, 10_000, MAX_SHORT_TEXT)
    steps = []
    for length in lengths:
        (here / "t.txt").write_text((story(1000) * 20)[:length])
        found = plan("t.txt", "--tokenizer", "char")
        training, data, model = found["training"], found["data"], found["model"]
        steps.append(training["budget"]["steps"])
        assert (data["train_tokens"], data["val_tokens"], data["train_characters"]) == (length, length, length)
        assert training["batch_size"] * model["context"] <= min(length, 1024)
        assert (training["keep"], training["patience"], training["weight_decay"]) == ("best", None, 0.1)
        assert (training["bpe_dropout"], model["dropout"]) == (0, 0)
    assert steps[0] == 500
    assert all(before <= after <= 2 * before for before, after in itertools.pairwise(steps))


def test_a_longer_text_or_a_chosen_fraction_or_many_labels_hold_a_part_back(here: Path) -> None:
    (here / "long.txt").write_text((story(1000) * 21)[: MAX_SHORT_TEXT + 1])
    found = plan("long.txt", "--tokenizer", "char")
    assert (found["data"]["val_tokens"], found["training"]["budget"]["time"]) == (1500, 600)
    (here / "short.txt").write_text(story(1000)[:1000])
    assert plan("short.txt", "--val-fraction", 0.2)["data"]["val_tokens"] == 200
    for number, held_back in ((2, 2), (49, 49), (50, 5)):
        texts = [{"text": f"no {index}", "label": "ab"[index % 2]} for index in range(number)]
        (here / "l.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
        assert plan("l.jsonl")["data"]["val_records"] == held_back


def test_a_run_on_a_short_text_is_resumed_with_its_text_also_from_standard_input(here: Path) -> None:
    (here / "t.txt").write_text(RHYME)
    run_ok("train", "t.txt", *SMALL, "--steps", 2, "--out", "file")
    run_ok("train", "-", *SMALL, "--steps", 2, "--out", "piped", stdin=RHYME)
    assert read_config(here / "piped").data.val_tokens == len(RHYME)
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    run_ok("train", "--resume", "file", "t.txt", "--steps", 3)
    run_ok("train", "--resume", "piped", "--steps", 3)


def test_skipped_characters_of_a_short_text_count_once(here: Path) -> None:
    (here / "t.txt").write_text(RHYME)
    run_ok("train", "t.txt", *SMALL, "--steps", 1, "--out", "base")
    (here / "more.txt").write_text(RHYME + "é")
    said = run_ok("train", "more.txt", "--init-from", "base", "--unknown", "skip", "--steps", 1).stderr
    assert "Skipped 1 character of the text without an id, 1 different one ('é' (U+00E9))." in said
