"""Loaded models in Python. Reference: the commands with the same settings, and a forward pass in float64."""

import copy
import dataclasses
import inspect
import json
import logging
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main

import tinylm
from tests import reference_parts
from tests.shell import records, run_ok, snapshot, story
from tinylm.adapters.adapter import adapter_layers
from tinylm.cli import app
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.result import Evaluation
from tinylm.generation.generation_config import GenerationConfig, SpeedConfig
from tinylm.generation.llama_cpp import MAX_ROWS
from tinylm.jobs.pairs import job as translation
from tinylm.jobs.pairs.corpus import pair_evaluation_batches
from tinylm.models.model import Model, ReadingSettings
from tinylm.run_directory.loading import load_model

PROMPT = "the old man"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands
Settings = dict[str, Any]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# Names and defaults


def defaults(function: object) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind == p.KEYWORD_ONLY}


def option_defaults(command: str) -> dict[str, Any]:
    return {one.name: one.default for one in COMMANDS[command].params}


def defaults_of(*kinds: Any) -> dict[str, Any]:
    return {field.name: field.default for kind in kinds for field in dataclasses.fields(kind)}


def test_load_generate_and_evaluate_have_the_options_of_the_commands_with_their_defaults(run: Path) -> None:
    sample, evaluation = option_defaults("sample"), option_defaults("eval")
    own = defaults(tinylm.load)
    del own["adapters"], own["reporter"]
    assert own == {name: sample[name] for name in ("device", "dtype", "quantize")}
    others = "model adapter device dtype quiet json config debug short_help"
    reading = f"quantize separator echo logprobs {others} words prompt prompt_file format chat chat_template"
    generation = defaults(Model.generate) | defaults_of(GenerationConfig)
    del generation["logprobs"]
    assert set(sample) - set(reading.split()) == set(generation)
    differing = {"stop": None, "stream": None, "seed": None}  # a list, whether there is a terminal, and a random one
    for name, value in generation.items():
        assert (value == sample[name]) != (name in differing), name
    memorisation = "minimal_pairs memorisation train_data num_samples sample_length min_match temperature seed"
    own = defaults(Model.evaluate) | defaults_of(EvaluationConfig, ReadingSettings)
    del own["text"], own["ranks"]
    assert own == {k: v for k, v in evaluation.items() if k not in f"text {others} {memorisation}".split()}
    model = tinylm.load(run)
    assert isinstance(model.generate(**generation | {"max_tokens": 2, "stream": False}), str)
    assert model.evaluate(text=PROMPT, **own).loss > 0
    for function in (model.generate, model.evaluate):
        with pytest.raises(TypeError, match="temprature"):
            function(temprature=1)


# Generation


@pytest.mark.parametrize(
    ("loading", "settings", "flags"),
    [
        ({}, {"temperature": 0, "max_tokens": 50}, "-t 0 -n 50"),
        ({}, {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "stop": "e"}, "-k 5 --top-p 0.9 --min-p 0.01 --stop e"),
        ({}, {"repeat_penalty": 1.3, "stop": ["a", "o"]}, "--repeat-penalty 1.3 --stop a --stop o"),
        ({}, {"max_tokens": 60, "engine": "torch"}, "-n 60 --engine torch"),
        ({"quantize": "int8"}, {}, "--quantize int8"),
        ({"dtype": "bf16"}, {}, "--dtype bf16"),
    ],
)
def test_generate_gives_the_text_of_the_command_as_a_whole_and_as_a_stream(
    loading: Settings, settings: Settings, flags: str, run: Path
) -> None:
    expected = run_ok("sample", "-m", run, "-p", PROMPT, "--seed", 3, "--no-echo", *flags.split()).stdout
    model = tinylm.load(run, **loading)
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
    assert model.generate(max_tokens=40) != model.generate(max_tokens=40)  # without a seed


def test_more_samples_than_llama_cpp_generates_at_once_have_the_seeds_of_their_numbers(run: Path) -> None:
    """Greedy text is the same in every row; sampled rows on both sides of the limit have their own random streams."""
    model = tinylm.load(run)
    greedy = model.generate(PROMPT, num_samples=MAX_ROWS + 2, temperature=0, max_tokens=3)
    assert len(greedy) == MAX_ROWS + 2 and len(set(greedy)) == 1
    sampled = model.generate(PROMPT, num_samples=MAX_ROWS + 2, seed=1, temperature=2, max_tokens=12)
    assert len({*sampled[:3], *sampled[-2:]}) == 5
    with pytest.raises(TypeError, match="the prompt is a list; it must be a text"):
        model.generate(["a", "b"])  # type: ignore[arg-type]


