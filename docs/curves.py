"""The curves of three runs, for docs/results.md.

    python docs/curves.py

trains the runs of RUNS that are not in checkpoints/results yet, in about five minutes on two idle cores, and draws
docs/pictures/results.svg: the training and the validation loss of each, beside the bits per byte of PPMd.
"""

import subprocess
import sys
from html import escape
from pathlib import Path

from tinylm.jobs.run_tokens import reopen_ids
from tinylm.jobs.text.baselines import baseline_bits_per_byte
from tinylm.reporter import SilentReporter
from tinylm.run_directory.loading import read_config
from tinylm.run_directory.metrics_log import History
from tinylm.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "checkpoints/results"
TEXT = (ROOT / "data/corpus.txt").read_bytes()
RUNS = {  # the title of the panel, the bytes of the text, and the options
    "short": ("Too short: 2 passes over 100 KB", 100_000, "--size nano --epochs 2"),
    "good": ("Good: 20 passes over 500 KB", 500_000, "--size nano --epochs 20 --generations 1"),
    "overfit": ("Overfits: 60 passes over 30 KB", 30_000, "--size nano --epochs 60 --generations 1"),
}
WIDTH, HEIGHT, MARGIN = 300, 200, 44  # of a panel, and of its labels
HIGHEST = 4.0  # bits per byte
STYLE = """
text { font: 12px ui-sans-serif, system-ui, sans-serif; fill: #333; }
path, line { fill: none; stroke-width: 2; }
.frame { stroke: #ccc; stroke-width: 1; } .val { stroke: #1f6fb4; } .train { stroke: #e07b00; }
.ppmd { stroke: #777; stroke-dasharray: 4 4; }
.title { font-weight: 600; } .v { fill: #1f6fb4; } .t { fill: #b86400; }
"""


def main() -> None:
    panels = []
    for index, (name, (title, size, options)) in enumerate(RUNS.items()):
        run, text = FOLDER / name, FOLDER / f"{name}.txt"
        if not run.exists():
            FOLDER.mkdir(parents=True, exist_ok=True)
            text.write_bytes(TEXT[:size])
            command = [sys.executable, "-m", "tinylm", "train", str(text), *options.split(), "--out", str(run)]
            subprocess.run(command, check=True, cwd=ROOT, timeout=1800)
        panels.append(panel(run, title, 10 + index * (WIDTH + MARGIN)))
    width, height = 10 + len(RUNS) * (WIDTH + MARGIN), HEIGHT + 80
    background = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    size_of = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size_of}>\n<style>{STYLE}</style>\n{background}\n'
    picture = ROOT / "docs/pictures/results.svg"
    picture.write_text(svg + "\n".join(panels) + "\n</svg>\n", encoding="utf-8")


def panel(run: Path, title: str, left: float) -> str:
    """One set of axes: bits per byte over passes."""
    config, history = read_config(run), History.read(run)
    data = config.data
    assert data is not None
    tokenizer = Tokenizer.load(run / "tokenizer.json")
    val, train = (reopen_ids(run, data, tokenizer, part) for part in ("val", "train"))
    ppmd = baseline_bits_per_byte(tokenizer, val[:], train, SilentReporter())["PPMd"]
    last_step = history.validation["step"][-1]

    def points(columns: dict[str, list[float]], key: str) -> str:
        bits = [config.bits_per_byte(loss) or 0 for loss in columns[key]]
        places = [(x(step), y(b)) for step, b in zip(columns["step"], bits, strict=True) if step and b <= HIGHEST]
        return "M" + " L".join(f"{px:.1f},{py:.1f}" for px, py in places)

    def x(step: float) -> float:
        return left + 30 + (WIDTH - 30) * step / last_step

    def y(bits: float) -> float:
        return 40 + HEIGHT * (1 - bits / HIGHEST)

    ticks = [
        f'<line class="frame" x1="{left + 30}" x2="{left + WIDTH}" y1="{y(bits)}" y2="{y(bits)}"/>'
        f'<text x="{left + 22}" y="{y(bits) + 4}" text-anchor="end">{bits}</text>'
        for bits in range(int(HIGHEST) + 1)
    ]
    return "\n".join(
        (
            f'<text class="title" x="{left + 30}" y="20">{escape(title)}</text>',
            *ticks,
            f'<path class="train" d="{points(history.training, "loss")}"/>',
            f'<path class="val" d="{points(history.validation, "val_loss")}"/>',
            f'<line class="ppmd" x1="{left + 30}" x2="{left + WIDTH}" y1="{y(ppmd)}" y2="{y(ppmd)}"/>',
            f'<text x="{left + 34}" y="{y(ppmd) - 5}">PPMd</text>',
            f'<text class="v" x="{left + 30}" y="{HEIGHT + 62}">validation</text>',
            f'<text class="t" x="{left + 105}" y="{HEIGHT + 62}">training, in bits per byte</text>',
        )
    )


if __name__ == "__main__":
    main()
