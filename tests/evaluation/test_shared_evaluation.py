"""Evaluation in several ranks. Reference: the result of one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.shell import story
from tests.thread_ranks import in_ranks
from tests.trained_runs import pairs_file
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.result import Evaluation
from tinylm.loaded_model import load
from tinylm.ranks import Ranks
from tinylm.text.corpus_loading import TextSource

CHAT = [
    {"messages": [{"role": "user", "content": "a" * length}, {"role": "assistant", "content": "so it was " * length}]}
    for length in range(1, 8)
]


def check(model: Path, source: TextSource | None, **settings: Any) -> None:
    """Compare the metrics of 2 and 3 ranks with those of one process."""
    expected = load(model).evaluate(source, **settings)

    def evaluate(ranks: Ranks) -> Evaluation:
        return load(model).evaluate(source, ranks=ranks, **settings)

    numbers = {name: value for name, value in vars(expected).items() if isinstance(value, int | float)}
    for size in (2, 3):
        for found in in_ranks(size, evaluate):
            assert {name: vars(found)[name] for name in numbers} == pytest.approx(numbers, rel=1e-12, abs=0)
            assert (found.baselines, found.documents) == (expected.baselines, expected.documents)


def text_file(folder: Path) -> TextSource:
    (folder / "text.txt").write_text(story(900, seed=3))
    (folder / "other.txt").write_text(story(200, seed=4))
    return TextSource(paths=(str(folder / "text.txt"), str(folder / "other.txt")))


@pytest.mark.parametrize("stride", [None, 5])
def test_ranks_share_a_text(run: Path, tmp_path: Path, stride: int | None) -> None:
    check(run, text_file(tmp_path), batch_size=3, stride=stride, by_document=True)


@pytest.mark.usefixtures("shelf_cache")
def test_ranks_share_the_validation_text_and_have_the_same_baselines(run: Path) -> None:
    check(run, None, batch_size=2, baselines=True, by_document=True)


def test_a_text_of_one_batch_leaves_the_other_ranks_without_work(run: Path, tmp_path: Path) -> None:
    check(run, text_file(tmp_path))


def test_ranks_share_masked_tokens(encoder: Path, tmp_path: Path) -> None:
    check(encoder, text_file(tmp_path), batch_size=2)


def test_ranks_share_conversations(run: Path, tmp_path: Path) -> None:
    lines = "".join(json.dumps(line) + "\n" for line in CHAT)
    (tmp_path / "chat.jsonl").write_text(lines)
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    source = TextSource(
        paths=(str(tmp_path / "chat.jsonl"),),
        format="chat",
        chat_template=str(template),
        train_on="all",
        unknown="skip",
    )
    check(run, source, batch_size=1)


def test_ranks_share_pairs_and_their_translation(
    translator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("tinylm.evaluation.pairs", "tinylm.generation.translate"):
        monkeypatch.setattr(f"{module}.SOURCES_PER_BATCH", 2)
    source = TextSource(paths=(str(pairs_file(tmp_path / "pairs.tsv")),), format="pairs")
    check(translator, source, batch_size=2, beams=EvaluationConfig.beams)