def test_adapters_generate_the_text_of_the_command_and_can_be_switched(run: Path, adapter: Path) -> None:
    expected = run_ok("sample", "--adapter", f"{adapter}=0.5", "--seed", 3, "-n", 60).stdout
    model = tinylm.load(run, adapters=[f"{adapter}=0.5"])
    assert f"{model.generate(seed=3, max_tokens=60)}\n" == expected
    model.select_adapter(None)
    assert model.generate(seed=3, max_tokens=60) == tinylm.load(run).generate(seed=3, max_tokens=60)
    model.select_adapter(0)
    model.select_adapter(np.int64(0))
    wrong: tuple[Any, ...] = (1, -1, 0.0, "0", False, np.bool_(False), np.array([0, 1]))
    for index in wrong:
        with pytest.raises(UsageError, match=r"There is no adapter .*: the model has 1, counted from 0"):
            model.select_adapter(index)
    assert f"{model.generate(seed=3, max_tokens=60)}\n" == expected
    for one in (f"{adapter}=0.5", Path(f"{adapter}=0.5")):
        assert f"{tinylm.load(run, adapters=one).generate(seed=3, max_tokens=60)}\n" == expected


@pytest.mark.parametrize("engine", ["llama.cpp", "torch"])
def test_a_model_that_has_generated_can_be_copied_and_pickled(run: Path, engine: str) -> None:
    model = tinylm.load(run)
    choices: Settings = {"seed": 3, "max_tokens": 20, "engine": engine}
    expected = model.generate(**choices)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        assert other.generate(**choices) == expected


def test_a_result_is_loaded_from_where_its_run_was_trained(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "text").write_text(story(900))
    sizes: Settings = {"steps": 1, "layers": 1, "heads": 2, "width": 16, "context": 16}
    results = tinylm.train("text", "run", **sizes), tinylm.finetune_lora("text", "run", "lora", steps=1)
    (here / "below").mkdir()
    monkeypatch.chdir("below")
    for result in results:
        assert len(result.load().adapters) == (result.run.name == "lora")


def test_a_lora_is_merged_for_generation_by_torch_unless_adapters_are_switched(run: Path, adapter: Path) -> None:
    choices: Settings = {"seed": 3, "max_tokens": 60, "engine": "torch"}
    expected = tinylm.load(run, adapters=[f"{adapter}=0.5"]).generate(**choices)
    assert expected != tinylm.load(run).generate(**choices)
    for switches in (False, True):
        model = tinylm.load(run, adapters=[f"{adapter}=0.5"])
        model.engine.settle(SpeedConfig(engine="torch"), switches_adapters=switches)
        assert bool(adapter_layers(model.network)) == switches
        assert model.generate(**choices) == expected


def test_an_encoder_fills_masks_as_the_command_does(encoder: Path) -> None:
    prompt = "the <mask>ld ma<mask> s"
    model = tinylm.load(encoder)
    text = model.generate(prompt)
    assert f"{text}\n" == run_ok("sample", "-m", encoder, "-p", prompt).stdout
    assert list(model.generate(prompt, stream=True)) == [text]


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"beams": 2, "length_penalty": 0.5, "stop": "a"}, "--beams 2 --length-penalty 0.5 --stop a"),
        ({"temperature": 2.0, "top_k": 3, "seed": 4}, "-t 2.0 -k 3 --seed 4"),
    ],
)
def test_an_encoder_decoder_translates_each_line_as_the_command_does(
    settings: Settings, flags: str, translator: Path
) -> None:
    sources, command = "abc\n\nbca", ("sample", "-m", translator, "-p", "-", *flags.split())
    model = tinylm.load(translator)
    expected = run_ok(*command, stdin=sources).stdout
    assert model.generate(sources, **settings) + "\n" == expected
    assert "".join(model.generate(sources, stream=True, **settings)) + "\n" == expected
    if "temperature" in settings:
        columns = model.generate(sources, num_samples=2, **settings)
        lines = run_ok(*command, "--num-samples", 2, stdin=sources).stdout.splitlines()
        assert [column.split("\n") for column in columns] == [lines[0::2], lines[1::2]]


# Evaluation


