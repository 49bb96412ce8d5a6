"""Loaded models in Python. Reference: the commands with the same settings, and a forward pass in float64."""

import dataclasses
import inspect
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main

import tinylm
from tests import reference_parts
from tests.shell import records, run_ok, snapshot, story
from tinylm.cli import app
from tinylm.errors import UsageError
from tinylm.evaluation.result import Evaluation
from tinylm.loaded_model import Model
from tinylm.run_directory.loading import load_model

PROMPT = "the old man"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def defaults(function: object) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY}


def option_defaults(command: str) -> dict[str, Any]:
    return {one.name: one.default for one in COMMANDS[command].params}


# Names and defaults


def test_load_has_the_options_of_sample_and_eval_with_their_defaults() -> None:
    own = defaults(tinylm.load)
    del own["adapters"], own["reporter"]
    assert own == {name: option_defaults("sample")[name] for name in ("device", "dtype", "quantize")}


def test_generate_has_the_options_of_sample_with_their_defaults() -> None:
    of_command = option_defaults("sample")
    loading = {"model", "adapter", "device", "dtype", "quantize"}
    printing = {"separator", "echo", "quiet", "json", "config", "debug"}
    reading = {"words", "prompt", "prompt_file", "format", "chat", "chat_template"}
    assert set(of_command) - loading - printing - reading == set(defaults(Model.generate))
    differing = {"stop": None, "stream": None}  # a list, and whether there is a terminal
    for name, value in defaults(Model.generate).items():
        assert (value == of_command[name]) != (name in differing), name


def test_evaluate_has_the_options_of_eval_with_their_defaults() -> None:
    of_command = option_defaults("eval")
    others = {"text", "model", "adapter", "device", "dtype", "quiet", "json", "config", "debug"}
    memorisation = {"memorisation", "train_data", "num_samples", "sample_length", "min_match", "temperature", "seed"}
    own = defaults(Model.evaluate)
    del own["text"], own["ranks"]
    assert own == {name: value for name, value in of_command.items() if name not in others | memorisation}


# Generation


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, ()),
        ({"temperature": 0, "max_tokens": 50}, ("-t", 0, "-n", 50)),
        ({"top_k": 5, "top_p": 0.9, "min_p": 0.01}, ("-k", 5, "--top-p", 0.9, "--min-p", 0.01)),
        ({"repeat_penalty": 1.3, "stop": "e"}, ("--repeat-penalty", 1.3, "--stop", "e")),
        ({"stop": ["a", "o"], "cache": False}, ("--stop", "a", "--stop", "o", "--no-cache")),
        ({"max_tokens": 600, "draft": "ngram"}, ("-n", 600, "--draft", "ngram")),
    ],
)
@pytest.mark.usefixtures("shelf_cache")
def test_generate_gives_the_text_of_the_command_as_a_whole_and_as_a_stream(
    settings: dict[str, Any],
    flags: tuple[object, ...],
    run: Path,
) -> None:
    expected = run_ok("sample", "-m", run, "-p", PROMPT, "--seed", 3, "--no-echo", *flags).stdout
    model = tinylm.load(run)
    text = model.generate(PROMPT, seed=3, **settings)
    assert f"{text}\n" == expected
    chunks = list(model.generate(PROMPT, seed=3, stream=True, **settings))
    assert "".join(chunks) == text
    assert len(chunks) > 1 or len(text) < 2


def test_several_samples_are_a_list_whose_first_equals_a_single_sample(run: Path) -> None:
    model = tinylm.load(run)
    texts = model.generate(PROMPT, seed=3, num_samples=3, max_tokens=30)
    found = records(run_ok("sample", "-m", run, "-p", PROMPT, "--seed", 3, "--num-samples", 3, "-n", 30, "--json"))
    assert texts == [record["text"] for record in found]
    assert texts[0] == model.generate(PROMPT, seed=3, max_tokens=30)


