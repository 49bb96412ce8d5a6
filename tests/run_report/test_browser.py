"""The report in headless Chromium, opened from a file: plots, slider, pointer, keyboard, widths, themes, strings."""

import base64
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page

from tests.browser import HOSTILE, Opened
from tinylm.run_report.page import write_page

pytestmark = pytest.mark.browser
TOKENS = ["The", " ", "sea", "\n", "<b>", HOSTILE[:40]]


def made_up_run(name: str, seed: int = 0) -> dict[str, Any]:
    """A run with every section; its strings are hostile."""
    steps = list(range(0, 500, 10))
    loss = [4.0 / (1 + 0.1 * step) + seed for step in steps]
    uniform = [255 // (row + 1) if column <= row else 0 for row in range(6) for column in range(6)]
    layer = {"heads": 2, "weights": base64.b64encode(bytes([*uniform, *uniform[::-1]])).decode()}
    axes = {"step": steps, "seconds": [step / 2 for step in steps], "tokens": [step * 64.0 for step in steps]}
    likeliest = [[HOSTILE, 0.5], ["b", 0.25]]
    matches = [(61, "a <b>\nmatch"), (55, HOSTILE), (50, "x" + 49 * " ")]
    losses = [{"text": text, "loss": 1.0 + i, "likeliest": likeliest} for i, text in enumerate(TOKENS[1:])]
    identity = {"name": name, "path": name, "kind": "decoder", "parameters": 1234567, "created": HOSTILE}
    identity["loss_unit"] = "nats per token"
    return {
        **identity,
        "step": 490,
        "best_step": 490,
        "val_loss": 1.5,
        "seconds": 245.0,
        "parts": {"embedding": 1000, "attention": 2000, "total": 3000},
        "settings": {"model.width": "16", f"data.{HOSTILE}": HOSTILE, "training.seed": str(seed)},
        "problems": [HOSTILE],
        "plan": [["steps", "500", "490"]],
        "curves": {
            "train": {**axes, "loss": loss, "lr": loss, "grad_norm": loss, "tokens_per_second": loss},
            "val": {**axes, "val_loss": loss},
            "experts": [[0.25, 0.75], [0.5, None]],
        },
        "samples": [{"step": step, "val_loss": 1.0, "text": f"sample at {step} {HOSTILE}"} for step in (10, 20, 30)],
        "passage": {"kind": "next", "source": "", "tokens": [{"text": TOKENS[0]}, *losses]},
        "attention": [{"kind": "self-attention", "rows": TOKENS, "columns": TOKENS, "layers": [layer, layer]}],
        "updates": [{"layer": HOSTILE, "norm": 1.5, "relative": 0.1}, {"layer": "b", "norm": 3.0, "relative": None}],
        "evaluation": {
            "metrics": {"loss": 1.5, "tokens": 50000, "bits_per_byte": 2.0, "loss_low": 1.25, "loss_high": 1.75},
            "baselines": {"gzip": 3.0 + 0.001 * seed, HOSTILE: 4.0 + seed},
            "compared": "bits_per_byte",
        },
        "memorisation": {
            "min_match": 50,
            "sample_length": 500,
            "prefix_length": 100,
            "sources": [
                {"source": "samples", **copied(0.25, (0.125, 0.5), 61, matches)},
                {"source": "held-out text", **copied(0.0, (None, None), 0, [])},
            ],
        },
    }


def copied(share: float, interval: tuple[float | None, ...], longest: int, matches: list[tuple[int, str]]) -> Any:
    """The copied share of one kind of text, as in a report."""
    return {
        "samples": 20,
        "characters": 10000,
        "copied": share,
        "low": interval[0],
        "high": interval[1],
        "longest": longest,
        "matches": [{"characters": characters, "text": text} for characters, text in matches],
    }


def content(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"version": "1", "created": "2026-01-01T00:00:00+00:00", "models": True, "runs": list(runs), **more}


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_page(content(made_up_run("one"), made_up_run(HOSTILE, seed=1)), path)
    return path


def drawn_pixels(canvas: Locator) -> int:
    """The number of pixels of a canvas that are not transparent."""
    return canvas.evaluate(
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 === 3 && v).length"
    )


