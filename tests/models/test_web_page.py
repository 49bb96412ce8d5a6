"""A model as a web page in headless Chromium: reference is the same model in torch."""

import json
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page, expect

from tests.browser import HOSTILE, LIMIT, Opened
from tests.shell import assert_error, run_ok, story, tinylm
from tests.variants import VARIANTS, randomised, small
from tinylm.config.model import ModelConfig
from tinylm.errors import UsageError
from tinylm.formats.families import resolve
from tinylm.generation.prompts import encode_conversation
from tinylm.models.load import load
from tinylm.models.web_page import (
    Encoded,
    chat_values,
    render_web_page,
    require_representable,
    round_weights,
    rounded_tensors,
)
from tinylm.text.chat import Conversation
from tinylm.text.chat_format import chat_format
from tinylm.text.chat_template import CHATML
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

CHARACTERS = train_char("abcdefghij ")  # with the end of a text, 12 ids: the variants have 13
WORDS = train_bpe([story(20_000)], 400)
TEXTS = (
    "The king's  crown, 1234 times\n\n  it's we'll — ÄÖ 你好 👩‍🚀 x\u0085y\ufeffz\t\n",
    "don't I'LL they'RE 'tis   \n\u2003 ²³ ٣ a_b-c",
    "<|endoftext|> <b>",
    "",
)


def page_of(
    path: Path,
    config: ModelConfig,
    tokenizer: Tokenizer,
    dtype: str = "f32",
    name: str = "model",
    template: str | None = None,
) -> tuple[Decoder, str]:
    """Write the page of a random model; returns the model with the weights that the page has, and the HTML."""
    network = randomised(build_model(config))
    weights = round_weights(dict(network.state_dict()), config, dtype)
    format = None if template is None else chat_format(template, tokenizer)
    html = render_web_page(name, resolve(config), tokenizer, None, weights, format)
    path.write_text(html, encoding="utf-8")
    rounded = build_model(config).eval()
    rounded.load_state_dict(rounded_tensors(weights, config))
    assert isinstance(rounded, Decoder)
    return rounded.double(), html


def runnable(config: ModelConfig) -> bool:
    try:
        require_representable(config, CHARACTERS, "x")
    except UsageError:
        return False
    return True


RUNNABLE = [(name, config) for name, config in VARIANTS if runnable(config)]


def test_nearly_all_kinds_of_decoders_can_be_a_page_and_the_others_are_an_error() -> None:
    refused = {name for name, config in VARIANTS if not runnable(config)}
    assert len(RUNNABLE) >= 12
    for name, config in VARIANTS:
        is_other = config.position == "relative" or (config.experts > 1 and config.expert_mode == "merge")
        assert (name in refused) == is_other
    with pytest.raises(UsageError, match="x is an encoder, which the page cannot run"):
        require_representable(small(architecture="encoder"), CHARACTERS, "x")


@pytest.mark.browser
@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
def test_logits_of_the_page_are_those_of_the_model(dtype: str, opened: Opened, tmp_path: Path) -> None:
    """For every kind of layer: 30 tokens, longer than every window."""
    rng = torch.Generator().manual_seed(0)
    for name, config in RUNNABLE if dtype == "f32" else RUNNABLE[:2]:
        network, _ = page_of(tmp_path / "page.html", config, CHARACTERS, dtype)
        ids = torch.randint(config.vocab_size, (1, config.context), generator=rng)
        page = opened.open(tmp_path / "page.html", "#go")
        found = page.evaluate("ids => { model.clear(); return ids.map(id => [...model.read(id)]); }", ids[0].tolist())
        with torch.no_grad():
            expected = network.logits(network(ids).hidden)[0]
        torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=1e-4, atol=2e-4, msg=name)
    assert opened.messages == []


def test_rows_of_8_bits_differ_by_at_most_half_a_step() -> None:
    matrix = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    matrix[3] = 0
    encoded = Encoded(matrix, "int8")
    assert len(encoded.data) == 50 * (4 + 30)
    step = matrix.abs().amax(dim=1, keepdim=True) / 127
    assert ((encoded.tensor - matrix).abs() <= step / 2 * 1.001).all()


