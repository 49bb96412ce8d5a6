"""tinylm eval, with --memorisation, and tinylm compare."""

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tinylm as tinylm_api
from tests.machines import pretend_bf16
from tests.shell import TINY, assert_error, copied, edit_config, records, run_ok, snapshot, story, tinylm
from tests.trained_runs import HELD_OUT, trained
from tinylm.jobs.text.baselines import ppmd_bits_per_byte
from tinylm.run_directory.loading import load_model, read_config, summarise
from tinylm.run_directory.metrics_log import read_metrics

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
    assert result.stderr.startswith("On cpu (1 thread): no GPU was found; fp32: as in training.\n")
    assert run_ok("eval", "-m", run, text, "--quiet").stderr == ""


def test_the_loss_is_the_mean_of_log_probabilities_in_windows(run: Path, text: Path) -> None:
    ids = load_model(run).tokenizer.encode(text.read_text()).tolist()
    for length, stride in ((None, None), (None, 1), (5, None), (5, 2)):
        options = {"--sequence-length": length, "--stride": stride}
        nats = nats_by_definition(run, ids, length, stride)
        record = evaluated("-m", run, text, *(word for option in options.items() if option[1] for word in option))
        usual = nats_by_definition(run, ids, length)
        assert record["tokens"] == len(usual) == len(nats)
        assert record["loss"] == pytest.approx(sum(usual) / len(usual), rel=1e-6)
        overlapping = {"overlapping_loss": nats, "overlapping_bits_per_byte": [n / math.log(2) for n in nats]}
        expected = {name: pytest.approx(sum(of) / len(of), rel=1e-6) for name, of in overlapping.items()}
        found = {name: value for name, value in record.items() if name.startswith("overlapping")}
        assert found == (expected if stride else {})