def evaluated(*arguments: object) -> dict[str, Any]:
    """The metrics that the command prints, without the names of the model and the text."""
    (record,) = records(run_ok("eval", *arguments, "--json"))
    return {name: value for name, value in record.items() if name not in ("model", "text")}


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        ({"stride": 3, "batch_size": 2}, "--stride 3 --batch-size 2"),
        ({"sequence_length": 4, "baselines": True}, "--sequence-length 4 --baselines"),
    ],
)
@pytest.mark.usefixtures("shelf_cache")
def test_evaluate_gives_the_metrics_of_the_command(settings: Settings, flags: str, run: Path, here: Path) -> None:
    text = story(400, seed=2)
    (here / "text.txt").write_text(text)
    model = tinylm.load(run)
    result = model.evaluate("text.txt", **settings)
    assert isinstance(result, Evaluation)
    assert result.to_json() == evaluated("-m", run, "text.txt", *flags.split())
    assert model.evaluate([Path("text.txt")], **settings) == result
    assert model.evaluate(text=text, **settings) == result
    assert model.evaluate().to_json() == evaluated("-m", run)


@pytest.mark.usefixtures("shelf_cache")
def test_generating_changes_no_metric_and_no_logit_and_writes_no_file(run: Path, here: Path) -> None:
    files = snapshot(run), snapshot(here)
    model = tinylm.load(run, dtype="bf16", quantize="int8")
    ids = [model.encode(PROMPT)]
    before = model.evaluate(), model.logits(ids)
    model.generate(PROMPT, max_tokens=5)
    after = model.evaluate(), model.logits(ids)
    assert before[0] == after[0] and torch.equal(before[1], after[1])
    assert (snapshot(run), snapshot(here)) == files


@pytest.mark.usefixtures("shelf_cache")
def test_encoders_and_encoder_decoders_are_evaluated_as_by_the_command(
    encoder: Path, translator: Path, shelf: Path
) -> None:
    result = tinylm.load(encoder).evaluate(shelf / "two.txt")
    assert result.to_json() == evaluated(shelf / "two.txt", "-m", encoder)
    assert result.accuracy is not None and result.bits_per_byte is None
    model = tinylm.load(translator)
    result = model.evaluate(shelf / "pairs.tsv", beams=2)
    assert result.to_json() == evaluated(shelf / "pairs.tsv", "-m", translator, "--beams", 2)
    pairs = (shelf / "pairs.tsv").read_text()
    assert dataclasses.replace(model.evaluate(text=pairs, beams=2), baselines=None) == result