def test_the_page_opens_from_a_file_without_a_request_a_message_or_an_element_of_the_data(
    opened: Opened, two_runs: Path
) -> None:
    page = opened.open(two_runs)
    assert opened.requests == [two_runs.as_uri()]
    assert opened.messages == []
    assert page.locator("img, iframe, object, link").count() == 0
    assert page.locator("script").count() == 3
    titles = page.locator("h2").all_text_contents()
    assert titles[:3] == ["Overview", "Curves", "Plan and result"]
    model = {"Loss per token", "Attention", "Tokens per expert", "Updates of the adapter", "Evaluation", "Memorisation"}
    assert set(titles[3:]) == {"Samples by step", *model, "Parameters by part", "Settings"}
    assert page.locator("#overview tbody th").all_text_contents() == [" one", f" {HOSTILE}"]
    page.wait_for_selector("#curves canvas")
    assert all(drawn_pixels(canvas) > 500 for canvas in page.locator("#curves canvas").all())


def test_samples_and_the_likeliest_tokens_are_shown_by_pointer_and_keyboard(opened: Opened, two_runs: Path) -> None:
    page = opened.open(two_runs)
    text, slider = page.locator("#samples .text"), page.locator("#samples input[type=range]")
    assert text.text_content() == f"sample at 30 {HOSTILE}"
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert text.text_content() == f"sample at 20 {HOSTILE}"
    slider.fill("0")
    assert text.text_content() == f"sample at 10 {HOSTILE}"
    page.get_by_label("Later sample").click()
    assert page.locator("#samples output").text_content() == "step 20, validation loss 1.000 (2 of 3)"
    readout = page.locator("#passage .readout")
    page.locator("#passage .token").nth(2).hover()
    assert "sea has loss 2.000 (probability 0.1353)" in readout.text_content()
    assert HOSTILE.replace(" ", "␣") in readout.text_content()
    page.locator("#passage .text").focus()
    page.keyboard.press("ArrowRight")
    assert readout.text_content().startswith("⏎ has loss 3.000")
    page.keyboard.press("Home")
    assert readout.text_content() == "The is not predicted"


def test_maps_of_attention_and_plots_are_read_by_keyboard_and_have_tables(opened: Opened, two_runs: Path) -> None:
    page = opened.open(two_runs)
    section = page.locator("#attention")
    assert section.locator(".heads canvas").count() == 2
    section.locator("canvas.map").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert section.locator("p[aria-live]").text_content() == "sea (2) attends to ␣ (1): 0.333"
    section.get_by_role("button", name="head 1").click()
    section.locator("summary").click()
    section.locator("tbody td").first.wait_for()
    assert section.locator("tbody tr").first.locator("td").all_text_contents()[-1] == "0.16"
    box = section.locator("canvas.map").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] - 5)
    assert section.locator("p[aria-live]").text_content().endswith("(5): 1.000")

    plot = page.locator("#curves .plot").first
    plot.locator("canvas").wait_for()
    plot.locator(".drawing").focus()
    for key in ("Home", "ArrowRight"):
        page.keyboard.press(key)
    legend = plot.locator(".legend li").all_text_contents()
    assert legend[:2] == ["step 10:", "one (training)2"]
    page.locator("input[value=seconds]").check()
    plot = page.locator("#curves .plot").first
    plot.locator("summary").click()
    plot.locator("tbody td").first.wait_for()
    assert plot.locator("thead th").all_text_contents()[:2] == ["time", "one (training)"]
    assert plot.locator("tbody tr").nth(2).locator("th, td").all_text_contents()[:2] == ["10s", "1.333"]
    page.locator("#curves").get_by_label("one", exact=True).uncheck()
    assert len(page.locator("#curves .plot").first.locator(".legend li").all()) == 3


def cells(page: Page, section: str, table: int = 0) -> list[list[str]]:
    """The texts of the rows of a table."""
    rows = page.locator(f"#{section} table").nth(table).locator("tbody tr").all()
    return [row.locator("th, td").all_text_contents() for row in rows]


