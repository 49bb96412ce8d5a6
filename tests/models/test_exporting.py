"""Exports of whole runs: other libraries compute the same logits, and a failure leaves no files."""

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

import tinylm
from tests.formats.peers import save_peer
from tests.shell import run_ok, snapshot, story
from tinylm.errors import TinyLMError, UsageError
from tinylm.models import exporting
from tinylm.models.open import open_model
from tinylm.run_directory.weights import write_weights

SHAPES: dict[str, dict[str, Any]] = {
    "modern": {},
    "modern, tied BPE": {"tie": True, "tokenizer": "bpe", "vocab_size": 300},
    "gpt2": {"preset": "gpt2"},
    "experts": {"experts": 4},
}
FAMILIES = {"modern": "qwen3", "modern, tied BPE": "qwen3", "gpt2": "gpt2", "experts": "qwen3_moe"}
TINY: dict[str, Any] = {"layers": 2, "heads": 2, "width": 16, "context": 32, "batch_size": 4, "steps": 3}
TEXT = story(4000) + " äß 中文 👍\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "text.txt").write_text(TEXT)
    for shape, choices in SHAPES.items():
        tinylm.train(folder / "text.txt", folder / shape, **{**TINY, **choices})
    return {shape: folder / shape for shape in SHAPES}


@pytest.fixture
def run(runs: dict[str, Path]) -> Path:
    return runs["modern"]


def test_a_model_that_was_trained_on_conversations_is_exported_with_its_template_and_end_token(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"Say {i}", "completion": f"It is {i}."}) for i in range(20)]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    tinylm.train(tmp_path / "chats.jsonl", tmp_path / "run", **{**TINY, "context": 64})
    tinylm.export_model(tmp_path / "run", to="hf", out=tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]
    assert "<|im_start|>user\nHi<|im_end|>" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False
    )
    assert tinylm.load(tmp_path / "hf").generate("It is", max_tokens=3, seed=0)
    tinylm.export_model(tmp_path / "run", to="gguf", out=tmp_path / "run.gguf")


