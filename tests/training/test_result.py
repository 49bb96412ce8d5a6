"""The result of training as texts, HTML and curves. Reference: the records of the run."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest

from tests.shell import story
from tinylm.evaluation.result import Evaluation
from tinylm.run_directory.metrics_log import History
from tinylm.system.html import HEIGHT, MARGIN, WIDTH, html_table, svg_plot
from tinylm.training.api import train
from tinylm.training.result import TrainingResult

HOSTILE = "</td><script>alert(1)</script>&"


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    folder = tmp_path_factory.mktemp("result")
    (folder / "text").write_text(story(3000))
    sizes = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 4}
    return train(folder / "text", folder / "run", steps=40, eval_every=10, log_every=5, val_fraction=0.1, **sizes)


def test_the_repr_has_the_best_loss_and_why_training_stopped(result: TrainingResult) -> None:
    bits, nats = result.best_val_bits_per_byte, result.best_val_loss
    first, second, *_ = repr(result).splitlines()
    loss = f"{bits:.4f} bits per byte ({nats:.4f} nats per token)"
    assert first == f"TrainingResult({str(result.run)!r}: best validation loss {loss}, at step {result.best_step};"
    assert re.fullmatch(r" {6}stopped at step 40, \d+\.\d epochs: all steps are done;", second)
    stopped = replace(result, best_val_loss=None, best_val_bits_per_byte=None, stopped_by="signal")
    assert "best validation loss -;" in repr(stopped) and "a signal stopped it" in repr(stopped)


def test_the_curves_have_the_points_of_the_records(result: TrainingResult) -> None:
    records = [json.loads(line) for line in (result.run / "metrics.jsonl").read_text().splitlines()]
    evaluated = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r and "val_tokens" not in r]
    logged = [(r["step"], r["loss"]) for r in records if "loss" in r]
    assert [step for step, _ in evaluated] == [10, 20, 30, 40] and len(logged) == 8
    backend = matplotlib.get_backend()
    matplotlib.use("agg")
    axes = result.plot()
    matplotlib.use(backend)
    lines = [list(zip(*line.get_data(), strict=True)) for line in axes.get_lines()]
    assert lines == [logged, evaluated]
    assert axes.get_ylabel() == "loss, nats per token" and axes.get_ylim()[1] >= max(loss for _, loss in evaluated)
    assert result.plot(axes) is axes

    shown = result._repr_html_()
    image, table = shown.split("</svg>")
    assert [line.get("points").count(",") for line in drawn(f"{image}</svg>")][1] == 4
    assert f"<td>{result.run}</td>" in table and f"{result.best_val_bits_per_byte:.4f} bits per byte" in table


def drawn(image: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(image).findall("{http://www.w3.org/2000/svg}polyline")


def test_a_plot_places_its_points_between_the_ends_of_its_axes() -> None:
    lines = {"a": [(0.0, 1.0), (5.0, 3.0), (10.0, 9.0)], "b": [(10.0, 2.0)]}
    first, second = (line.get("points") for line in drawn(svg_plot(lines, HOSTILE, top=3.0)))
    left, right, bottom, top = MARGIN, WIDTH - MARGIN, HEIGHT - MARGIN / 2, MARGIN / 2
    assert first == f"{left:.1f},{bottom:.1f} {(left + right) / 2:.1f},{top:.1f}"  # 9.0 is above the top
    assert second == f"{right:.1f},{(bottom + top) / 2:.1f}"
    assert svg_plot({"a": []}, "none") == ""
    (point,) = drawn(svg_plot({"a": [(3.0, 4.0)]}, "one"))
    assert point.get("points") == f"{(left + right) / 2:.1f},{(bottom + top) / 2:.1f}"


def test_texts_of_a_run_are_no_markup(result: TrainingResult) -> None:
    named = replace(
        result,
        run=Path(HOSTILE),
        loss_unit=HOSTILE,
        history=History({"step": [], "loss": []}, {"step": [], "val_loss": []}),
    )
    evaluation = Evaluation(loss=1.0, tokens=5, scores={HOSTILE: 0.5})
    for shown in (
        named._repr_html_(),
        evaluation._repr_html_(),
        html_table({HOSTILE: HOSTILE}),
        svg_plot({HOSTILE: [(0, 1)]}, HOSTILE),
    ):
        assert "<script" not in shown and "script&gt;" in shown


def test_an_evaluation_is_shown_without_what_it_lacks_and_with_its_intervals() -> None:
    evaluation = Evaluation(
        loss=1.25, loss_low=1.2, loss_high=1.3, perplexity=3.49, tokens=1234, bytes=5000, baselines={"xz": 2.5}
    )
    assert repr(evaluation) == (
        "Evaluation(loss 1.2500 (1.2000 to 1.3000) nats per token, perplexity 3.4900, tokens 1,234, bytes 5,000, "
        "xz (baselines) 2.5000)"
    )
    assert "<td>1.2500 (1.2000 to 1.3000) nats per token</td>" in evaluation._repr_html_()