def test_tables_of_evaluation_memorisation_and_settings(opened: Opened, two_runs: Path) -> None:
    """Scores have their intervals, equal baselines stand once, copies have their places, differences come first."""
    page = opened.open(two_runs)
    assert cells(page, "evaluation") == [
        ["nats per token", "1.5000", "1.5000"],
        ["95 % interval", "1.2500 to 1.7500", "1.2500 to 1.7500"],
        ["tokens scored", "50,000", "50,000"],
        ["bits per byte", "2", "2"],
    ]
    assert cells(page, "evaluation", 1) == [
        ["one", "2", ""],
        [HOSTILE, "2", ""],
        ["gzip", "3", ""],
        [f"{HOSTILE} (one)", "4", ""],
        [f"{HOSTILE} ({HOSTILE})", "5", ""],
    ]

    assert cells(page, "memorisation") == [
        ["samples, one", "25.0 %", "12.5 to 50.0 %", "", "61", "20"],
        [f"samples, {HOSTILE}", "25.0 %", "12.5 to 50.0 %", "", "61", "20"],
        ["held-out text (control)", "0.0 %", "–", "", "0", "20"],
    ]
    track = page.locator("#memorisation .track").first
    bar, whisker, whole = (node.bounding_box() for node in (track.locator(".bar"), track.locator(".whisker"), track))
    assert bar["width"] == pytest.approx(whole["width"] / 2, abs=1)
    assert whisker["x"] - whole["x"] == pytest.approx(whole["width"] / 4, abs=1)
    assert whisker["width"] == pytest.approx(whole["width"] * 3 / 4, abs=1)
    page.get_by_text("Longest matches of one").click()
    page.locator("#memorisation .matches tbody td").first.wait_for()
    assert cells(page, "memorisation", 1) == [
        ["a <b>⏎match…", "61", "samples"],
        [HOSTILE + ("…" if len(HOSTILE) < 55 else ""), "55", "samples"],
        ["x ␣×49 ", "50", "samples"],
    ]

    assert page.locator("#settings tbody th").all_text_contents() == ["training.seed"]
    page.get_by_label("Only differences").uncheck()
    assert len(page.locator("#settings tbody th").all()) == 3
    assert opened.messages == []


def test_a_translation_is_compared_in_bleu_and_a_measurement_left_out_says_why(opened: Opened, tmp_path: Path) -> None:
    scores = {"metrics": {"loss": 1.0, "bleu": 30.0, "chrf": 50.0, "pairs": 200}, "compared": "bleu"}
    baselines = {"source itself": 3.0, "target of the nearest training source": 12.0}
    path = tmp_path / "pairs.html"
    parts = {"evaluation": scores | {"baselines": baselines}, "memorisation": {"left_out": "the model is large"}}
    write_page(content(made_up_run("one") | parts), path)
    page = opened.open(path)
    assert cells(page, "evaluation")[1:] == [["BLEU", "30"], ["chrF", "50"], ["pairs", "200"]]
    assert cells(page, "evaluation", 1) == [
        ["one", "30", ""],
        *([name, str(int(x)), ""] for name, x in baselines.items()),
    ]
    widths = [bar.bounding_box()["width"] for bar in page.locator("#evaluation .bar").all()]
    assert widths[1] / widths[0] == pytest.approx(0.1, abs=0.02)
    assert widths[2] / widths[0] == pytest.approx(0.4, abs=0.02)
    text = page.locator("#memorisation p").text_content()
    assert text == "Not measured, because the model is large: tinylm report --memorisation measures it."