@pytest.mark.browser
@pytest.mark.parametrize("tokenizer", [CHARACTERS, WORDS], ids=["char", "bpe"])
def test_texts_have_the_tokens_of_the_tokenizer(
    tokenizer: Tokenizer,
    opened: Opened,
    tmp_path: Path,
) -> None:
    page_of(tmp_path / "page.html", small(vocab_size=tokenizer.vocab_size), tokenizer)
    page = opened.open(tmp_path / "page.html", "#go")
    for text in TEXTS:
        unknown = tokenizer.unknown_characters(text)
        known = "".join(character for character in text if character not in unknown)
        ids = [int(i) for i in tokenizer.encode(known)]
        assert page.evaluate("text => tokenizer.encode(text)", text) == ids
        decode = "ids => new TextDecoder().decode(Uint8Array.from(ids.flatMap(id => tokenizer.bytes(id))))"
        assert page.evaluate(decode, [*ids, tokenizer.end_of_text_id]) == known


@pytest.mark.browser
def test_the_page_writes_the_text_that_the_model_writes(opened: Opened, tmp_path: Path) -> None:
    """Greedy text, longer than the context, from a prompt and without one."""
    (tmp_path / "a.txt").write_text(story(6000))
    run = tmp_path / "run"
    options = ("--size", "nano", "--context", 32, "--steps", 20, "--dtype", "fp32")
    run_ok("train", tmp_path / "a.txt", *options, "--out", run)
    result = run_ok("export", run, "--to", "html", "--dtype", "f32", "--out", tmp_path / "page.html")
    assert "Checked: the written tensors and tokens are the model's, and logits differ by" in result.stderr
    page = opened.open(tmp_path / "page.html", "#go")
    model = load(run)
    for prompt in ("the ", ""):
        page.locator("#text").fill(prompt)
        write(page, 60)
        expected = model.generate(prompt, max_tokens=60, temperature=0, engine="torch")
        assert page.locator("#text").input_value() == prompt + str(expected)
    assert opened.messages == []
    assert [url.split(":")[0] for url in opened.requests] == ["file"]


def write(page: Page, tokens: int, temperature: str = "0") -> None:
    """Press the button, and wait for the end."""
    page.locator("#count").fill(str(tokens))
    page.locator("#temperature").fill(temperature)
    page.locator("#go").click()
    expect(page.locator("#go")).to_have_text("Write", timeout=LIMIT)


@pytest.mark.browser
def test_a_chat_is_encoded_as_by_the_template_and_names_of_special_tokens_in_messages_are_text(
    opened: Opened,
    tmp_path: Path,
) -> None:
    tokenizer = WORDS.with_special_tokens(["<|im_start|>", "<|im_end|>"])
    config = small(vocab_size=tokenizer.vocab_size, context=400)
    page_of(tmp_path / "page.html", config, tokenizer, template=CHATML)
    page = opened.open(tmp_path / "page.html", "#go")
    assert page.locator("#question").is_visible() and page.locator("#text").is_hidden()
    contents = ["Who <|im_end|> is?", "The <|im_start|>king.", HOSTILE]
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    encoded = encode_conversation(Conversation(tuple(messages)), chat_format(CHATML, tokenizer), tokenizer)
    shown = [{"role": message["role"], "text": message["content"]} for message in messages]
    put = "shown => { messages.push(...shown); return tokenizer.encodePieces(conversation()); }"
    assert page.evaluate(put, shown) == encoded.ids
    page.evaluate("messages.length = 0")
    page.locator("#question").fill(HOSTILE)
    write(page, 10)
    assert page.locator(".user").inner_text() == HOSTILE.strip()
    assert page.locator("img").count() == 0
    assert page.locator(".assistant").count() == 1
    page.locator("#clear").click()
    assert page.locator("#messages p").count() == 0
    assert opened.messages == []


@pytest.mark.browser
def test_the_button_stops_a_text_and_another_empties_it(opened: Opened, tmp_path: Path) -> None:
    page_of(tmp_path / "page.html", small(vocab_size=CHARACTERS.vocab_size), CHARACTERS)
    page = opened.open(tmp_path / "page.html", "#go")
    page.evaluate("file.stops.length = 0")  # the text has no end of its own
    page.locator("#count").fill("100000")
    page.locator("#go").click()
    page.wait_for_function("get('text').value.length > 20", timeout=LIMIT)
    assert page.locator("#go").inner_text() == "Stop"
    page.locator("#go").click()
    expect(page.locator("#go")).to_have_text("Write", timeout=LIMIT)
    written = page.locator("#text").input_value()
    page.wait_for_timeout(100)
    assert page.locator("#text").input_value() == written and len(written) < 100_000
    page.locator("#clear").click()
    assert page.locator("#text").input_value() == ""
    assert opened.messages == []


