"""Evaluation in several ranks. Reference: the result of one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.shell import story
from tests.thread_ranks import in_ranks
from tests.trained_runs import REVERSED, pairs_file
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.jobs.pairs.translate import SOURCES_PER_BATCH
from tinylm.models.load import load
from tinylm.text.file_selection import TextSource


def check(model: Path, source: TextSource | None, **settings: Any) -> None:
    """Compare the metrics of 2 and 3 ranks with those of one process."""
    expected = load(model).evaluate(source, **settings)
    numbers = {name: value for name, value in vars(expected).items() if isinstance(value, int | float)}
    for size in (2, 3):
        for found in in_ranks(size, lambda ranks: load(model).evaluate(source, ranks=ranks, **settings)):
            assert {name: vars(found)[name] for name in numbers} == pytest.approx(numbers, rel=1e-12, abs=0)
            assert found.baselines == expected.baselines


@pytest.mark.usefixtures("shelf_cache")
def test_ranks_share_a_text(run: Path, encoder: Path, tmp_path: Path) -> None:
    """Also one of a single batch, which leaves the other ranks without work, masked tokens and the validation text."""
    for number in (1, 2):
        (tmp_path / str(number)).write_text(story(1000 // number, seed=number))
    source = TextSource(paths=(str(tmp_path / "1"), str(tmp_path / "2")))
    check(run, source, batch_size=3, stride=5)
    check(run, source)
    check(encoder, source, batch_size=2)
    check(run, None, batch_size=2, baselines=True)


def test_ranks_share_conversations(run: Path, tmp_path: Path) -> None:
    file, template = tmp_path / "chat.jsonl", tmp_path / "template.jinja"
    said = [{"user": "a" * length, "assistant": "so it was " * length} for length in range(1, 8)]
    lines = [{"messages": [{"role": role, "content": text} for role, text in pair.items()]} for pair in said]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    choices: dict[str, Any] = {"format": "chat", "chat_template": str(template), "train_on": "all", "unknown": "skip"}
    check(run, TextSource(paths=(str(file),), **choices), batch_size=1)


def test_ranks_share_pairs_and_their_translation(translator: Path, tmp_path: Path) -> None:
    pairs = REVERSED * 3
    assert 4 * len(pairs) > 3 * SOURCES_PER_BATCH
    source = TextSource(paths=(str(pairs_file(tmp_path / "pairs.tsv", pairs)),), format="pairs")
    check(translator, source, batch_size=2, beams=EvaluationConfig.beams)