def test_the_overview_shows_the_results_of_every_kind_of_run_within_a_phone(opened: Opened, tmp_path: Path) -> None:
    """Regression: at 420 pixels its table was cut before the bits per byte, and it had no accuracy of classifiers."""
    text, labels = made_up_run("text"), made_up_run("labels") | {"loss_unit": "nats per text"}
    text["val_bits_per_byte"] = 1.0089
    labels["curves"]["best"] = {"accuracy": 0.8867, "margin": None}
    write_page(content(text, labels), tmp_path / "both.html")
    for width in (420, 1280):
        opened.page.set_viewport_size({"width": width, "height": 900})
        page = opened.open(tmp_path / "both.html", "#settings")
        shown = page.locator("#overview td:visible")
        columns = [(cell.get_attribute("data-name"), cell.text_content()) for cell in shown.all()]
        assert columns[:4] == [
            ("bits per byte", "1.0089"),
            ("accuracy", "–"),
            ("validation loss", "1.5000"),
            ("at step", "490"),
        ]
        assert columns[8:10] == [("bits per byte", "–"), ("accuracy", "0.8867")] and len(columns) == 16
        assert all(box["x"] + box["width"] <= width for box in (cell.bounding_box() for cell in shown.all()))
        labelled = "e => getComputedStyle(e, '::before').content"
        assert shown.nth(1).evaluate(labelled) == ('"accuracy"' if width == 420 else "none")
        assert page.locator("#overview thead").is_visible() == (width == 1280)


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1400, "dark")])
def test_the_page_fits_its_width_and_its_text_has_contrast(
    opened: Opened, two_runs: Path, width: int, scheme: str
) -> None:
    opened.page.set_viewport_size({"width": width, "height": 900})
    opened.page.emulate_media(color_scheme=scheme)
    page = opened.open(two_runs)
    page.wait_for_selector("#curves canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = "e => !e.closest('.scroll') && e.getBoundingClientRect().right > innerWidth + 1"
    wide = f"[...document.querySelectorAll('main *')].filter({outside}).map(e => e.className)"
    assert page.evaluate(wide) == []
    colours = page.evaluate(
        "['body', '.faint', 'a', 'summary', 'td'].map(s => getComputedStyle(document.querySelector(s)).color)"
    )
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(ground) > 0.5) == (scheme == "light")
    assert all(contrast(colour, ground) >= 4.5 for colour in colours)
    for index in range(8):  # lines of plots: WCAG asks for 3
        page.evaluate(f"document.body.style.color = 'var(--run{index})'")
        assert contrast(page.evaluate("getComputedStyle(document.body).color"), ground) >= 3


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2."""
    parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_a_dark_page_prints_on_white_without_controls(opened: Opened, two_runs: Path) -> None:
    opened.page.emulate_media(color_scheme="dark")
    page = opened.open(two_runs)
    page.emulate_media(color_scheme="dark", media="print")
    page.wait_for_selector("html.print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--text')") == "#16191d"
    assert not page.locator("nav").is_visible()
    page.emulate_media(color_scheme="dark", media="screen")
    page.wait_for_selector("html:not(.print)")
    assert page.pdf(format="A4")[:5] == b"%PDF-"


def test_a_live_page_reloads_and_keeps_its_place_and_its_choices(opened: Opened, tmp_path: Path) -> None:
    path = tmp_path / "live.html"
    write_page(content(made_up_run("one"), refresh=600), path)
    opened.page.clock.install()  # so that the page does not reload before it is ready, however slow the machine is
    page = opened.open(path)
    page.locator("input[value=tokens]").check()
    page.locator("#samples input[type=range]").fill("1")
    page.evaluate("scrollTo(0, 700)")
    write_page(content({**made_up_run("one"), "step": 777}), path)  # without `refresh`: training has ended
    page.clock.fast_forward(600_000)
    page.get_by_text("777").first.wait_for()
    page.wait_for_function("scrollY > 0")
    assert page.evaluate("scrollY") == 700
    assert page.locator("input[value=tokens]").is_checked()
    assert page.locator("#samples output").text_content().endswith("(2 of 3)")
    assert page.locator(".live").count() == 0
    assert opened.messages == []


def test_runs_without_any_section_have_a_page(opened: Opened, tmp_path: Path) -> None:
    empty = {"samples": [], "plan": [], "problems": [], "curves": {}, "parts": {}, "settings": {"a": "b"}}
    path = tmp_path / "empty.html"
    missing = ("passage", "updates", "evaluation", "memorisation", "val_loss", "best_step", "seconds")
    write_page(content(made_up_run("bare") | empty | dict.fromkeys(missing) | {"attention": []}), path)
    assert opened.open(path).locator("h2").all_text_contents() == ["Overview", "Settings"]
    assert opened.messages == []
