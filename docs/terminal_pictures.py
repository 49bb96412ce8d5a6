"""Pictures of the terminal for README.md, from what tinylm prints in tmux.

    python docs/terminal_pictures.py

trains on data/corpus.txt in a temporary folder, samples from the model, and writes docs/pictures/terminal-train.svg,
with the bar as it was in the middle of training, and docs/pictures/terminal-sample.svg. Needs tmux. The pictures have a
background of their own, and load no font and nothing else.
"""

import io
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
COLUMNS, ROWS = 100, 30
LIMIT = 900  # seconds
SOCKET = "tinylm-pictures"
TRAIN = "tinylm train data/corpus.txt --size micro --steps 600"
SAMPLE = 'tinylm sample --prompt "Dear Ned," --max-tokens 60 --seed 3'
SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
 font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").symlink_to(ROOT / "data")
        draw("terminal-train", TRAIN, record(TRAIN, Path(folder), until=r" [67]\d% -"))
        record(TRAIN + " --force", Path(folder), until=r"^END$")
        draw("terminal-sample", SAMPLE, record(SAMPLE, Path(folder), until=r"^END$"))


def tmux(*words: str) -> str:
    command = ["tmux", "-L", SOCKET, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def record(command: str, folder: Path, until: str) -> str:
    """The screen of a terminal in which the command runs, with escape sequences, as soon as `until` matches a line.

    Raises TimeoutError after LIMIT.
    """
    program = command.replace("tinylm", f"{shlex.quote(sys.executable)} -m tinylm", 1)
    script = f"cd {shlex.quote(str(folder))}; PYTHONPATH={shlex.quote(str(ROOT))} {program}; echo END; sleep {LIMIT}"
    tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), script)
    try:
        start = time.monotonic()
        while not re.search(until, tmux("capture-pane", "-p"), re.MULTILINE):
            if time.monotonic() - start > LIMIT:
                raise TimeoutError(f"{command} did not print {until}")
            time.sleep(0.2)
        return tmux("capture-pane", "-p", "-e")
    finally:
        tmux("kill-session")


def draw(name: str, command: str, screen: str) -> None:
    """Write a picture of the screen below the command."""
    lines = [line for line in screen.rstrip().split("\n") if line != "END"]
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {command}", "bold"))
    console.print(Text.from_ansi("\n".join(lines)))
    svg = console.export_svg(title="", code_format=SVG, unique_id=name)
    (FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