@pytest.mark.parametrize("settings", [{"quantize": "int8"}, {"dtype": "bf16"}])
def test_number_formats_generate_the_text_of_the_command(settings: dict[str, str], run: Path) -> None:
    flags = [word for name, value in settings.items() for word in (f"--{name}", value)]
    expected = run_ok("sample", "-m", run, "--seed", 3, "-n", 60, *flags).stdout
    assert f"{tinylm.load(run, **settings).generate(seed=3, max_tokens=60)}\n" == expected


def test_adapters_generate_the_text_of_the_command_and_can_be_switched(run: Path, adapter: Path) -> None:
    expected = run_ok("sample", "--adapter", f"{adapter}=0.5", "--seed", 3, "-n", 60).stdout
    model = tinylm.load(run, adapters=[f"{adapter}=0.5"])
    assert f"{model.generate(seed=3, max_tokens=60)}\n" == expected
    model.select_adapter(None)
    assert model.generate(seed=3, max_tokens=60) == tinylm.load(run).generate(seed=3, max_tokens=60)
    model.select_adapter(0)
    assert f"{model.generate(seed=3, max_tokens=60)}\n" == expected


def test_without_a_seed_texts_differ(run: Path) -> None:
    model = tinylm.load(run)
    assert model.generate(max_tokens=40) != model.generate(max_tokens=40)


def test_an_encoder_fills_masks_as_the_command_does(encoder: Path) -> None:
    prompt = "the <mask>ld ma<mask> s"
    model = tinylm.load(encoder)
    text = model.generate(prompt)
    assert f"{text}\n" == run_ok("sample", "-m", encoder, "-p", prompt).stdout
    assert list(model.generate(prompt, stream=True)) == [text]


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, ()),
        ({"beams": 2, "length_penalty": 0.5, "stop": "a"}, ("--beams", 2, "--length-penalty", 0.5, "--stop", "a")),
        ({"temperature": 2.0, "top_k": 3, "seed": 4}, ("-t", 2.0, "-k", 3, "--seed", 4)),
    ],
)
def test_an_encoder_decoder_translates_each_line_as_the_command_does(
    settings: dict[str, Any],
    flags: tuple[object, ...],
    translator: Path,
) -> None:
    sources = "abc\n\nbca"
    expected = run_ok("sample", "-m", translator, "-p", "-", *flags, stdin=sources).stdout
    model = tinylm.load(translator)
    assert model.generate(sources, **settings) + "\n" == expected
    assert "".join(model.generate(sources, stream=True, **settings)) + "\n" == expected
    if "temperature" in settings:
        columns = model.generate(sources, num_samples=2, **settings)
        lines = run_ok("sample", "-m", translator, "-p", "-", *flags, "--num-samples", 2, stdin=sources).stdout
        assert [column.split("\n") for column in columns] == [lines.splitlines()[0::2], lines.splitlines()[1::2]]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("run", {"beams": 3}, "this model continues a prompt: leave out `beams`"),
        ("run", {"stream": True, "num_samples": 2}, "`stream` is for a single sample"),
        ("run", {"max_tokens": 0}, "`max_tokens` is 0"),
        ("run", {"stop": ["a", ""]}, "`stop` is empty"),
        ("run", {"draft": "best"}, "`draft` is 'best'"),
        ("run", {"prompt": "é"}, 'or leave such characters out with `unknown="skip"`'),
        ("run", {"prompt": "a" * 17, "strict": True}, "leave out `strict`"),
        ("encoder", {"prompt": "a<mask>", "max_tokens": 3, "cache": False}, "leave out `max_tokens`, `cache`"),
        ("translator", {"prompt": "abc", "top_k": 3}, "leave out `top_k`"),
    ],
)
def test_the_error_names_settings_that_cannot_be_used(
    kind: str, settings: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    model = tinylm.load(request.getfixturevalue(kind))
    with pytest.raises(UsageError) as caught:
        model.generate(**settings)
    assert message in str(caught.value)
    assert "--" not in str(caught.value)


# Evaluation


def evaluated(*arguments: object) -> dict[str, Any]:
    """The metrics that the command prints, without the names of the model and the text."""
    (record,) = records(run_ok("eval", *arguments, "--json"))
    return {name: value for name, value in record.items() if name not in ("model", "text")}


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({}, ()),
        ({"stride": 3, "batch_size": 2}, ("--stride", 3, "--batch-size", 2)),
        ({"baselines": True}, ("--baselines",)),
        ({"sequence_length": 4}, ("--sequence-length", 4)),
    ],
)
@pytest.mark.usefixtures("shelf_cache")
def test_evaluate_gives_the_metrics_of_the_command(
    settings: dict[str, Any],
    flags: tuple[object, ...],
    run: Path,
    here: Path,
) -> None:
    text = story(400, seed=2)
    (here / "text.txt").write_text(text)
    model = tinylm.load(run)
    result = model.evaluate("text.txt", **settings)
    assert isinstance(result, Evaluation)
    assert result.to_json() == evaluated("-m", run, "text.txt", *flags)
    assert model.evaluate([Path("text.txt")], **settings) == result
    assert model.evaluate(text=text, **settings) == result
    assert model.evaluate().to_json() == evaluated("-m", run)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.usefixtures("shelf_cache")
