"""tinylm finetune-adapter, and several adapters on one base."""

import json
from pathlib import Path

import pytest

from tests.shell import assert_error, records, run_ok, snapshot, tinylm
from tinylm.run_config import DataConfig
from tinylm.run_directory.loading import read_config

SHORT = ("--steps", 40, "--batch-size", 4, "--lr", 0.01)


def test_a_bottleneck_adapter_lowers_the_loss_without_changing_the_base(second: Path, run: Path, here: Path) -> None:
    before = snapshot(run)
    result = run_ok("finetune-adapter", second, "-m", run, "-o", "ad", *SHORT, "--bottleneck", 4)
    assert result.stdout == "ad\n"
    assert "adapter:   hidden size 4 after attention, feedforward: 296 parameters" in result.stderr
    assert snapshot(run) == before
    files = {path.name for path in (here / "ad").iterdir()} - {"samples.jsonl"}  # samples: if it takes seconds
    assert files == {"config.json", "tokenizer.json", "metrics.jsonl", "adapter.safetensors", "last"}
    base, adapted = (
        records(run_ok("eval", second, *how, "--json"))[0] for how in (("-m", run), ("--adapter", "ad", "-m", run))
    )
    assert adapted["loss"] < base["loss"]


@pytest.mark.usefixtures("shelf_cache")
def test_a_bottleneck_adapter_is_resumed_by_its_command_and_not_merged(second: Path, run: Path, here: Path) -> None:
    run_ok("finetune-adapter", second, "-m", run, "--steps", 2, "-o", "ad", "--batch-size", 4)
    config = read_config(here / "ad").adapter
    assert config is not None and (config.kind, config.rank) == ("bottleneck", 16)
    (record,) = records(run_ok("info", "ad", "--json"))
    assert record["commands"]["resume"] == "tinylm finetune-adapter --resume ad"
    assert "merge" not in record["commands"]
    assert_error(tinylm("finetune-lora", "--resume", "ad"), 2, "To continue it: tinylm finetune-adapter --resume ad.")
    run_ok("finetune-adapter", "--resume", "ad", "--model", run, "--steps", 4)
    again = tinylm("finetune-adapter", second, "-m", run, "-o", "ad", *SHORT)
    assert_error(again, 2, "finetune-adapter --resume ad", sentences=4)
    ways = "Use it with --adapter, in tinylm sample and tinylm eval."
    assert_error(tinylm("merge-lora", "ad", "--out", "merged"), 2, "cannot be merged", ways)


def test_adapters_of_different_bases_are_an_error(second: Path, run: Path, adapter: Path, here: Path) -> None:
    run_ok("train", second, "--out", "other", "--steps", 1, "--init-from", run, "--batch-size", 4)
    run_ok("finetune-lora", second, "-m", "other", "-o", "ad", "--steps", 1, "--batch-size", 4)
    result = tinylm("sample", "--adapter", adapter, "--adapter", "ad")
    assert_error(result, 1, "was trained on another base model", sentences=3)


def test_equal_prompts_get_different_samples(run: Path, here: Path) -> None:
    """They use the random streams of the samples of a single prompt."""
    (here / "prompts.jsonl").write_text(json.dumps({"prompt": "no"}) + "\n" + json.dumps({"prompt": "no"}) + "\n")
    options = ("-m", run, "-n", 30, "--seed", 3, "--json")
    lines = [record["text"] for record in records(run_ok("sample", "-f", "prompts.jsonl", *options))]
    assert lines == [record["text"] for record in records(run_ok("sample", "-p", "no", "--num-samples", 2, *options))]
    assert len(set(lines)) == 2


def test_an_empty_prompt_starts_as_texts_do(
    second: Path, run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "two.jsonl").write_text("".join(json.dumps({"text": second.read_text()}) + "\n" for _ in range(2)))
    run_ok("finetune-adapter", "two.jsonl", "-m", run, "-o", "many", *SHORT)
    run_ok("finetune-adapter", second, "-m", run, "-o", "one", *SHORT)
    documents: list[int] = []

    def start(tokenizer: object, data: DataConfig, prompt: object, context: int) -> list[int]:
        documents.append(data.documents)
        return [1]

    monkeypatch.setattr("tinylm.generation.prompts.start_tokens", start)
    lines = [json.dumps({"prompt": "", "adapter": name}) for name in ("many", "one")]
    (here / "prompts.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": ""})]))
    run_ok("sample", "-m", run, "-f", "prompts.jsonl", "-n", 1)
    assert documents == [2, 1, 1]


def test_each_line_of_prompts_may_name_an_adapter(second: Path, run: Path, adapter: Path, here: Path) -> None:
    """The base is loaded once, and each text is the one that --adapter gives."""
    run_ok("finetune-adapter", second, "-m", run, "-o", "ad", *SHORT)
    options = ("-n", 30, "-t", 0, "--json")
    lora = str(adapter)
    prompts = [("the", None), ("no", lora), ("the", "ad"), ("no", None), ("no", "ad=0.5"), ("the", lora)]
    lines = [json.dumps({"prompt": text, **({"adapter": name} if name else {})}) for text, name in prompts]
    (here / "prompts.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    found = records(run_ok("sample", "-m", run, "--prompt-file", "prompts.jsonl", *options))
    assert [record["prompt"] for record in found] == [text for text, _ in prompts]
    for record, (text, name) in zip(found, prompts, strict=True):
        alone = ("--adapter", name) if name else ()
        (expected,) = records(run_ok("sample", "-m", run, *alone, "-p", text, *options))
        assert record["text"] == expected["text"]
        assert record.get("adapter") == name
    assert len({record["text"] for record in found}) > 3
    printed = run_ok("sample", "-m", run, "--prompt-file", "prompts.jsonl", "-n", 3).stdout
    assert printed.count("\n---\n") == len(prompts) - 1
    result = tinylm("sample", "--adapter", adapter, "-f", "prompts.jsonl")
    assert_error(result, 2, "some lines name their own")
