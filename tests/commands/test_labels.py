"""Texts with labels on the command line: train, finetune-lora, eval, classify, export and what they write."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tinylm as api
from tests.commands.test_chat_data import write_lines
from tests.shell import assert_error, records, run_ok, same_tensors, tinylm
from tinylm.config.run import RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.run_directory.loading import load_model, read_config
from tinylm.run_directory.metrics_log import read_metrics

FIXED = ("--steps", 8, "--eval-every", 4, "--save-every", 4, "--log-every", 1, "--batch-size", 8, "--lr", 0.003)
FIXED += ("--schedule", "constant", "--warmup-steps", 0)
SMALL = ("--layers", 1, "--heads", 2, "--width", 16)
WORDS = {"good": ["lovely", "great", "happy"], "bad": ["awful", "sad", "poor"]}


def example(number: int) -> dict[str, Any]:
    label = "good" if number % 3 else "bad"
    words = ["the", "day", "was", WORDS[label][number % 3], "and", str(number)]
    return {"text": " ".join(words[number % 2 :]), "label": label, "id": number}


RECORDS = [example(number) for number in range(90)]


@pytest.fixture
def labels(here: Path) -> Path:
    return write_lines(here / "labels.jsonl", RECORDS)


@pytest.fixture
def encoder(labels: Path, here: Path) -> Path:
    run_ok("train", labels, "--out", "encoder", *SMALL, *FIXED, "--steps", 40)
    return here / "encoder"


@pytest.fixture
def decoder(labels: Path, here: Path) -> Path:
    run_ok("train", labels, "--out", "decoder", "--architecture", "decoder", *SMALL, *FIXED, "--steps", 40)
    return here / "decoder"


def test_a_label_that_only_validation_texts_have_is_named_and_never_predicted(labels: Path, here: Path) -> None:
    """Also where rare labels have large weights."""
    val = write_lines(here / "val.jsonl", [*RECORDS[:6], {"text": "the day was fair", "label": "fair"}])
    options = ("--class-weights", "balanced", *SMALL, *FIXED, "--steps", 40)
    stderr = run_ok("train", labels, "--val-data", val, "--out", "run", *options).stderr
    assert "3 labels, with their numbers of texts: 'bad' (32), 'fair' (1), 'good' (64)." in stderr
    assert "Warning: The model cannot learn labels without a training text: 'fair' (1)." in stderr
    assert "6 of 7 texts for validation are training texts, too" in stderr
    (found,) = records(run_ok("eval", val, "-m", "run/last", "--json"))
    assert [row[1] for row in found["confusion"]] == [0, 0, 0]


def test_a_classifier_is_an_encoder_of_words_with_an_output_layer_for_labels(labels: Path, here: Path) -> None:
    result = run_ok("train", labels, "--out", "whole", *SMALL, *FIXED, "--class-weights", "balanced")
    assert "a classifier is trained; --format jsonl reads the texts alone" in result.stderr
    assert "; 2 labels" in result.stderr and "accuracy" in result.stderr
    config = read_config(here / "whole")
    assert (config.model.architecture, config.model.labels, config.tokenizer.kind) == (
        "encoder",
        ("bad", "good"),
        "bpe",
    )
    assert (config.data.kind, config.training.objective, config.loss_unit) == (
        "labels",
        "classification",
        "nats per text",
    )
    assert all("val_accuracy" in record for record in read_metrics(here / "whole") if "val_loss" in record)
    info = run_ok("info", "whole").stdout
    assert "nats per text" in info and "tinylm classify --model whole" in info and "tinylm sample" not in info


def test_eval_counts_how_often_each_label_is_given(encoder: Path, labels: Path) -> None:
    """Reference: the labels of one text at a time."""
    loaded = api.load(encoder, dtype="fp32")
    found = [loaded.classify(record["text"])[0] for record in RECORDS]
    table = [[0, 0], [0, 0]]
    nats = 0.0
    for record, one in zip(RECORDS, found, strict=True):
        table[record["label"] == "good"][one.label == "good"] += 1
        nats -= np.log(one.probabilities[record["label"]])
        assert one.probability == max(one.probabilities.values()) and sum(one.probabilities.values()) == pytest.approx(
            1
        )
    (metrics,) = records(run_ok("eval", labels, "-m", encoder, "--json", "--dtype", "fp32"))
    assert (metrics["confusion"], metrics["labels"], metrics["texts"]) == (table, ["bad", "good"], 90)
    assert metrics["accuracy"] == (table[0][0] + table[1][1]) / 90
    assert metrics["loss"] == pytest.approx(nats / 90, rel=1e-4)
    for name in ("accuracy", "macro_f1", "loss"):
        assert metrics[f"{name}_low"] <= metrics[name] <= metrics[f"{name}_high"]
    printed = run_ok("eval", "-m", encoder).stdout  # on the validation texts
    assert "macro F1" in printed and "label, given:  bad  good" in printed and "nats per text" in printed


def test_classify_prints_a_label_per_text_from_words_lines_and_json(encoder: Path, here: Path) -> None:
    assert run_ok("classify", "-m", encoder, "the day was awful", "a happy day").stdout == "bad\ngood\n"
    lines = run_ok("classify", "-", "-m", encoder, stdin="the day was awful\r\n\na happy day").stdout
    assert lines == "bad\n\ngood\n"  # a line without text has no label
    stdin = "".join(json.dumps({"id": record["id"], "text": record["text"]}) + "\n" for record in RECORDS)
    found = records(run_ok("classify", "-", "-m", encoder, "--format", "jsonl", "--json", stdin=stdin))
    assert [record["id"] for record in found] == list(range(90))
    bare = records(run_ok("classify", "-", "-m", encoder, "--format", "jsonl", "--json", stdin='"a happy day"'))
    assert (bare[0]["text"], bare[0]["label"]) == ("a happy day", "good")
    keyed = ("--format", "jsonl", "--text-key", "body", "--json")
    (kept,) = records(run_ok("classify", "-", "-m", encoder, *keyed, stdin='{"body": "a happy day", "text": "y"}'))
    assert (kept["body"], kept["text"], kept["label"]) == ("a happy day", "y", "good")
    with_blank = records(run_ok("classify", "-", "-m", encoder, "--json", stdin="\na happy day"))
    assert with_blank[0] == {"text": "", "label": None} and with_blank[1]["label"] == "good"
    alone = records(run_ok("classify", RECORDS[7]["text"], "-m", encoder, "--json"))
    assert list(alone[0]) == ["text", "label", "probability", "probabilities", "cut"]
    assert alone[0]["probabilities"] == pytest.approx(found[7]["probabilities"], rel=1e-4)  # beside longer texts
    assert run_ok("classify", "-", "-m", encoder, stdin="").stdout == ""


def test_answers_before_a_bad_line_are_printed_and_with_json_those_after_it_too(encoder: Path, here: Path) -> None:
    earlier = '{"id": 4, "text": "the day was awful", "error": "of an earlier answer"}'
    lines = ['{"id": 1, "text": "a happy day"}', "{", '{"id": 3, "probability": 2}', earlier]
    (here / "texts.jsonl").write_text("\n".join(lines))
    plain = tinylm("classify", "-m", encoder, "-f", "texts.jsonl")
    assert (plain.exit_code, plain.stdout) == (2, "good\n") and "texts.jsonl, line 2: invalid JSON" in plain.stderr
    found = tinylm("classify", "-m", encoder, "-f", "texts.jsonl", "--json")
    assert found.exit_code == 1 and "2 of 4 lines have no label" in found.stderr
    first, bad, without_text, last = map(json.loads, found.stdout.splitlines())
    assert (first["id"], first["label"], last["id"], last["label"]) == (1, "good", 4, "bad")
    assert "error" not in last and list(bad) == ["error"]
    assert list(without_text) == ["id", "error"] and "line 3" in without_text["error"]
    assert "name the key with --text-key" in without_text["error"]
    binary = tinylm("classify", "-m", encoder, "-", stdin=b"a happy day\n\xff\n")
    assert (binary.exit_code, binary.stdout) == (2, "good\n") and "line 2: byte 0xFF at offset 0" in binary.stderr
    for options in ((), ("--format", "jsonl")):
        stdin = b'"a happy day"\n"caf\xe9"\n"the day was awful"\n'
        found = tinylm("classify", "-m", encoder, "-", "--json", *options, stdin=stdin)
        assert found.exit_code == 1 and "1 of 3 lines have no label" in found.stderr
        first, bad, last = map(json.loads, found.stdout.splitlines())
        assert (first["label"], last["label"]) == ("good", "bad")
        assert bad["error"] == "Standard input, line 2: the line is not UTF-8; convert the text."
        assert options or bad["text"] == '"caf\ufffd"'


def test_texts_that_are_cut_at_the_context_are_counted(encoder: Path, here: Path) -> None:
    (here / "long.txt").write_text("a happy day\n" + "a happy day " * api.load(encoder).network.context + "\n")
    found = run_ok("classify", "-m", encoder, "-f", "long.txt", "--json")
    assert [record["cut"] for record in records(found)] == [False, True]
    assert "1 text is longer than the context of" in found.stderr


def test_classify_explains_what_it_cannot_read(encoder: Path, decoder: Path, labels: Path) -> None:
    classify = ("classify", "-m", encoder)
    assert_error(tinylm(*classify, "-", "--format", "jsonl", stdin='{"txt": 1}'), 2, "line 1", "no text under 'text'")
    assert_error(tinylm(*classify, "-", "--format", "jsonl", stdin="x"), 2, "line 1", "invalid JSON")
    assert_error(tinylm(*classify, "good", "--format", "jsonl"), 2, "--format jsonl is for its lines")
    assert_error(tinylm(*classify, "-", "good"), 2, "Standard input is read if - is the only text")
    assert_error(tinylm(*classify), 2, "Give the texts, - for standard input, or a file with --file")
    assert_error(tinylm(*classify, "good", "-f", "labels.jsonl"), 2, "or a file with --file")
    assert_error(tinylm(*classify, "-f", "missing"), 2, "Cannot read --file missing: No such file")
    assert_error(tinylm(*classify, "good", "--text-key", "x"), 2, "--text-key is for --format jsonl")
    assert "also a path" in run_ok(*classify, "labels.jsonl").stderr
    run_ok("train", labels, "--format", "jsonl", "--out", "lm", *SMALL, *FIXED)
    assert_error(tinylm("classify", "-m", "lm", "x"), 2, "lm is not a classifier; train one on texts with labels")
    for command in ("sample", "chat", "serve"):
        assert_error(tinylm(command, "-m", decoder), 2, "decoder is a classifier, which generates no text")


def test_characters_outside_the_vocabulary_are_skipped_or_an_error(labels: Path, here: Path) -> None:
    run_ok("train", labels, "--tokenizer", "char", "--out", "char", *SMALL, *FIXED)
    one, other = (records(run_ok("classify", "-m", "char", text, "--json"))[0] for text in ("a day", "a 天day"))
    assert one["probabilities"] == other["probabilities"] and other["text"] == "a 天day"
    assert_error(
        tinylm("classify", "-m", "char", "天", "--unknown", "error"), 2, "Text 1 has characters", "--unknown skip"
    )
    mixed = tinylm("classify", "-m", "char", "天", "a day", "--unknown", "error", "--json")
    assert mixed.exit_code == 1 and "天" in records(mixed)[0]["error"] and records(mixed)[1]["label"]
    assert run_ok("classify", "-m", "char", "天", "a day").stdout.startswith("\n")
    with pytest.raises(UsageError, match="A text is empty, or has no character that is in the vocabulary"):
        api.load("char").classify(["a day", "天"])


def test_data_and_models_that_do_not_fit_each_other_are_errors(
    encoder: Path, decoder: Path, labels: Path, here: Path
) -> None:
    (here / "plain.txt").write_text("Some words.\n" * 30)
    for command in (("eval", "plain.txt", "-m"), ("train", "plain.txt", "--out", "x", "--init-from")):
        assert_error(tinylm(*command, encoder), 2, "plain.txt has no texts with labels, which a classifier takes")
    (here / "brace.json").write_text('{"text": "x", "label": broken}\n' * 30)
    run_ok("train", "brace.json", "--format", "text", "--out", "brace", *SMALL, *FIXED)  # is not parsed
    assert_error(tinylm("train", "plain.txt", "--teacher", decoder), 2, "decoder is a classifier")
    assert_error(tinylm("compare", decoder, decoder, "plain.txt"), 2, "Only models of text are compared")
    assert_error(tinylm("train", labels, "--tie"), 2, "--tie is for models of tokens")
    mixed = here / "mixed"
    mixed.mkdir()
    (mixed / "plain.txt").write_text("Some words.\n" * 30)
    (mixed / "a.jsonl").write_text(labels.read_text())
    warned = run_ok("train", mixed, "--out", "mixed-run", *SMALL, *FIXED).stderr
    assert "mixed/a.jsonl are not read, since " in warned and "mixed/plain.txt has none." in warned
    (mixed / "b.txt").write_text(labels.read_text())
    assert_error(tinylm("train", mixed), 2, "b.txt contains JSON, which would be read as plain text", sentences=3)
    assert_error(
        tinylm("train", labels, "--val-data", "plain.txt", "--format", "labels"), 2, "plain.txt has no texts with"
    )
    assert_error(tinylm("train-tokenizer", mixed / "b.txt"), 2, "contains JSON", sentences=3)
    second = [{"text": "x"}, *RECORDS]
    assert_error(tinylm("train", write_lines(here / "second.jsonl", second)), 2, "line 1: 'label' is None", sentences=3)
    other = write_lines(here / "other.jsonl", [{"text": "x", "label": "new"}] * 3)
    assert_error(tinylm("train", other, "--init-from", encoder), 2, "'new' is not one of the model's (bad, good)")
    several = write_lines(here / "several.jsonl", [{"text": "x", "label": ["a", "b"]}] * 3)
    assert_error(tinylm("train", several), 2, "several.jsonl, line 1", "train one classifier for each", sentences=3)
    pairs = ("train", labels, "--architecture", "encoder-decoder")
    assert_error(tinylm(*pairs), 2, "expected an object with texts under 'source' and 'target'")
    plain = ("train", "plain.txt", "--class-weights", "balanced")
    assert_error(tinylm(*plain), 2, "--class-weights is for texts with labels")
    assert run_ok(*plain[:2], *SMALL, *FIXED, "--out", "y", env={"TINYLM_TRAIN_CLASS_WEIGHTS": "balanced"})


def test_a_classifier_learns_further_and_a_language_model_becomes_one(
    encoder: Path, decoder: Path, labels: Path, here: Path
) -> None:
    run_ok("train", labels, "--init-from", encoder, "--out", "further", *FIXED)
    further, _, _, _ = load_model(here / "further")
    assert further.output is not None and further.output.weight.shape == (2, 16)
    run_ok("train", labels, "--format", "jsonl", "--out", "lm", *SMALL, *FIXED)
    run_ok("train", labels, "--init-from", "lm", "--out", "tuned", *FIXED, "--extend-vocab")
    lora = ("--lr", 0.03, "--dtype", "fp32")
    run_ok("finetune-lora", labels, "-m", "lm", "--out", "lora", *FIXED, *lora, "--steps", 40)
    texts = [RECORDS[number]["text"] for number in (0, 1)]
    assert run_ok("classify", "--adapter", "lora", *texts).stdout == "bad\ngood\n"
    assert_error(tinylm("export", "lora", "--to", "peft", "--out", "p"), 2, "makes a classifier of its base; merge")
    for adapters in (("lora", "lora"), ("lora=0.5",)):
        given = [word for adapter in adapters for word in ("--adapter", adapter)]
        assert_error(tinylm("classify", "x", *given), 2, "it is not combined with others, nor scaled")
    run_ok("report", "lora", "--out", "lora.html")
    run_ok("merge-lora", "lora", "--out", "merged")
    undo = tinylm("merge-lora", "--undo", "lora", "--model", "merged", "--out", "undone")
    assert_error(undo, 2, "replaced the output layer of its base")
    one, other = (
        records(run_ok("classify", *model, "a happy day", "--json"))[0]["probabilities"]
        for model in (("--adapter", "lora"), ("--model", "merged"))
    )
    assert one == pytest.approx(other, rel=1e-4)
    run_ok("finetune-lora", labels, "-m", "lora/../merged", "--out", "again", *FIXED)  # LoRA on a classifier
    assert read_config(here / "again").adapter.labels == ()
    assert run_ok("classify", "--adapter", "again", *texts).stdout == "bad\ngood\n"
    run_ok("finetune-lora", labels, "-m", "lm", "--out", "cut", *FIXED, *lora, "--steps", 20)
    run_ok("finetune-lora", "--resume", "cut", "--steps", 40)
    assert same_tensors(here / "lora/last/adapter.safetensors", here / "cut/last/adapter.safetensors")


@pytest.mark.parametrize("preset", ["modern", "gpt2"])
def test_an_exported_classifier_has_the_probabilities_of_transformers(preset: str, labels: Path, here: Path) -> None:
    """Texts of different lengths in one batch, which transformers pads."""
    shape = (*SMALL, *FIXED, "--steps", 20, "--architecture", "decoder", "--preset", preset)
    run_ok("train", labels, "--out", "decoder", *shape)
    run_ok("export", "decoder", "--to", "hf", "--out", "hf")
    peer = transformers.AutoModelForSequenceClassification.from_pretrained("hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    assert type(peer).__name__ == {"modern": "Qwen3", "gpt2": "GPT2"}[preset] + "ForSequenceClassification"
    assert peer.config.id2label == {0: "bad", 1: "good"}
    texts = ["the day was awful", "x", "a happy day of many more words than the others"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        logits = peer(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = logits.double().softmax(dim=1).numpy()
    for path in (here / "decoder", here / "hf"):  # the export is read again
        found = api.load(path, dtype="fp32").classify(texts)
        np.testing.assert_allclose([list(one.probabilities.values()) for one in found], expected, atol=1e-6)
    config = json.loads((here / "hf/config.json").read_text())
    for forged in (
        {},
        {"0": "a"},
        {"0": "a", "2": "b"},
        {"0": "a", "1": 3},
        None,
        {str(i): str(i) for i in range(5000)},
    ):
        (here / "hf/config.json").write_text(json.dumps({**config, "id2label": forged}))
        assert_error(tinylm("classify", "-m", "hf", "x"), 1, "id2label" if forged != {"0": "a"} else "label")
    (here / "hf/config.json").write_text(json.dumps({**config, "problem_type": "multi_label_classification"}))
    assert_error(tinylm("classify", "-m", "hf", "x"), 1, "problem_type")
    peer.config.id2label = {0: "LABEL_0", 1: "LABEL_1"}  # the default, which transformers does not write
    peer.save_pretrained("hf")
    assert "id2label" not in json.loads((here / "hf/config.json").read_text())
    assert api.load("hf").labels == ("LABEL_0", "LABEL_1")


def test_what_has_no_place_for_labels_refuses_a_classifier(encoder: Path, decoder: Path) -> None:
    assert_error(tinylm("export", encoder, "--to", "hf", "--out", "hf"), 2, "`architecture` 'encoder'")
    gguf = ("--to", "gguf", "--out", "a.gguf")
    assert_error(tinylm("export", decoder, *gguf), 2, "is a classifier, which GGUF cannot represent; choose --to hf.")
    assert_error(tinylm("export", encoder, *gguf), 2, "for --to hf, train a decoder on the same texts.")


def test_the_report_has_the_confusion_table(encoder: Path, here: Path) -> None:
    run_ok("report", encoder, "--out", "report.html")
    page = (here / "report.html").read_text()
    assert '"confusion":[[' in page.replace(" ", "") and '"labels":["bad","good"]' in page.replace(" ", "")


def test_a_table_to_classify_is_refused_with_what_is_read_instead(encoder: Path, here: Path) -> None:
    (here / "a.csv").write_text("text,label\na good day,good\n")
    assert_error(
        tinylm("classify", "-m", encoder, "-f", "a.csv"), 2, "a.csv is not read by its columns", "--format text"
    )
    assert run_ok("classify", "-m", encoder, "-f", "a.csv", "--format", "text").stdout.count("\n") == 2


def test_forged_labels_are_refused(encoder: Path, here: Path) -> None:
    values = read_config(encoder).to_json()
    assert RunConfig.from_json(json.loads(json.dumps(values))).labels == ("bad", "good")
    many = [str(number) for number in range(1010)]
    for labels, sentence in (
        (["bad", "bad"], "named twice"),
        (["bad", 3], "expected str, found 3"),
        (["bad", "x" * 201], "more than 200 characters"),
        (["bad", "go\nod"], "a line break"),
        (many, "There are 1,010 labels"),
        ([], "has labels if its objective predicts them"),
    ):
        with pytest.raises(TinyLMError, match=sentence):
            RunConfig.from_json(json.loads(json.dumps({**values, "model": {**values["model"], "labels": labels}})))