def test_the_figure_of_overlapping_windows_is_printed_beside_the_usual_one(run: Path, text: Path) -> None:
    options = ("eval", "-m", run, text, "--quiet")
    usual, both = (run_ok(*options, *more).stdout.splitlines() for more in ((), ("--stride", 2)))
    fields = [line.split("  ")[0] for line in both[len(usual) :]]
    assert [line.split() for line in both[: len(usual)]] == [line.split() for line in usual]
    assert fields == ["nats per token, overlapping windows", "bits per byte, overlapping windows"]


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
def test_baselines_are_compressors_and_ppmd(run: Path, text: Path, shelf: Path, here: Path) -> None:
    before = snapshot(run), snapshot(here)
    record = evaluated("-m", run, text, "--baselines")
    assert list(record) == [*KEYS[2:], "baselines"]
    assert set(record["baselines"]) == {"gzip", "xz", "PPMd"}
    data = read_config(run).data
    training = (shelf / "one.txt").read_text()[: data.train_characters]
    expected = ppmd_bits_per_byte(training, text.read_text())
    assert record["baselines"]["PPMd"] == pytest.approx(expected)
    assert "bits per byte, gzip" in run_ok("eval", "-m", run, text, "--baselines").stdout
    assert (snapshot(run), snapshot(here)) == before  # evaluating writes no file


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_model_has_one_loss_in_training_in_eval_and_as_an_export(
    dtype: str, corpus: Path, second: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of the format of training, which eval takes from the run or adapter. Merging rounds other products, in
    which a number of bf16 has 8 significant bits."""
    pretend_bf16(monkeypatch, True)
    steps = ("--steps", 6, "--eval-every", 6, "--lr", 0.05, "--dtype", dtype, *HELD_OUT)
    run_ok("train", corpus, "--out", "run", *steps, *TINY)
    run_ok("export", "run/last", "--to", "hf", "--out", "hf")
    run_ok("finetune-lora", second, "-m", "run/last", "--out", "ad", *steps)
    run_ok("merge-lora", "ad/last", "-m", "run/last", "--out", "merged")
    logged, adapted = (read_metrics(here / name)[-1]["val_loss"] for name in ("run", "ad"))
    assert evaluated("-m", "run/last")["loss"] == pytest.approx(logged, rel=1e-6)
    assert tinylm_api.load("run/last").evaluate().loss == pytest.approx(logged, rel=1e-6)
    assert evaluated("--adapter", "ad/last", "-m", "run/last")["loss"] == pytest.approx(adapted, rel=1e-6)
    own, exported = (evaluated("-m", model, second, "--dtype", dtype)["loss"] for model in ("run/last", "hf"))
    assert exported == pytest.approx(own, rel=1e-6)
    how = (second, "--dtype", dtype)
    merged, unmerged = (evaluated(*m, *how)["loss"] for m in (("-m", "merged"), ("--adapter", "ad/last")))
    assert merged == pytest.approx(unmerged, rel=1e-5 if dtype == "fp32" else 2**-8)
    if dtype == "bf16":
        assert evaluated("-m", "run/last", "--dtype", "fp32")["loss"] != pytest.approx(logged, rel=1e-6)


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
        (record,) = records(result := run_ok("eval", option, path, "--json"))
        assert f"Evaluating on the validation text of {path}." in result.stderr
        data = read_config(path).data
        assert record["tokens"] == data.val_tokens - 1
        assert record["loss"] == pytest.approx(summarise(path)["val_loss"], rel=1e-4)


def test_without_its_training_data_a_run_needs_a_text_and_a_baseline_is_left_out(run: Path, here: Path) -> None:
    path = copied(run, here / "moved")
    edit_config(path, data={"corpus": ["gone.txt"]})
    assert_error(tinylm("eval", "-m", path), 1, "is no longer in the cache; name its training text", "gone.txt")
    result = run_ok("eval", "-m", path, "-", "--baselines", "--json", stdin=story(300))
    assert "Warning: Baselines that need the training text are left out: " in result.stderr
    assert set(records(result)[0]["baselines"]) == {"gzip", "xz"}


SOURCES = ["samples", "continuations of training text", "continuations of held-out text", "held-out text"]
FEW = ("--num-samples", 12, "--sample-length", 120, "--min-match", 25)


def measured(*arguments: object) -> dict[str, dict[str, Any]]:
    """The records of tinylm eval --memorisation by source."""
    found = records(run_ok("eval", "--memorisation", "--json", *arguments))
    return {record["source"]: record for record in found}


def noise(characters: int, seed: int) -> str:
    """Text that a model can only memorise."""
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz \n", k=characters))


@pytest.mark.slow
def test_a_model_made_to_memorise_copies_nearly_all_and_the_control_nothing(shelf: Path) -> None:
    text = noise(600, seed=1) * 4  # so that windows at any offset contain all of it
    (shelf / "noise.txt").write_text(text)
    (shelf / "once.txt").write_text(noise(600, seed=1))
    (shelf / "unseen.txt").write_text(noise(1000, seed=2))
    shape = ("--layers", 2, "--heads", 2, "--width", 64, "--context", 128, "--batch-size", 8, "--dropout", 0)
    data = (shelf / "noise.txt", "--val-data", shelf / "once.txt")
    path = trained(shelf, "memory", "train", *data, "--steps", 300, "--lr", 0.01, *shape)
    texts = (shelf / "unseen.txt", "--train-data", shelf / "noise.txt")
    for temperature, share in ((1, 0.75), (0, 0.95)):
        found = measured("-m", path, *texts, *FEW, "--temperature", temperature)
        assert found["continuations of training text"]["copied"] > share
        assert found["samples"]["copied"] > share
        assert found["held-out text"]["copied"] == found["held-out text"]["longest"] == 0
        assert found["continuations of training text"]["matches"][0]["text"] in text


@pytest.mark.usefixtures("shelf_cache")
def test_a_model_that_has_learned_little_copies_little_and_the_table_shows_the_longest(run: Path, shelf: Path) -> None:
    found = measured("-m", run, *FEW)
    assert list(found) == SOURCES
    assert all(record["samples"] <= 12 and record["characters"] <= 12 * 120 for record in found.values())
    assert found["samples"]["copied"] <= found["held-out text"]["copied"] + 0.1
    training = (shelf / "one.txt").read_text()
    assert all(match["text"] in training for record in found.values() for match in record["matches"])
    result = run_ok("eval", "-m", run, "--memorisation", *FEW[:4], "--min-match", 8)
    shares, longest = result.stdout.split("\n\n")
    assert [line.split("  ")[0] for line in shares.splitlines()] == ["text", *SOURCES]
    assert longest.splitlines()[0].split() == ["match", "in", "text"] and len(longest.splitlines()) > 1
    assert run_ok("eval", "-m", run, "--memorisation", *FEW[:4], "--min-match", 8).stdout == result.stdout
    other = run_ok("eval", "-m", run, "--memorisation", *FEW[:4], "--min-match", 8, "--seed", 1).stdout
    assert other != result.stdout


@pytest.mark.usefixtures("shelf_cache")
def test_without_its_text_a_run_needs_one_and_opens_no_forged_path(run: Path, here: Path, monkeypatch: Any) -> None:
    path = copied(run, here / "forged")
    edit_config(path, data={"corpus": [str(here / "secret.txt")]})
    (here / "secret.txt").write_text("secret " * 100)
    found = measured("-m", path, *FEW[:4], "--min-match", 8)
    assert not any("secret" in match["text"] for record in found.values() for match in record["matches"])
    (here / "t.txt").write_text(story(300))
    monkeypatch.setenv("TINYLM_CACHE", str(here / "none"))
    assert_error(tinylm("eval", "--memorisation", "-m", run, "t.txt"), 1, "is no longer in the cache")


COMPARED = "a b bits_per_byte_a bits_per_byte_b loss_a loss_b difference difference_low difference_high better bytes"


@pytest.fixture(scope="session")
def other(shelf: Path) -> Path:
    """A model like `run`, trained on the same text for fewer steps."""
    return trained(shelf, "other", "train", shelf / "one.txt", *HELD_OUT, "--steps", 60, "--lr", 0.02, *TINY)


def compared(*arguments: object, **how: str | bytes) -> dict[str, object]:
    (record,) = records(run_ok("compare", *arguments, "--json", **how))
    return record


def document_bits(run: Path, documents: list[str]) -> list[float]:
    """The bits of each document with the end of text after it, without the first character, by definition."""
    tokenizer = load_model(run).tokenizer
    ids = [i for text in documents for i in (*tokenizer.encode(text).tolist(), tokenizer.end_of_text_id)][:-1]
    ends = np.cumsum([len(text) + 1 for text in documents]) - 1
    return [sum(part) / math.log(2) for part in np.split(nats_by_definition(run, ids), ends[:-1])]


def test_the_difference_and_its_interval_are_those_of_a_paired_bootstrap(run: Path, other: Path, here: Path) -> None:
    documents = story(1500, seed=5).splitlines()
    (here / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    record = compared(run, other, "t.jsonl")
    assert list(record) == [*COMPARED.split(), "resampled"]
    sizes = np.array([len(text) for text in documents]) - (np.arange(len(documents)) == 0)
    bits = {name: np.array(document_bits(path, documents)) for name, path in (("a", run), ("b", other))}
    assert record["bytes"] == sizes.sum() and record["resampled"] == f"{len(documents)} documents"
    for name, expected in bits.items():
        assert record[f"bits_per_byte_{name}"] == pytest.approx(expected.sum() / sizes.sum(), rel=1e-5)
    rng, differences = np.random.default_rng(7), []
    for _ in range(4000):
        drawn = rng.integers(0, len(documents), len(documents))
        differences.append((bits["b"] - bits["a"])[drawn].sum() / sizes[drawn].sum())
    low, high = np.quantile(differences, [0.025, 0.975])  # not corrected for the number of documents
    assert record["difference_low"] == pytest.approx(low, abs=0.1 * (high - low))
    assert record["difference_high"] == pytest.approx(high, abs=0.1 * (high - low))
    assert record["better"] == "a" and record["difference"] > 0
    text = "\n".join(documents)  # lines end with line breaks, which count
    record = compared(run, other, "-", "--format", "lines", stdin=text + "\n")
    assert record["bytes"] == len(text) - 1  # the first character is not scored
    for name, expected in bits.items():
        assert record[f"bits_per_byte_{name}"] == pytest.approx(expected.sum() / record["bytes"], rel=1e-5)


def test_the_better_model_is_named_in_either_order(run: Path, other: Path, here: Path, bpe_run: Path) -> None:
    (here / "t.txt").write_text(story(3000, seed=3))
    result = run_ok("compare", run, other, "t.txt")
    assert result.stdout.splitlines()[-1].startswith("A is better by 0.")
    assert "paired bootstrap of" in result.stderr and "the text has only 1 document" in result.stderr
    assert run_ok("compare", other, run, "t.txt").stdout.splitlines()[-1].startswith("B is better by 0.")
    same = compared(run, run, "t.txt")
    assert (same["difference"], same["difference_low"], same["difference_high"], same["better"]) == (0, 0, 0, None)
    assert run_ok("compare", run, run, "t.txt").stdout.splitlines()[-1] == "No difference can be shown with this text."
    record = compared(run, bpe_run, "t.txt")
    assert record["better"] == "a"
    bpe = load_model(bpe_run).tokenizer
    first = len(bpe.decode(bpe.encode(story(3000, seed=3))[:1]))
    assert record["bytes"] == len(story(3000, seed=3)) - first
    (scored,) = records(run_ok("eval", "-m", bpe_run, "t.txt", "--json"))
    assert record["bits_per_byte_b"] == pytest.approx(scored["bits_per_byte"], rel=1e-6)
    assert record["loss_b"] == pytest.approx(scored["loss"], rel=1e-6)


@pytest.mark.usefixtures("shelf_cache")
def test_without_a_text_models_are_compared_on_that_of_their_data(
    run: Path, other: Path, bpe_run: Path, adapter: Path, shelf: Path, here: Path
) -> None:
    (scored,) = records(run_ok("eval", "-m", other, "--json"))
    assert compared(run, other)["bits_per_byte_b"] == pytest.approx(scored["bits_per_byte"], rel=1e-6)
    record = compared(run, bpe_run)
    assert record["difference"] > 0 and record["better"] is None  # 301 characters: too short for an interval
    assert_error(tinylm("compare", run, adapter), 2, "not trained on the same text", "name a text")
    record = compared(run, adapter, shelf / "two.txt")
    assert (record["a"], record["b"], record["better"]) == (str(run), str(adapter), "b")
    path = copied(other, here / "forged")
    edit_config(path, data={"corpus": ["/etc/passwd"]})
    assert compared(run, path) == {**compared(run, other), "b": str(path)}


def test_a_short_text_gives_no_verdict_and_unknown_ones_are_skipped(run: Path, other: Path, bpe_run: Path) -> None:
    result = run_ok("compare", run, other, "-", stdin="the old man said")
    assert result.stdout.splitlines()[-1] == "The text is too short to compare the models."
    record = compared(run, other, "-", stdin="the old man said")
    assert (record["difference_low"], record["better"], record["bytes"]) == (None, None, 15)
    text = "é the old man said é"
    assert_error(tinylm("compare", bpe_run, run, "-", stdin=text), 2, "has no id for 1 of the text's characters, 'é'")
    assert compared(bpe_run, run, "-", "--unknown", "skip", stdin=text)["bytes"] < len(text) - 2
