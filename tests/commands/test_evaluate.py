"""tinylm eval."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shell import assert_error, copied, edit_config, records, run_ok, snapshot, story, tinylm
from tinylm.evaluation.baselines import ngram_bits_per_byte
from tinylm.run_directory.loading import load_model, read_config, summarise

KEYS = ["model", "text", "loss", "perplexity", "bits_per_character", "bits_per_byte", "tokens", "characters", "bytes"]


def evaluated(*arguments: object, **how: str | bytes) -> dict[str, float]:
    """The numbers in the JSON record of tinylm eval."""
    (record,) = records(run_ok("eval", *arguments, "--json", **how))
    return {name: value for name, value in record.items() if name not in ("model", "text")}


@pytest.fixture
def text(here: Path) -> Path:
    path = here / "text.txt"
    path.write_text(story(400, seed=2))
    return path


def nats_by_definition(run: Path, ids: Any, length: int | None = None, stride: int | None = None) -> list[float]:
    """-log p of each token but the first, given those before it in the first window that has it as a target.

    Windows of `length` tokens, the context by default, start every `stride` tokens, by default their length.
    """
    model, config, _, _ = load_model(run)
    length = length or config.model.context
    nats: list[float] = []
    with torch.no_grad():
        for start in range(0, len(ids) - 1, stride or length):
            window = torch.tensor(ids[start : start + length + 1])
            log_p = model.logits(model(window[None, :-1]).hidden)[0].double().log_softmax(-1)
            targets = range(len(nats) + 1, start + len(window))
            nats += [-log_p[target - start - 1, ids[target]].item() for target in targets]
    return nats


# The metrics


def test_json_has_the_documented_keys_and_the_table_its_values(run: Path, text: Path) -> None:
    (record,) = records(run_ok("eval", "-m", run, text, "--json"))
    assert list(record) == KEYS
    assert (record["model"], record["text"]) == (str(run), str(text))
    scored = len(text.read_text()) - 1
    assert (record["tokens"], record["characters"], record["bytes"]) == (scored, scored, scored)
    assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
    assert record["bits_per_character"] == pytest.approx(record["loss"] / math.log(2))
    assert record["bits_per_byte"] == record["bits_per_character"]
    result = run_ok("eval", "-m", run, text)
    model, scored, *lines = result.stdout.splitlines()
    assert (model.split(), scored.split()) == (["model", str(run)], ["text", str(text)])
    names = "nats per token,perplexity,bits per character,bits per byte,tokens scored,characters scored,bytes scored"
    assert [line.rpartition("  ")[0].strip() for line in lines] == names.split(",")
    assert lines[0].split()[-1] == f"{record['loss']:.4f}"
    assert result.stderr.startswith("On cpu (1 threads): no GPU was found; fp32: exact.\n")
    assert run_ok("eval", "-m", run, text, "--quiet").stderr == ""


def test_the_loss_is_the_mean_of_log_probabilities_in_windows(run: Path, text: Path) -> None:
    ids = load_model(run).tokenizer.encode(text.read_text()).tolist()
    for length, stride in ((None, None), (None, 1), (5, None), (5, 2)):
        options = {"--sequence-length": length, "--stride": stride}
        nats = nats_by_definition(run, ids, length, stride)
        record = evaluated("-m", run, text, *(word for option in options.items() if option[1] for word in option))
        assert record["tokens"] == len(nats)
        assert record["loss"] == pytest.approx(sum(nats) / len(nats), rel=1e-6)


def test_metrics_do_not_depend_on_the_batch_size(run: Path, bpe_run: Path, text: Path) -> None:
    for model in (run, bpe_run):
        one, *others = (evaluated("-m", model, text, "--batch-size", rows) for rows in (1, 2, 5, 1000))
        for other in others:
            assert other == {key: pytest.approx(value, rel=1e-6) for key, value in one.items()}


def test_a_long_text_has_an_interval_by_blocks_and_many_documents_one_by_documents(run: Path, here: Path) -> None:
    (here / "t.txt").write_text(story(2000, seed=2))
    result = run_ok("eval", "-m", run, "t.txt", "--json")
    (record,) = records(result)
    assert list(record) == [*KEYS, "loss_low", "loss_high", "resampled"]
    assert record["loss_low"] < record["loss"] < record["loss_high"]
    scored = len(story(2000, seed=2)) - 1
    assert record["resampled"] == (
        f"{scored // 64} blocks of about {scored / (scored // 64):.0f} tokens, as the text has only 1 document"
    )
    assert f"95 % interval of the loss: bootstrap of {record['resampled']}." in result.stderr
    assert f"{record['loss_low']:.4f} to {record['loss_high']:.4f}" in run_ok("eval", "-m", run, "t.txt").stdout
    (record,) = records(run_ok("eval", "-m", run, "t.txt", "--format", "lines", "--json"))
    assert record["resampled"] == f"{len(story(2000, seed=2).splitlines())} documents"


@pytest.mark.usefixtures("shelf_cache")
def test_baselines_are_compressors_and_a_character_model(run: Path, text: Path, shelf: Path, here: Path) -> None:
    before = snapshot(run), snapshot(here)
    record = evaluated("-m", run, text, "--baselines")
    assert list(record) == [*KEYS[2:], "baselines"]
    assert set(record["baselines"]) == {"gzip", "xz", "order-5 characters"}
    data = read_config(run).data
    assert data is not None
    training = (shelf / "one.txt").read_text()[: data.train_characters]
    expected = ngram_bits_per_byte(training, text.read_text())
    assert record["baselines"]["order-5 characters"] == pytest.approx(expected)
    assert "bits per byte, gzip" in run_ok("eval", "-m", run, text, "--baselines").stdout
    assert (snapshot(run), snapshot(here)) == before  # evaluating writes no file


# Documents


def test_documents_have_their_own_losses_in_json_and_in_a_table_by_loss(run: Path, here: Path) -> None:
    texts = ["the old man\nsaid it", "a cold morning", "by the sea"]
    (here / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *texts]))
    *documents, total = records(run_ok("eval", "-m", run, "a.jsonl", "--by-document", "--json"))
    assert total == records(run_ok("eval", "-m", run, "a.jsonl", "--json"))[0]
    keys = ["document", "name", "loss", "bits_per_byte", "tokens", "characters", "bytes"]
    assert all(list(document) == keys for document in documents)
    assert [document["name"] for document in documents] == [f"a.jsonl, line {line}" for line in (2, 3, 4)]
    assert [document["document"] for document in documents] == [1, 2, 3]
    tokenizer = load_model(run).tokenizer
    ends = [i for text in texts for i in (*tokenizer.encode(text).tolist(), tokenizer.end_of_text_id)][:-1]
    nats, start = nats_by_definition(run, ends), 0
    for document, text in zip(documents, texts, strict=True):
        length = len(text) + (text != texts[-1]) - (text == texts[0])  # with the end of text, without the first token
        assert document["tokens"] == length
        assert document["characters"] == len(text) - (text == texts[0])
        assert document["loss"] == pytest.approx(sum(nats[start : start + length]) / length, rel=1e-6)
        bits = document["loss"] * length / document["bytes"] / math.log(2)
        assert document["bits_per_byte"] == pytest.approx(bits, rel=1e-9)
        start += length
    (here / "t.txt").write_text("the old man\n\n;;;;;;\nby the sea\n")
    table, metrics = run_ok("eval", "-m", run, "t.txt", "--format", "lines", "--by-document").stdout.split("\n\n")
    heading, *rows = table.splitlines()
    assert heading.split() == ["document", "nats", "per", "token", "bits", "per", "byte", "tokens", "name"]
    assert rows[0].endswith("t.txt, line 3") and len(rows) == 3
    losses = [float(row.split()[1]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert metrics.splitlines()[2].startswith("nats per token")


# The text


def test_texts_may_be_standard_input_folders_and_jsonl_joined_by_end_of_text(run: Path, text: Path, here: Path) -> None:
    expected = evaluated("-m", run, text)
    assert evaluated("-m", run, "-", stdin=text.read_text()) == expected
    (here / "folder").mkdir()
    (here / "folder" / "a.txt").write_text(text.read_text())
    assert evaluated("-m", run, "folder") == expected
    both = evaluated("-m", run, text, "folder")
    assert both["characters"] == 2 * expected["characters"] + 1 == both["tokens"] - 1
    (here / "a.jsonl").write_text('{"body": "the sea"}\n')
    assert evaluated("-m", run, "a.jsonl", "--text-key", "body")["tokens"] == 6
    assert evaluated("-m", run, "-", stdin="th")["tokens"] == 1
    text.rename(here / "--quiet")
    (record,) = records(run_ok("eval", "-m", run, "--json", "--", "--quiet"))
    assert record == {"model": str(run), "text": "--quiet", **expected}


@pytest.mark.usefixtures("shelf_cache")
def test_without_a_text_the_validation_text_of_the_run_or_adapter_is_evaluated(run: Path, adapter: Path) -> None:
    for option, path in (("-m", run), ("--adapter", adapter)):
        *documents, record = records(result := run_ok("eval", option, path, "--json", "--by-document"))
        assert f"Evaluating on the validation text of {path}." in result.stderr
        data = read_config(path).data
        assert data is not None and record["tokens"] == data.val_tokens - 1
        assert record["loss"] == pytest.approx(summarise(path)["val_loss"], rel=1e-4)
        (document,) = documents
        assert (document["document"], document["name"], document["tokens"]) == (1, "", record["tokens"])
        assert document["loss"] == record["loss"]


def test_without_its_training_data_a_run_needs_a_text_and_a_baseline_is_left_out(run: Path, here: Path) -> None:
    path = copied(run, here / "moved")
    edit_config(path, data={"corpus": ["gone.txt"]})
    assert_error(tinylm("eval", "-m", path), 1, "is no longer in the cache; name its training text", "gone.txt")
    result = run_ok("eval", "-m", path, "-", "--baselines", "--json", stdin=story(300))
    assert "Warning: Baselines that need the training text are left out: " in result.stderr
    assert set(records(result)[0]["baselines"]) == {"gzip", "xz"}
