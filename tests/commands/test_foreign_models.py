"""Models and adapters of other tools on the command line: what is shown of them, and how forged ones are refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.formats import gguf_files
from tests.formats.peers import save_peer
from tests.formats.peft_adapters import make_adapter
from tests.shell import assert_error, copied, records, run_ok, snapshot, tinylm

SENTENCE = "the old man said it was a cold morning. "


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The models of transformers, in folders and files of their names, and an adapter of PEFT."""
    folder = tmp_path_factory.mktemp("models")
    peers: dict[str, Any] = {"llama": save_peer("llama", folder / "llama")}
    peers["llama.gguf"] = gguf_files.save_peer("llama", folder / "llama.gguf")
    peers["folder"] = folder
    make_adapter(save_peer("llama", folder / "base"), folder / "lora", target_modules=["q_proj", "up_proj"])
    return peers


@pytest.fixture
def llama(models: dict[str, Any], here: Path) -> Path:
    """A copy of the folder of a Llama, to be forged."""
    return copied(models["folder"] / "llama", here / "bad")


# Output.


@pytest.mark.parametrize(
    ("name", "format", "numbers", "size"),
    [("llama", "hugging face", "float32", 292), ("llama.gguf", "gguf", "F32", 265)],
)
def test_info_describes_a_model(name: str, format: str, numbers: str, size: int, models: dict[str, Any]) -> None:
    path = models["folder"] / name
    (record,) = records(run_ok("info", path, "--json"))
    expected = models[name].num_parameters()
    assert (record["run"], record["kind"], record["format"]) == (str(path), "model", format)
    assert (record["family"], record["number_formats"]) == ("llama", [numbers])
    assert record["parameters"] == record["parameters_by_part"]["total"] == expected
    assert record["config"]["model"]["context"] == 64
    assert record["tokenizer"] == {"kind": "bpe", "vocab_size": size}
    shown = run_ok("info", path).stdout.splitlines()
    for line in (
        f"  format               {format}",
        "  family               llama",
        f"  parameters           {expected:,}",
        f"  model                decoder, {record['config']['model']['layers']} layers x width 32, context 64",
        f"  tokenizer            bpe, {size:,} ids, with a chat template",
    ):
        assert line in shown
    assert "  chat template        yes" in run_ok("info", path, "--all").stdout.splitlines()
    (sample,) = [line.partition("tinylm ")[2] for line in shown if line.startswith("  sample:")]
    assert sample == f'sample --model {path} --prompt "..."'


def test_info_describes_an_adapter_without_its_base(models: dict[str, Any]) -> None:
    path = models["folder"] / "lora"
    (record,) = records(run_ok("info", path, "--json"))
    # 3 layers of q_proj (32, 32) and up_proj (48, 32), each with A (3, in) and B (out, 3).
    assert record["parameters"] == 3 * (3 * (32 + 32) + 3 * (32 + 48))
    settings = {"base": None, "rank": 3, "alpha": 5.0, "rank_stabilised": False, "modules_to_save": []}
    assert record["adapter"] == settings | {"targets": ["q_proj", "up_proj"]}
    assert "  targets              q_proj, up_proj" in run_ok("info", path).stdout.splitlines()


def test_runs_lists_folders_of_hugging_face_never_as_the_newest(models: dict[str, Any], run: Path, here: Path) -> None:
    for name in ("llama", "lora"):
        copied(models["folder"] / name, here / "checkpoints" / name)
    os.link(models["folder"] / "llama.gguf", here / "checkpoints/llama.gguf")
    result = run_ok("runs")
    _, row = (line.split("  ") for line in result.stdout.splitlines())
    assert [cell.strip() for cell in row if cell][:5] == ["llama", "hugging face", "42.5k", "-", "-"]
    assert result.stderr == ""
    (record,) = records(run_ok("runs", "--json"))
    assert (record["kind"], record["parameters"], record["step"]) == ("hugging face", 42464, None)
    copied(run, here / "checkpoints/mine")
    os.utime(here / "checkpoints/llama/model.safetensors", (3e9, 3e9))
    assert "Using checkpoints/mine, the newest model." in run_ok("sample", "-n", 1).stderr
    (here / "checkpoints/llama/model.safetensors").write_bytes(b"")
    assert "damaged" in run_ok("runs").stdout


# Files that are named in other ways, or are something else.


def test_a_gguf_file_is_known_by_its_first_bytes_also_through_a_link(models: dict[str, Any], here: Path) -> None:
    """As huggingface_hub and ollama keep such files."""
    (here / "text.txt").write_text(SENTENCE * 20)
    snapshot = here / "models--someone--small/snapshots/0123"
    snapshot.mkdir(parents=True)
    (here / "models--someone--small/blobs").mkdir()
    blob = here / "models--someone--small/blobs/sha256-0a1b2c"
    for name in (blob, here / "LOUD.GGUF"):
        name.write_bytes((models["folder"] / "llama.gguf").read_bytes())
    (snapshot / "model.gguf").symlink_to("../../blobs/sha256-0a1b2c")
    options = ("-p", "the", "-n", 3, "-t", 0, "-q")
    expected = run_ok("sample", "-m", models["folder"] / "llama.gguf", *options).stdout
    for name in (snapshot / "model.gguf", blob, "LOUD.GGUF"):
        assert run_ok("sample", "-m", name, *options).stdout == expected
        assert records(run_ok("info", name, "--json"))[0]["family"] == "llama"
    assert run_ok("import", "LOUD.GGUF", "-q").stdout == "checkpoints/LOUD\n"
    tuned = run_ok("finetune-lora", "text.txt", "-m", snapshot / "model.gguf", "--steps", 1, "-q").stdout
    assert tuned == "checkpoints/model-lora\n"


