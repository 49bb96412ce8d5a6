"""Pictures of reports, taken with headless Chromium, for docs/report.md.

    python docs/pictures.py [NAME ...]

trains the runs of SUBJECTS that are not there yet, in about ten minutes on two cores, writes a report on each subject,
and takes docs/pictures/report-*.png. NAME: a subject; by default, all of them. The runs stay in checkpoints/pictures,
and the demo in checkpoints/demo, where `make demo` writes it. Needs playwright, Pillow, and Chromium.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, FloatRect, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
DEMO = Path("checkpoints/demo")
RUNS = Path("checkpoints/pictures")
TEXT = RUNS / "docs.txt"  # to fine-tune on: this documentation
PROGRAM = (sys.executable, "-m", "tinylm")
LIMIT = 1200  # seconds for one command
COLOURS = 128  # of a picture, for small files
INTERVALS = "--log-every 10 --eval-every 50"
NANO = f"train data/corpus.txt --size nano --sequence-growth 1 --mtp-weight 0 --steps 500 {INTERVALS}"
ORIGINAL = (
    "train data/corpus.txt --preset original --size micro --context 64 --layers 6 --batch-size 16 --optimizer adam "
    f"--lr 0.001 --schedule linear --steps 300 {INTERVALS}"
)


@dataclass(frozen=True)
class Shot:
    """A picture of the sections of a page from `first` to `last`, whose file is named report-NAME.png.

    width: of the window. scheme: light or dark. token: index of a token of the passage to click.
    """

    name: str
    first: str
    last: str
    width: int = 1200
    scheme: Literal["light", "dark"] = "light"
    token: int | None = None


@dataclass(frozen=True)
class Subject:
    """Runs by name with the commands that train them, and the pictures of the report on them."""

    runs: dict[str, str]
    shots: tuple[Shot, ...]


SUBJECTS = {
    "demo": Subject(
        {},
        (
            Shot("demo", "overview", "curves"),
            Shot("demo-samples", "samples", "samples", 900),
            Shot("demo-passage", "passage", "passage", 900, token=101),
            Shot("demo-attention", "attention", "attention", 900),
            Shot("demo-evaluation", "evaluation", "evaluation", 900),
            Shot("demo-memorisation", "memorisation", "memorisation", 900),
            Shot("demo-phone", "overview", "plan", 400, "dark"),
        ),
    ),
    "optimizers": Subject(
        {
            "muon": f"{NANO} --context 64 --batch-size 16 --optimizer muon",
            "normuon": f"{NANO} --context 64 --batch-size 16 --optimizer normuon",
            "adamw": f"{NANO} --context 64 --batch-size 16 --optimizer adamw --lr 0.003",
            "adam": f"{NANO} --context 64 --batch-size 16 --optimizer adam --lr 0.003 --weight-decay 0",
        },
        (Shot("optimizers", "overview", "curves"),),
    ),
    "placement": Subject(
        {
            "post-norm-no-warmup": f"{ORIGINAL} --norm-placement post --warmup-steps 0",
            "post-norm": f"{ORIGINAL} --norm-placement post",
            "pre-norm": f"{ORIGINAL} --norm-placement pre",
            "pre-norm-no-warmup": f"{ORIGINAL} --norm-placement pre --warmup-steps 0",
        },
        (Shot("placement", "overview", "curves"),),
    ),
    "presets": Subject(
        {name: f"{NANO} --context 64 --batch-size 16 --preset {name}" for name in ("modern", "gpt2", "original")},
        (Shot("presets", "overview", "curves"),),
    ),
    "tokenizers": Subject(
        {
            "characters": f"{NANO} --context 64 --batch-size 16 --tokenizer char",
            "bpe-512": f"{NANO} --context 64 --batch-size 16 --tokenizer bpe --vocab-size 512",
            "bpe-2048": f"{NANO} --context 64 --batch-size 16 --tokenizer bpe --vocab-size 2048",
        },
        (Shot("tokenizers", "evaluation", "evaluation", 900),),
    ),
    "contexts": Subject(  # with equal numbers of tokens per step
        {f"context-{n}": f"{NANO} --context {n} --batch-size {1024 // n}" for n in (16, 64, 256)},
        (Shot("contexts", "overview", "curves"),),
    ),
    "ranks": Subject(
        {
            f"rank-{n}": f"finetune-lora {TEXT} --model {DEMO} --rank {n} --steps 200 {INTERVALS}"
            for n in (1, 4, 16, 64)
        },
        (Shot("ranks", "overview", "curves"),),
    ),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(SUBJECTS)}")
    names = parser.parse_args(arguments).names or list(SUBJECTS)
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"unknown subject {unknown[0]!r}; the subjects are: {', '.join(SUBJECTS)}")
    os.chdir(ROOT)
    program = os.environ.get("TINYLM_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name in names:
            page = Path(folder) / f"{name}.html"
            run("report", *map(str, trained(name)), "--out", str(page), "--quiet")
            for shot in SUBJECTS[name].shots:
                take(browser, page, shot)
        browser.close()


def trained(name: str) -> list[Path]:
    """The runs of a subject, trained if they are missing; the demo if the subject has none."""
    if not DEMO.exists() and name in ("demo", "ranks"):
        run("train", "data/corpus.txt", "--out", str(DEMO), "--time", "90s", "--quiet")
    if not TEXT.exists():
        TEXT.parent.mkdir(parents=True, exist_ok=True)
        pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
        text = "".join(page.read_text(encoding="utf-8") for page in pages)
        TEXT.write_text(re.sub(r"[^A-Za-z0-9 ,.;:()\n-]", "", text), encoding="utf-8")
    paths = []
    for run_name, command in SUBJECTS[name].runs.items():
        paths.append(RUNS / name / run_name)
        if not paths[-1].exists():
            run(*command.split(), "--out", str(paths[-1]), "--quiet")
    return paths or [DEMO]


def run(*arguments: str) -> None:
    """Run tinylm."""
    print("tinylm", *arguments, flush=True)
    subprocess.run([*PROGRAM, *arguments], check=True, timeout=LIMIT, stdout=subprocess.DEVNULL)


def take(browser: Browser, page: Path, shot: Shot) -> None:
    """Write a picture of a page."""
    from PIL import Image  # not needed to read the subjects

    opened = browser.new_page(viewport={"width": shot.width, "height": 900}, color_scheme=shot.scheme)
    opened.goto(page.as_uri())
    opened.wait_for_timeout(1000)
    if shot.token is not None:
        opened.locator(".token").nth(shot.token).click()
        opened.mouse.move(0, 0)
        opened.evaluate("scrollTo(0, 0)")
    path = FOLDER / f"report-{shot.name}.png"
    first, last = (opened.locator(f"#{section}").bounding_box() for section in (shot.first, shot.last))
    assert first is not None and last is not None
    height = last["y"] + last["height"] - first["y"] + 8
    clip: FloatRect = {"x": 0, "y": first["y"], "width": shot.width, "height": height}
    with Image.open(io.BytesIO(opened.screenshot(full_page=True, clip=clip))) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    opened.close()
    print(path.relative_to(ROOT), path.stat().st_size, "bytes", flush=True)


if __name__ == "__main__":
    main()