@pytest.mark.parametrize("shape", SHAPES)
def test_transformers_and_tinylm_load_an_export(
    shape: str, runs: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    exported = tinylm.export_model(runs[shape], to="hf", out=tmp_path / "hf")
    assert exported.family == FAMILIES[shape]
    logging.getLogger("transformers").propagate = True
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert not caplog.records
    model = tinylm.load(runs[shape], dtype="fp32")
    ids = torch.tensor([model.encode(TEXT[-30:])])
    assert tokenizer(TEXT[-30:], add_special_tokens=False)["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        torch.testing.assert_close(peer(ids).logits, model.logits(ids), atol=1e-4, rtol=1e-4)
    assert tokenizer.decode(ids[0]) == TEXT[-30:]
    tinylm.import_model(tmp_path / "hf", tmp_path / "back")
    there, back = open_model(runs[shape]), open_model(tmp_path / "back")
    assert {**there.weights.tensors}.keys() == {**back.weights.tensors}.keys()
    assert all(torch.equal(tensor, back.weights.tensors[name]) for name, tensor in there.weights.tensors.items())
    assert back.tokenizer.encode(TEXT).tolist() == there.tokenizer.encode(TEXT).tolist()


@pytest.mark.parametrize("shape", ["modern", "modern, tied BPE"])
def test_a_model_and_its_exports_teach_one_student_since_their_tokenizers_give_the_same_ids(
    shape: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    """Their files differ: in the tokens that end a text, in steps without effect, in the notation."""
    run, folder, file = runs[shape], tmp_path / "hf", tmp_path / "run.gguf"
    for to, out in (("hf", folder), ("gguf", file)):
        tinylm.export_model(run, to=to, out=out)
    assert len({open_model(path).tokenizer.sha256 for path in (run, folder, file)}) == 3
    text, short = run.parent / "text.txt", {"batch_size": 4, "steps": 1}
    tinylm.train(text, tmp_path / "student", teacher=[folder, file, run], **{**TINY, **short})
    tinylm.train(text, tmp_path / "further", init_from=run, teacher=file, **short)


def test_an_export_has_the_chosen_dtype_and_reports_what_rounding_changes(run: Path, tmp_path: Path) -> None:
    exported = tinylm.export_model(run, to="hf", out=tmp_path / "hf", dtype="bf16")
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert {parameter.dtype for parameter in peer.parameters()} == {torch.bfloat16}
    model = tinylm.load(run, dtype="fp32")
    shape = (4, min(64, model.context))  # as `probe_logits` draws them
    ids = torch.randint(model.tokenizer.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        difference = (peer.float()(ids).logits - model.logits(ids)).abs().max().item()
    assert exported.difference == pytest.approx(difference, rel=0.05) and difference > 1e-4


def test_only_an_earlier_export_is_replaced_and_only_with_force(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    tinylm.export_model(run, to="hf", out=out)
    with pytest.raises(UsageError, match="force"):
        tinylm.export_model(run, to="hf", out=out)
    tinylm.export_model(run, to="hf", out=out, force=True)
    (other := tmp_path / "other").mkdir()
    (other / "letter.txt").write_text("mine")
    (tmp_path / "link").symlink_to(out)
    (out / "notes.md").write_text("mine")
    before = snapshot(tmp_path)
    for place in (other, run, tmp_path / "link", other / "letter.txt"):
        with pytest.raises(UsageError):
            tinylm.export_model(run, to="hf", out=place, force=True)
    with pytest.raises(UsageError, match=r"files that do not belong to an export \(notes\.md\)"):
        tinylm.export_model(run, to="hf", out=out, force=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_keeps_an_export(
    error: BaseException, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "hf"
    tinylm.export_model(run, to="hf", out=out)
    before = snapshot(tmp_path)
    rename = Path.rename

    def failing(source: Path, target: Path) -> Path:
        if target == out and source.name == "new":
            raise error
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(TinyLMError if isinstance(error, OSError) else KeyboardInterrupt):
        tinylm.export_model(run, to="hf", out=out, force=True)
    assert snapshot(tmp_path) == before


def test_a_gguf_file_and_its_modelfile_are_replaced_only_with_force(run: Path, tmp_path: Path) -> None:
    out, modelfile = tmp_path / "new" / "story.gguf", tmp_path / "new" / "story.Modelfile"
    tinylm.export_model(run, to="gguf", out=out)
    before = snapshot(tmp_path)
    with pytest.raises(UsageError, match=r"story\.gguf exists; .* replace it with `force`"):
        tinylm.export_model(run, to="gguf", out=out)
    assert snapshot(tmp_path) == before
    tinylm.export_model(run, to="gguf", out=out, force=True)
    assert snapshot(tmp_path) == before
    for file, other in ((modelfile, "FROM llama3\n"), (out, "a letter")):
        file.write_text(other)
        with pytest.raises(UsageError, match=f"{file.name} is not an earlier export"):
            tinylm.export_model(run, to="gguf", out=out, force=True)
        assert file.read_text() == other
        file.unlink()
    (tmp_path / "letter").write_text("mine")
    out.symlink_to(tmp_path / "letter")
    with pytest.raises(UsageError, match=r"story\.gguf is not an earlier export"):
        tinylm.export_model(run, to="gguf", out=out, force=True)
    assert (tmp_path / "letter").read_text() == "mine"


def test_an_infinite_export_is_not_kept(run: Path, tmp_path: Path) -> None:
    tinylm.export_model(run, to="hf", out=tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["model.norm.weight"].fill_(3e38)
    tensors["lm_head.weight"] *= 1000
    safetensors.torch.save_file(tensors, file)
    with pytest.raises(TinyLMError, match="logits of the model are not finite"):
        tinylm.export_model(tmp_path / "hf", to="hf", out=tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_an_export_with_a_changed_number_is_wrong(run: Path, tmp_path: Path) -> None:
    tinylm.export_model(run, to="hf", out=tmp_path / "hf")
    original, file = open_model(run), tmp_path / "hf" / "model.safetensors"
    exporting.check_export(original, open_model(tmp_path / "hf"), tmp_path / "hf")
    data = bytearray(file.read_bytes())
    data[-2] ^= 1  # of the last number
    file.write_bytes(data)
    with pytest.raises(TinyLMError, match="nothing was exported"):
        exporting.check_export(original, open_model(tmp_path / "hf"), tmp_path / "hf")


def test_the_commands_write_an_export_and_import_it(run: Path, tmp_path: Path) -> None:
    result = run_ok("export", run, "--to", "hf", "--out", tmp_path / "hf")
    assert result.stdout == f"{tmp_path / 'hf'}\n" and "Checked" in result.stderr
    result = run_ok("export", run, "--to", "gguf", "--out", tmp_path / "file.gguf")
    assert "Checked: the written tensors and tokens are the model's, up to the rounding of f16." in result.stderr
    result = run_ok("import", tmp_path / "hf", "--out", tmp_path / "back")
    assert result.stdout == f"{tmp_path / 'back'}\n" and "qwen3" in result.stderr
    options = ("--prompt", "the", "--max-tokens", 20, "--seed", 3)
    texts = {run_ok("sample", "--model", place, *options).stdout for place in (run, tmp_path / "hf", tmp_path / "back")}
    assert len(texts) == 1


def test_an_opened_run_keeps_its_weights_when_training_replaces_the_best(run: Path, tmp_path: Path) -> None:
    """So that an export is of one save."""
    path = shutil.copytree(run, tmp_path / "run")
    opened = open_model(path)
    before = {name: tensor.clone() for name, tensor in opened.weights.tensors.items()}
    improved = {name: tensor + 1 for name, tensor in before.items()}
    write_weights(path / "model.safetensors", improved, opened.config, 99, 0.5)
    assert all(torch.equal(opened.weights.tensors[name], tensor) for name, tensor in before.items())
    assert torch.equal(open_model(path).weights.tensors["embedding.weight"], improved["embedding.weight"])


def test_an_export_warns_if_its_tokenizer_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_peer("qwen2", tmp_path / "qwen2")
    exporting.export_model(tmp_path / "qwen2", to="hf", out=tmp_path / "hf")
    assert f'PreTrainedTokenizerFast.from_pretrained("{tmp_path / "hf"}")' in caplog.text