def test_generating_changes_no_metric_and_no_logit(dtype: str, run: Path) -> None:
    model = tinylm.load(run, dtype=dtype, quantize="int8")
    ids = [model.encode(PROMPT)]
    before = model.evaluate(), model.logits(ids)
    model.generate(PROMPT, max_tokens=5)
    after = model.evaluate(), model.logits(ids)
    assert before[0] == after[0]
    assert torch.equal(before[1], after[1])


@pytest.mark.usefixtures("shelf_cache")
def test_an_encoder_is_evaluated_as_by_the_command(encoder: Path, shelf: Path) -> None:
    result = tinylm.load(encoder).evaluate(shelf / "two.txt")
    assert result.to_json() == evaluated(shelf / "two.txt", "-m", encoder)
    assert result.accuracy is not None and result.bits_per_byte is None


@pytest.mark.usefixtures("shelf_cache")
def test_an_encoder_decoder_is_evaluated_as_by_the_command(translator: Path, shelf: Path) -> None:
    model = tinylm.load(translator)
    result = model.evaluate(shelf / "pairs.tsv", beams=2)
    assert result.to_json() == evaluated(shelf / "pairs.tsv", "-m", translator, "--beams", 2)
    pairs = (shelf / "pairs.tsv").read_text()
    assert dataclasses.replace(model.evaluate(text=pairs, beams=2), baselines=None) == result


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stride": 17}, "`stride` is 17; it must be from 1 to the model's context, 16."),
        ({"sequence_length": 4, "stride": 5}, "`stride` is 5; it must be from 1 to `sequence_length`, 4."),
        ({"beams": 2}, "`beams` is for encoder-decoder models"),
        ({"bleu_tokenize": "14b"}, "`bleu_tokenize` is '14b'; it must be one of: 13a, none"),
        ({"text": "a", "files": "b.txt"}, "Files and a text contradict each other"),
        ({"files": "no such file.txt"}, "There is no file or folder 'no such file.txt'"),
        ({"text": "é"}, "é"),
    ],
)
def test_the_error_names_evaluation_settings_that_cannot_be_used(
    settings: dict[str, Any],
    message: str,
    run: Path,
) -> None:
    with pytest.raises(UsageError) as caught:
        tinylm.load(run).evaluate(**{"text": "the sea", **settings} if "files" not in settings else settings)
    assert message in str(caught.value)


# Logits, ids


