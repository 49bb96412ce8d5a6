"""Records of metrics.jsonl are read back, except damaged ones."""

from pathlib import Path

from tests.run_directory.saved_runs import saved_run
from tinylm.run_directory.metrics_log import read_metrics


def test_records_after_a_step_are_dropped_and_a_truncated_line_is_skipped(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0)
    for step in range(5):
        run.append_metrics({"step": step, "loss": step / 3})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    assert [record["step"] for record in read_metrics(run.path)] == [0, 1, 2, 3, 4]
    run.truncate_metrics(2)
    run.append_metrics({"step": 3})
    assert read_metrics(run.path) == [*({"step": s, "loss": s / 3} for s in range(3)), {"step": 3}]


def test_a_run_without_metrics_has_an_empty_list(tmp_path: Path) -> None:
    run = saved_run(tmp_path / "run", 0)
    assert read_metrics(run.path) == []
    run.truncate_metrics(3)
    assert read_metrics(run.path) == []
