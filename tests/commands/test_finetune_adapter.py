import json
from pathlib import Path

import pytest

from tests.shell import copied, done, records, refused, snapshot, tinylm
from tinylm.checkpoint import read_config
from tinylm.config import DataConfig

SHORT = ("--steps", 40, "--batch-size", 4, "--lr", 0.01)


@pytest.fixture
def second(here: Path) -> Path:
    path = here / "second.txt"
    path.write_text("no joy, no joy; no bed\n" * 60)
    return path


def test_a_bottleneck_adapter_learns_its_text_and_leaves_the_base_alone(second: Path, run: Path, here: Path) -> None:
    before = snapshot(run)
    result = done("finetune-adapter", second, "-m", run, "-o", "ad", *SHORT, "--bottleneck", 4)
    assert result.stdout == "ad\n"
    assert "adapter:   4 features after attention, feedforward: 296 parameters" in result.stderr
    assert snapshot(run) == before
    assert {path.name for path in (here / "ad").iterdir()} == {
        "config.json",
        "tokenizer.json",
        "metrics.jsonl",
        "adapter_model.safetensors",
        "last",
    }
    base, adapted = (
        records(done("eval", second, *how, "--json"))[0] for how in (("-m", run), ("--adapter", "ad", "-m", run))
    )
    assert adapted["loss"] < base["loss"]


def test_it_begins_at_no_change(second: Path, run: Path, here: Path) -> None:
    done("finetune-adapter", second, "-m", run, "-o", "ad", "--steps", 1, "--lr", 1e-30, "--batch-size", 4)
    options = ("-n", 30, "-t", 0)
    assert done("sample", "--adapter", "ad", "-m", run, *options).stdout == done("sample", "-m", run, *options).stdout


@pytest.mark.usefixtures("shelf_cache")
def test_it_can_be_resumed_by_its_own_command(second: Path, run: Path, here: Path) -> None:
    done("finetune-adapter", second, "-m", run, "--steps", 2, "-o", "ad", "--batch-size", 4)
    (record,) = records(done("info", "ad", "--json"))
    assert record["commands"]["resume"] == "tinylm finetune-adapter --resume ad"
    assert "merge" not in record["commands"]
    done("finetune-adapter", "--resume", "ad", "--model", run, "--steps", 4)
    again = tinylm("finetune-adapter", second, "-m", run, "-o", "ad", *SHORT)
    refused(again, 2, "finetune-adapter --resume ad", sentences=4)


def test_it_cannot_be_merged_and_says_what_to_do(second: Path, run: Path, here: Path) -> None:
    done("finetune-adapter", second, "-m", run, "-o", "ad", "--steps", 1, "--batch-size", 4)
    refused(
        tinylm("merge-lora", "ad", "--out", "merged"), 2, "cannot be merged; sample and eval take it with --adapter"
    )


@pytest.mark.parametrize("size", [0, 17, 99_999_999])
def test_a_bottleneck_wider_than_the_model_is_none(size: int, second: Path, run: Path, here: Path) -> None:
    result = tinylm("finetune-adapter", second, "-m", run, "-o", "ad", *SHORT, "--bottleneck", size)
    refused(result, 2, f"--bottleneck is {size}; it must be from 1 to ")


def test_it_is_gone_on_with_by_its_own_command(second: Path, run: Path, adapter: Path, here: Path) -> None:
    done("finetune-adapter", second, "-m", run, "-o", "ad", "--steps", 1, "--batch-size", 4)
    refused(tinylm("finetune-lora", "--resume", "ad"), 2, "go on with it by tinylm finetune-adapter --resume ad")
    refused(tinylm("train", "--resume", adapter), 2, f"go on with it by tinylm finetune-lora --resume {adapter}")


def test_the_default_folder_has_its_kind_in_its_name(second: Path, run: Path, here: Path) -> None:
    base = copied(run, here / "base")
    assert done("finetune-adapter", second, "-m", base, "--steps", 1).stdout == f"{here}/base-adapter\n"
    config = read_config(here / "base-adapter").adapter
    assert config is not None and (config.kind, config.rank) == ("bottleneck", 16)


# Several adapters on one base


def test_adapters_act_together_and_by_their_strengths(second: Path, run: Path, adapter: Path, here: Path) -> None:
    done("finetune-adapter", second, "-m", run, "-o", "ad", *SHORT)

    def loss(*adapters: object) -> float:
        words = [word for one in adapters for word in ("--adapter", one)]
        return records(done("eval", second, "-m", run, *words, "--json"))[0]["loss"]

    base, lora, bottleneck = loss(), loss(adapter), loss("ad")
    assert len({round(value, 4) for value in (base, lora, bottleneck, loss(adapter, "ad"))}) == 4
    assert loss(f"{adapter}=0") == pytest.approx(base, rel=1e-6)
    assert loss(f"{adapter}=0", "ad=1") == pytest.approx(bottleneck, rel=1e-6)
    assert loss("ad=0.0", f"{adapter}=1") == pytest.approx(lora, rel=1e-6)
    assert min(base, lora) < loss(f"{adapter}=0.5") < max(base, lora)