@pytest.mark.usefixtures("shelf_cache")
def test_pairs_are_evaluated_in_batches_for_their_length_and_not_for_the_context(
    translator: Path, shelf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def batches(pairs: Any, context: int, batch_size: int) -> Any:
        rows.append(batch_size)
        return pair_evaluation_batches(pairs, context, batch_size)

    monkeypatch.setattr(translation, "pair_evaluation_batches", batches)
    tinylm.load(translator).evaluate(shelf / "pairs.tsv", beams=1)
    longest = max(len(side) for line in (shelf / "pairs.tsv").read_text().splitlines() for side in line.split("\t"))
    assert rows == [8192 // (longest + 1)]  # characters and an end-of-text id


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


def test_encode_and_decode_are_inverse_and_the_loss_is_that_of_the_logits(run: Path) -> None:
    model = tinylm.load(run)
    ids = model.encode(PROMPT)
    assert model.decode(ids) == PROMPT
    for kind in (np.uint16, np.uint64, np.int8):
        assert model.decode(np.array(ids, dtype=kind)) == PROMPT
        assert torch.equal(model.logits(np.array([ids], dtype=kind)), model.logits([ids]))
    log_probabilities = model.logits([ids])[0, :-1].double().log_softmax(-1)
    loss = -log_probabilities[range(len(ids) - 1), ids[1:]].mean().item()
    result = model.evaluate(text=PROMPT)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(loss), rel=1e-5)


# Loading, messages


def test_a_model_has_its_configuration_and_a_run_is_found_by_its_name(run: Path, here: Path) -> None:
    (here / "checkpoints").mkdir()
    (here / "checkpoints/mine").symlink_to(run)
    model = tinylm.load("mine")
    saved = json.loads((run / "config.json").read_text())
    assert json.loads(json.dumps(model.config.to_json())) == {k: v for k, v in saved.items() if k != "digest"}
    assert (model.architecture, model.context) == ("decoder", 16)
    assert model.tokenizer.vocab_size == model.config.model.vocab_size
    assert not model.network.training


def test_the_library_prints_nothing_and_logs_notes_and_warnings(
    run: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="tinylm"):
        model = tinylm.load(run)
        model.generate("the old man said it was cold", max_tokens=3, seed=7)
    assert capfd.readouterr() == ("", "")
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels["Seed 7."] == "INFO"
    (warning,) = (message for message, level in levels.items() if level == "WARNING")
    assert warning.startswith("The prompt has 28 tokens, and the context of 16 has no room for them")


# The run, the function, its arguments, and the message.
WRONG_USES: list[tuple[str, str, Settings, str]] = [
    ("run", "load", {"path": "nothing"}, "There is no run at nothing."),
    ("run", "load", {"device": "tpu"}, "`device` is 'tpu'"),
    ("run", "load", {"dtype": "fp64"}, "`dtype` is 'fp64'"),
    ("run", "load", {"quantize": "int4"}, "`quantize` is 'int4'; it must be one of: none, int8"),
    ("run", "generate", {"beams": 3}, "this model continues a prompt: leave out `beams`"),
    ("run", "generate", {"stream": True, "num_samples": 2}, "`stream` is for a single sample"),
    ("run", "generate", {"max_tokens": 0}, "`max_tokens` is 0"),
    ("run", "generate", {"logprobs": 2}, "leave out `logprobs`"),
    ("run", "generate", {"stop": ["a", ""]}, "`stop` is empty"),
    ("run", "generate", {"engine": "best"}, "`engine` is 'best'"),
    ("run", "generate", {"prompt": "é"}, 'or leave such characters out with `unknown="skip"`'),
    ("run", "generate", {"prompt": "a" * 17, "strict": True}, "leave out `strict`"),
    ("encoder", "generate", {"prompt": "a<mask>", "max_tokens": 3, "cache": False}, "leave out `max_tokens`, `cache`"),
    ("translator", "generate", {"prompt": "abc", "top_k": 3}, "leave out `top_k`"),
    ("run", "evaluate", {"text": "a", "stride": 17}, "`stride` is 17; it must be from 1 to the model's context, 16."),
    ("run", "evaluate", {"text": "a", "sequence_length": 4, "stride": 5}, "must be from 1 to `sequence_length`, 4."),
    ("run", "evaluate", {"text": "a", "beams": 2}, "`beams` is for pairs, not for this model"),
    ("run", "evaluate", {"text": "a", "bleu_tokenize": "14b"}, "'14b'; it must be one of: 13a, none"),
    ("run", "evaluate", {"text": "a", "files": "b.txt"}, "Files and a text contradict each other"),
    ("run", "evaluate", {"files": "no such file.txt"}, "There is no file or folder 'no such file.txt'"),
    ("run", "evaluate", {"text": "é"}, "é"),
    ("run", "logits", {"ids": [1, 2]}, "1 dimensions; give rows of ids"),
    ("run", "logits", {"ids": [[99]]}, "must be from 0 to"),
    ("run", "logits", {"ids": [[-1]]}, "must be"),
    ("run", "logits", {"ids": [[1] * 17]}, "16"),
    ("run", "logits", {"ids": [[1, 2], [1]]}, "in rows of the same length"),
    ("run", "logits", {"ids": torch.tensor([[1.9]])}, "must be whole numbers"),
    ("translator", "logits", {"ids": [[1]], "source": [[1], [2]]}, "1 rows of ids and 2 of sources"),
    ("run", "decode", {"ids": [99]}, "must be from 0 to"),
    ("run", "decode", {"ids": [[1]]}, "2 dimensions; give those of one text"),
    ("run", "encode", {"text": "a\ud800"}, "a lone surrogate at character 1"),
    ("run", "evaluate", {"text": "a\ud800"}, "a lone surrogate at character 1"),
    ("run", "evaluate", {"text": ""}, "The text is empty"),
    ("run", "evaluate", {"text": "a", "format": "lines"}, "`format` is for files, not for a text"),
    ("run", "evaluate", {"files": "What is it? " * 40}, "No file matches the pattern 'What is it? What"),
    ("run", "evaluate", {"files": "x" * 5000}, "Cannot read 'xxx"),
    ("run", "evaluate", {"files": "a\0b"}, "There is no file or folder 'a\\x00b'"),
    ("run", "evaluate", {"files": b"text"}, "116 is not the path of a text"),
    ("run", "select_adapter", {"index": -1}, "There is no adapter -1: the model has 0"),
    ("adapter", "load", {}, "is an adapter, not a model; name it as one of the adapters, and its base as the path"),
]


def test_the_error_names_settings_that_cannot_be_used(request: pytest.FixtureRequest) -> None:
    for kind, function, settings, message in WRONG_USES:
        path = request.getfixturevalue(kind)
        with pytest.raises(UsageError) as caught:
            if function == "load":
                tinylm.load(**{"path": path, **settings})
            else:
                getattr(tinylm.load(path), function)(**settings)
        assert message in str(caught.value) and "--" not in str(caught.value) and len(str(caught.value)) < 500
