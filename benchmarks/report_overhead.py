"""The share of training time that `tinylm train --report` takes.

    python benchmarks/report_overhead.py data/corpus.txt --seconds 60

Trains with the report and prints the time that its writes took as a share of the training time, with the bound.
"""

import argparse
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measure import describe_machine, table

import tinylm
from tinylm.report.live import MAX_SHARE, LiveReport
from tinylm.reporter import LogReporter


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", help="text to train on")
    parser.add_argument("--seconds", type=float, default=60.0, help="training time (default: 60)")
    parser.add_argument("--size", default="nano", help="size of the model (default: nano)")
    chosen = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        report = LiveReport(page, LogReporter())
        result = tinylm.train(
            [chosen.text], out=Path(folder) / "run", size=chosen.size, time=chosen.seconds, callbacks=[report]
        )
        report.close()
        size = page.stat().st_size
    print(describe_machine(["torch"]))
    row = [f"{result.seconds:.1f}", f"{report.seconds:.2f}", f"{report.seconds / result.seconds:.2%}", f"{size:,}"]
    print(table(["training (s)", "writing (s)", f"share (bound: {MAX_SHARE:.0%} and one write)", "bytes"], [row]))


if __name__ == "__main__":
    main()