def test_adapters_of_different_bases_are_refused(second: Path, run: Path, adapter: Path, here: Path) -> None:
    done("train", second, "--out", "other", "--steps", 1, "--init-from", run, "--batch-size", 4)
    done("finetune-lora", second, "-m", "other", "-o", "ad", "--steps", 1, "--batch-size", 4)
    refused(tinylm("sample", "--adapter", adapter, "--adapter", "ad"), 1, "was made for another base", sentences=3)


def test_equal_lines_of_prompts_are_answered_differently(run: Path, here: Path) -> None:
    """As the samples of one prompt are, and from the same numbers."""
    (here / "prompts.jsonl").write_text(json.dumps({"prompt": "no"}) + "\n" + json.dumps({"prompt": "no"}) + "\n")
    options = ("-m", run, "-n", 30, "--seed", 3, "--json")
    lines = [record["text"] for record in records(done("sample", "-f", "prompts.jsonl", *options))]
    assert lines == [record["text"] for record in records(done("sample", "-p", "no", "--num-samples", 2, *options))]
    assert len(set(lines)) == 2


def test_an_empty_prompt_begins_as_the_text_of_its_own_adapter_does(
    second: Path, run: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "two.jsonl").write_text("".join(json.dumps({"text": second.read_text()}) + "\n" for _ in range(2)))
    done("finetune-adapter", "two.jsonl", "-m", run, "-o", "many", *SHORT)
    done("finetune-adapter", second, "-m", run, "-o", "one", *SHORT)
    begun: list[int] = []

    def start(tokenizer: object, data: DataConfig, prompt: object) -> list[int]:
        begun.append(data.documents)
        return [1]

    monkeypatch.setattr("tinylm.inference.text.start_tokens", start)
    lines = [json.dumps({"prompt": "", "adapter": name}) for name in ("many", "one")]
    (here / "prompts.jsonl").write_text("\n".join([*lines, json.dumps({"prompt": ""})]))
    done("sample", "-m", run, "-f", "prompts.jsonl", "-n", 1)
    assert begun == [2, 1, 1]


@pytest.mark.parametrize("strength", ["half", "nan", "inf", ""])
def test_a_strength_that_is_no_number_is_refused(strength: str, adapter: Path) -> None:
    refused(tinylm("sample", "--adapter", f"{adapter}={strength}"), 2, f"{strength!r} is no number", "=0.5")


def test_lines_of_prompts_may_each_name_their_adapter(second: Path, run: Path, adapter: Path, here: Path) -> None:
    """The base is loaded once, and each line's text is what its adapter alone would have written."""
    done("finetune-adapter", second, "-m", run, "-o", "ad", *SHORT)
    options = ("-n", 30, "-t", 0, "--json")
    prompts = [
        ("the", None),
        ("no", str(adapter)),
        ("the", "ad"),
        ("no", None),
        ("no", "ad=0.5"),
        ("the", str(adapter)),
    ]
    lines = [json.dumps({"prompt": text, **({"adapter": name} if name else {})}) for text, name in prompts]
    (here / "prompts.jsonl").write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    found = records(done("sample", "-m", run, "--prompt-file", "prompts.jsonl", *options))
    assert [record["prompt"] for record in found] == [text for text, _ in prompts]
    for record, (text, name) in zip(found, prompts, strict=True):
        alone = ("--adapter", name) if name else ()
        (expected,) = records(done("sample", "-m", run, *alone, "-p", text, *options))
        assert record["text"] == expected["text"]
        assert record.get("adapter") == name
    assert len({record["text"] for record in found}) > 3
    printed = done("sample", "-m", run, "--prompt-file", "prompts.jsonl", "-n", 3).stdout
    assert printed.count("\n---\n") == len(prompts) - 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "prompts.jsonl, line 1: not JSON"),
        ('{"text": "a"}', "prompts.jsonl, line 1: expected an object with a text under 'prompt'"),
        ('{"prompt": "a", "adapter": 3}', "line 1: 'adapter' is 3; it must be a text"),
        ('{"prompt": "a \\ud800"}', "line 1: half a surrogate pair at character 2"),
        ("", "prompts.jsonl has no prompt in it"),
    ],
)
def test_a_bad_line_of_prompts_is_named(line: str, words: str, run: Path, here: Path) -> None:
    (here / "prompts.jsonl").write_text(line)
    refused(tinylm("sample", "-m", run, "-f", "prompts.jsonl"), 2, words)


def test_an_adapter_for_all_and_one_for_a_line_contradict(run: Path, adapter: Path, here: Path) -> None:
    (here / "prompts.jsonl").write_text(json.dumps({"prompt": "a", "adapter": str(adapter)}))
    refused(tinylm("sample", "--adapter", adapter, "-f", "prompts.jsonl"), 2, "some lines name their own")