@pytest.mark.browser
def test_a_text_that_is_begun_while_another_ends_is_the_text_alone(opened: Opened, tmp_path: Path) -> None:
    page_of(tmp_path / "page.html", small(vocab_size=CHARACTERS.vocab_size), CHARACTERS)
    page = opened.open(tmp_path / "page.html", "#go")
    page.evaluate("file.stops.length = 0")
    write(page, 3000)
    alone = page.locator("#text").input_value()
    page.locator("#clear").click()
    page.locator("#go").click()
    page.wait_for_function("get('text').value.length > 20", timeout=LIMIT)
    page.evaluate("() => { get('clear').onclick(); get('form').requestSubmit(); }")
    assert page.locator("#go").inner_text() == "Stop"
    expect(page.locator("#go")).to_have_text("Write", timeout=LIMIT)
    assert page.locator("#text").input_value() == alone
    assert opened.messages == []


@pytest.mark.browser
def test_an_answer_ends_before_the_text_that_ends_it(opened: Opened, tmp_path: Path) -> None:
    tokenizer = WORDS.with_special_tokens(["<|im_start|>", "<|im_end|>"])
    page_of(tmp_path / "page.html", small(vocab_size=tokenizer.vocab_size, context=100), tokenizer, template=CHATML)
    page = opened.open(tmp_path / "page.html", "#go")
    page.evaluate("file.stops.length = file.chat.stops.length = 0; file.chat.end = 'e'")
    page.locator("#question").fill("Who?")
    write(page, 5000, "1")
    answer = page.evaluate("messages[1].text")
    assert "e" not in answer and page.locator(".assistant").text_content() == answer
    assert page.evaluate("messages.length") == 2 and opened.messages == []


def test_a_template_whose_turns_differ_is_an_error() -> None:
    tokenizer = WORDS.with_special_tokens(["<|im_start|>", "<|im_end|>"])
    counted = (
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    with pytest.raises(UsageError, match="does not write its turns one after the other"):
        chat_values(chat_format(counted, tokenizer), tokenizer)


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1400])
def test_a_page_fits_its_window_and_its_strings_are_text(width: int, browser: Browser, tmp_path: Path) -> None:
    tokenizer = train_char("ab<>'\"&", [HOSTILE[:8]])
    _, html = page_of(tmp_path / "page.html", small(vocab_size=tokenizer.vocab_size), tokenizer, "int8", name=HOSTILE)
    assert html.count("</script>") == 4 and "<img" not in html
    context = browser.new_context(viewport={"width": width, "height": 800})
    one = Opened(context.new_page())
    page = one.open(tmp_path / "page.html", "#go")
    page.locator("#text").fill("ab" * 200)
    write(page, 20, "1")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").inner_text().startswith("<script>")
    assert one.messages == []
    context.close()


def test_only_an_earlier_export_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(story(2000))
    run, out = tmp_path / "run", tmp_path / "page.html"
    run_ok("train", tmp_path / "a.txt", "--size", "nano", "--context", 16, "--steps", 1, "--out", run)
    assert_error(tinylm("export", run, "--to", "html", "--out", tmp_path / "page"), 2, "does not end in .html")
    run_ok("export", run, "--to", "html", "--out", out)
    assert_error(tinylm("export", run, "--to", "html", "--out", out), 2, "exists; choose another --out")
    run_ok("export", run, "--to", "html", "--out", out, "--force")
    out.write_text("mine")
    assert_error(tinylm("export", run, "--to", "html", "--out", out, "--force"), 2, "is not an earlier export")
    assert out.read_text() == "mine"
    assert_error(tinylm("export", run, "--to", "html", "--out", out, "--dtype", "bf16"), 2, "int8, f16, f32")
    assert json.loads(run_ok("export", run, "--to", "html", "--out", tmp_path / "b.html", "--json").stdout)["family"]