def test_logits_are_those_of_the_reference_in_float64(run: Path) -> None:
    network, config, _, _ = load_model(run)
    weights = {name: value.detach().double().numpy() for name, value in network.state_dict().items()}
    model = tinylm.load(run)
    rows = [model.encode("the old man said"), model.encode("no joy; no joy; ")]
    logits = model.logits(rows)
    assert logits.shape == (2, 16, config.model.vocab_size)
    for row, ids in zip(logits, rows, strict=True):
        expected = reference_parts.decoder_logits_with_parts(weights, config.model, ids, table=np.float32)
        np.testing.assert_allclose(row.numpy(), expected, rtol=0, atol=1e-4)
    assert torch.equal(model.logits(torch.tensor(rows)), logits)


def test_logits_of_encoders_and_encoder_decoders_are_those_of_their_networks(encoder: Path, translator: Path) -> None:
    model = tinylm.load(encoder)
    ids = torch.tensor([model.encode("the old man")])
    with torch.no_grad():
        assert torch.equal(model.logits(ids), model.network.logits(model.network(ids).hidden))
    model = tinylm.load(translator)
    ids, source = torch.tensor([model.encode("c b a")]), torch.tensor([model.encode("abc")])
    with torch.no_grad():
        assert torch.equal(model.logits(ids, source), model.network.logits(model.network(ids, source).hidden))
    with pytest.raises(UsageError, match="needs the ids of a source"):
        model.logits(ids)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], r"1 dimensions; give rows of ids"),
        ([[99]], "must be from 0 to"),
        ([[-1]], "must be"),
        ([[1] * 17], "16"),
    ],
)
def test_ids_that_cannot_be_used_are_a_usage_error(ids: Any, message: str, run: Path) -> None:
    with pytest.raises(UsageError, match=message):
        tinylm.load(run).logits(ids)


def test_encode_and_decode_are_inverse_and_the_loss_is_that_of_the_logits(run: Path) -> None:
    model = tinylm.load(run)
    ids = model.encode(PROMPT)
    assert model.decode(ids) == PROMPT
    log_probabilities = model.logits([ids])[0, :-1].double().log_softmax(-1)
    loss = -log_probabilities[range(len(ids) - 1), ids[1:]].mean().item()
    result = model.evaluate(text=PROMPT)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


# Loading


def test_a_model_has_its_configuration_and_a_run_is_found_by_its_name(run: Path, here: Path) -> None:
    (here / "checkpoints").mkdir()
    (here / "checkpoints/mine").symlink_to(run)
    model = tinylm.load("mine")
    saved = json.loads((run / "config.json").read_text())
    assert json.loads(json.dumps(model.config.to_json())) == {k: v for k, v in saved.items() if k != "digest"}
    assert (model.architecture, model.context) == ("decoder", 16)
    assert model.tokenizer.vocab_size == model.config.model.vocab_size
    assert not model.network.training


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nothing"}, "There is no run at nothing."),
        ({"device": "tpu"}, "`device` is 'tpu'"),
        ({"dtype": "fp64"}, "`dtype` is 'fp64'"),
        ({"quantize": "int4"}, "`quantize` is 'int4'; it must be one of: none, int8"),
    ],
)
def test_the_error_of_load_names_what_cannot_be_used(settings: dict[str, str], message: str, run: Path) -> None:
    with pytest.raises(UsageError) as caught:
        tinylm.load(**{"path": run, **settings})
    assert str(caught.value).startswith(message)


def test_the_library_prints_nothing_and_logs_notes_and_warnings(
    run: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="tinylm"):
        model = tinylm.load(run)
        model.generate("the old man said it was cold", max_tokens=3, seed=7)
    assert capfd.readouterr() == ("", "")
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["Seed 7."] == "INFO"
    assert levels["The prompt has 28 tokens, more than the context of 16: only its last tokens are used."] == "WARNING"


def test_using_a_model_writes_no_file(run: Path, here: Path) -> None:
    before = snapshot(run), snapshot(here)
    model = tinylm.load(run)
    model.generate(max_tokens=3)
    model.evaluate(text="the sea")
    assert (snapshot(run), snapshot(here)) == before


def test_a_name_that_tinylm_does_not_have_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tinylm' has no attribute 'laod'"):
        tinylm.laod  # noqa: B018