@pytest.mark.parametrize("name", ["llama.gguf", "llama"])
def test_the_base_of_an_adapter_is_found_in_place_or_beside_it(name: str, models: dict[str, Any], here: Path) -> None:
    (here / "text.txt").write_text(SENTENCE * 20)
    (here / "far").mkdir()
    base = here / "far" / name
    copied(models["folder"] / name, base) if name == "llama" else os.link(models["folder"] / name, base)
    run_ok("finetune-lora", "text.txt", "-m", base, "--steps", 2, "--lr", 0.1, "--out", "near/lora")

    def answer() -> Any:
        return tinylm("chat", "--adapter", "near/lora", "-n", 3, "-t", 0, "-q", stdin="the old man\n")

    expected = answer().stdout
    assert expected and expected != tinylm("chat", "-m", base, "-n", 3, "-t", 0, "-q", stdin="the old man\n").stdout
    run_ok("eval", "text.txt", "--adapter", "near/lora")
    run_ok("merge-lora", "near/lora", "--out", "merged")
    run_ok("finetune-lora", "--resume", "near/lora", "--steps", 2)
    run_ok("cache", "bases", "--clear")
    assert_error(answer(), 2, "is neither beside it nor directly in checkpoints/", str(base), "--model")
    (here / "near" / name).symlink_to(base)
    assert_error(answer(), 2, "is neither beside it nor directly in checkpoints/")
    (here / "near" / name).unlink()
    base.rename(here / "near" / name)
    assert answer().stdout == expected


PLACEHOLDERS = {
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 269060552\n",
        "is a Git LFS pointer in place of the file, which git lfs pull fetches",
    ),
    "page": (
        b"\xef\xbb\xbf\n  <!DOCTYPE html>\n<html><head><title>Not found</title></head></html>\n",
        "is an HTML page in place of the file; download the file itself, by its download link",
    ),
}


def test_a_pointer_or_a_page_in_place_of_a_file_is_named(run: Path, models: dict[str, Any], here: Path) -> None:
    llama, lora = models["folder"] / "llama", models["folder"] / "lora"
    for kind, (content, message) in PLACEHOLDERS.items():
        for number, (folder, name) in enumerate(
            (folder, name)
            for folder in (llama, run, lora)
            for name in ("config.json", "tokenizer.json", "model.safetensors", "adapter_config.json")
            if (folder / name).exists()
        ):
            bad = copied(folder, here / f"{kind} {number}")
            (bad / name).write_bytes(content)
            words = ("-m", llama, "--adapter", bad) if folder == lora else ("-m", bad)
            assert_error(tinylm("sample", "-n", 1, *words), 1, name, message, sentences=5)
        for name, code in (("model.gguf", 1), ("model", 2)):
            (here / name).write_bytes(content)
            assert_error(tinylm("sample", "-m", name, "-n", 1), code, name, message, sentences=5)


# Forged models.


def test_a_model_that_is_a_link_to_itself_is_refused(here: Path) -> None:
    (here / "text.txt").write_text(SENTENCE * 20)
    commands = ("info", "sample -n 1 -m", "eval text.txt -m", "import --out run", "export --to hf --out new")
    commands += ("sample -n 1 --adapter", "merge-lora --out new", "train text.txt --steps 1 --init-from")
    commands += ("finetune-lora text.txt --steps 1 --model",)
    for name in ("loop", "loop.gguf"):
        (here / name).symlink_to(name)
        for words in commands:
            result = tinylm(*words.split(), name)
            assert_error(result, result.exit_code, name)
            assert result.exit_code in (1, 2)


def test_an_output_that_is_a_link_to_itself_or_whose_name_is_not_utf_8_is_refused(llama: Path, here: Path) -> None:
    (here / "loop").symlink_to("loop")
    before = snapshot(here)
    for words in (("import", "bad"), ("export", "bad", "--to", "hf"), ("import", "bad", "--force")):
        assert_error(tinylm(*words, "--out", "loop"), 2, "loop")
        assert (here / "loop").is_symlink()
    assert_error(tinylm("export", llama, "--to", "gguf", "--out", "a\udcff.gguf"), 2, "must be UTF-8")
    assert snapshot(here) == before


def test_a_model_whose_computation_overflows_gives_no_text_and_no_loss(llama: Path) -> None:
    tensors = safetensors.torch.load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = torch.full_like(tensors[name], 1e38)
    safetensors.torch.save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    for words, message in (
        (("eval", "-", "-m", llama, "--json"), "The loss is not a finite number"),
        (("sample", "-m", llama, "-n", 3, "--prompt", "the", "--no-echo"), "The model's logits are not finite numbers"),
    ):
        assert_error(tinylm(*words, stdin=SENTENCE * 20), 1, message, "--dtype fp32")
