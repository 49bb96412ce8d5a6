"""Pictures of a report, taken with headless Chromium, for docs/report.md.

    tinylm train data/corpus.txt --size nano --steps 500 --log-gradients --log-every 10 --eval-every 40
    tinylm train data/corpus.txt --size nano --steps 250 --optimizer adamw --out checkpoints/adamw
    python docs/pictures.py checkpoints/corpus checkpoints/adamw

writes docs/pictures/: the sections of the report on the first run, and the curves of all of them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parent / "pictures"
SECTIONS = ("passage", "attention")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories")
    runs = parser.parse_args(arguments).runs
    program = os.environ.get("TINYLM_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        one, several = Path(folder) / "one.html", Path(folder) / "several.html"
        write_report(runs[:1], one)
        write_report(runs, several)
        for section in SECTIONS:
            take(browser, one, section, 900, "light")
        take(browser, several, "curves", 1200, "light")
        take(browser, one, "layers", 900, "dark")
        browser.close()


def write_report(runs: Sequence[Path], out: Path) -> None:
    command = [sys.executable, "-m", "tinylm", "report", *map(str, runs), "--out", str(out), "--quiet"]
    subprocess.run(command, check=True, timeout=1200)


def take(browser: Browser, page: Path, section: str, width: int, scheme: str) -> None:
    """Write a picture of one section."""
    opened = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    opened.goto(page.as_uri())
    opened.wait_for_timeout(1000)
    opened.locator(f"#{section}").screenshot(path=FOLDER / f"report-{section}.png")
    opened.close()


if __name__ == "__main__":
    main()
