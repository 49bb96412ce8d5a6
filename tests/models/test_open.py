"""Models of other tools in every function that takes a model: they give the results of their own library."""

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers

import tinylm
from tests.formats.peers import EOS, SMALL, VOCABULARY, in_hub, save_peer, save_tokenizer
from tests.published import published
from tests.shell import story
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.text_generator import ChatSession
from tinylm.models.importing import import_model
from tinylm.models.open import open_model
from tinylm.reporter import LogReporter
from tinylm.run_directory.loading import read_config

TEXT = story(3000)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A Llama of transformers and its folder."""
    folder = tmp_path_factory.mktemp("foreign") / "llama"
    return save_peer("llama", folder), folder


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The weights in bf16, and the peer that computes with them in fp32."""
    folder = tmp_path_factory.mktemp("foreign") / "llama16"
    save_peer("llama", folder).to(torch.bfloat16).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), folder


@torch.no_grad()
def greedy(peer: Any, ids: list[int], count: int, vocab_size: int = VOCABULARY - 8) -> list[int]:
    """The ids and their greedy continuation by the peer's logits, without the padding rows of its embedding."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(peer(torch.tensor([ids[-64:]])).logits[0, -1, :vocab_size].argmax()))
    return ids


def test_a_folder_is_loaded_by_path_with_the_text_and_the_loss_of_the_peer(saved: tuple[Any, Path]) -> None:
    peer, folder = saved
    model = tinylm.load(folder, dtype="fp32")
    ids = [0, *model.encode("Once upon")]  # the prompt begins with <s>
    expected = itertools.takewhile(lambda i: i != 1, greedy(peer, ids, 30)[len(ids) :])
    assert model.generate("Once upon", max_tokens=30, temperature=0) == model.decode(expected)
    ids = torch.tensor([[0, *model.encode(TEXT[:100])]])[:, :65]
    text = model.decode(ids[0, 1:].tolist())
    with torch.no_grad():
        logits = peer(ids[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits[0].double(), ids[0, 1:]).item()
    result = model.evaluate(text=text)
    assert result.loss == pytest.approx(expected, rel=1e-5)


def test_text_continues_the_prompt_with_a_decoder_that_strips_the_first_space(tmp_path: Path) -> None:
    file = json.dumps(published()["llama2"])
    library = tokenizers.Tokenizer.from_str(file)
    library.encode_special_tokens = True
    torch.manual_seed(3)
    size = library.get_vocab_size()
    peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, "vocab_size": size})).eval()
    peer.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama/tokenizer.json").write_text(file)
    edit = {"bos_token": "<bos>", "eos_token": "<unk>", "chat_template": "{{ messages[0].content }}"}
    (tmp_path / "llama/tokenizer_config.json").write_text(json.dumps(edit))
    model = tinylm.load(tmp_path / "llama")
    texts = []
    for prompt in ("the cat's hat", "the dog's log", "they'll", "say", "we've", "of them,", "don't", "they", ""):
        ids = library.encode(prompt).ids or [1]  # begins with <bos>
        following = itertools.takewhile(lambda i: i > 0, greedy(peer, ids, 12, size)[len(ids) :])
        expected = library.decode([*ids, *following])[len(library.decode(ids)) :]
        assert model.generate(prompt, max_tokens=12, temperature=0) == expected
        assert "".join(model.generate(prompt, max_tokens=12, temperature=0, stream=True)) == expected
        texts.append(expected)
    assert any(text.startswith(" ") for text in texts)
    config = GenerationConfig(max_tokens=40, temperature=0)
    ids = library.encode("the cat", add_special_tokens=False).ids
    following = itertools.takewhile(lambda i: i > 0, greedy(peer, ids, 40, size)[len(ids) :])
    expected = library.decode([*ids, *following])[len(library.decode(ids)) :]
    assert "".join(ChatSession(model, model.chat_format(), config).ask("the cat")) == expected


def test_an_imported_run_has_the_same_tensors_and_the_same_digest(halved: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = halved
    reporter = LogReporter()
    imported = import_model(folder, tmp_path / "run", reporter=reporter)
    assert imported.family == "llama"
    original, run = open_model(folder), open_model(imported.run)
    assert original.weights.digest == run.weights.digest
    for name, tensor in original.weights.tensors.items():
        assert torch.equal(tensor, run.weights.tensors[name]) and tensor.dtype == run.weights.tensors[name].dtype
    assert run.tokenizer.special == original.tokenizer.special and run.tokenizer.bos_id == 0
    assert run.config.tokenizer.chat_template == original.config.tokenizer.chat_template
    assert EOS in run.tokenizer.special.eos
    with pytest.raises(UsageError):
        import_model(folder, tmp_path / "run", reporter=reporter)
    with pytest.raises(UsageError, match="no import"):
        import_model(tmp_path / "run", tmp_path / "other", reporter=reporter)


def test_a_wrong_import_is_not_kept(halved: tuple[Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = safetensors.torch.save_file

    def damage(tensors: Any, path: Path, *arguments: Any) -> None:
        write(tensors, path, *arguments)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    monkeypatch.setattr(safetensors.torch, "save_file", damage)
    with pytest.raises(TinyLMError, match="its content does not match its digest"):
        import_model(halved[1], tmp_path / "run", reporter=LogReporter())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("named", "expected"), [("hf:someone/Some-Model@main", "Some-Model"), ("llama-7b", "llama-7b"), (".", "llama-7b")]
)
def test_an_adapter_has_the_name_of_its_foreign_base(
    named: str,
    expected: str,
    saved: tuple[Any, Path],
    offline_hub: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached = in_hub(offline_hub, saved[1], "someone/Some-Model")
    model = cached if "hf" in named else shutil.copytree(saved[1], tmp_path / "cache/llama-7b")
    monkeypatch.chdir(model if named == "." else model.parent)
    (tmp_path / "corpus.txt").write_text(TEXT * 3)
    trained = tinylm.finetune_lora(tmp_path / "corpus.txt", model=named, steps=1)
    assert trained.run == Path("checkpoints") / f"{expected}-lora"
    assert {path.name for path in model.parent.iterdir()} <= {model.name, "checkpoints"}


def test_a_model_of_the_hub_is_reported_and_its_adapter_is_resumed(
    saved: tuple[Any, Path], offline_hub: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_hub(offline_hub, saved[1], "someone/Some-Model")
    with caplog.at_level(logging.INFO, "tinylm"):
        import_model("hf:someone/Some-Model", tmp_path / "run", reporter=LogReporter())
    note = "Using hf:someone/Some-Model from the cache of the Hugging Face hub, or downloading it."
    assert note in [record.message for record in caplog.records]
    (tmp_path / "corpus.txt").write_text(TEXT * 3)
    options: dict[str, Any] = {"batch_size": 2, "eval_every": 1, "sequence_length": 8}
    run = tinylm.finetune_lora(tmp_path / "corpus.txt", "hf:someone/Some-Model", tmp_path / "lora", steps=1, **options)
    assert tinylm.finetune_lora(model="hf:someone/Some-Model", resume=run.run, steps=2).step == 2


@pytest.mark.usefixtures("offline_hub")
def test_settings_are_checked_before_a_model_of_the_hub_is_downloaded() -> None:
    """The download would fail with another error."""
    wrong: tuple[dict[str, Any], ...] = ({"dtype": "fp61"}, {"quantize": "int7"}, {"device": "tpu"})
    for settings in wrong:
        with pytest.raises(UsageError, match=next(iter(settings))):
            tinylm.load("hf:someone/Some-Model", **settings)


def test_a_base_with_a_long_context_is_trained_on_shorter_sequences(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **{**SMALL, "max_position_embeddings": 4096})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "long")
    save_tokenizer(tmp_path / "long")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(TEXT * 3)
    options: dict[str, Any] = {"model": tmp_path / "long", "steps": 1, "batch_size": 2, "eval_every": 1}
    trained = tinylm.finetune_lora(corpus, out=tmp_path / "lora", **options)
    config_of_run = read_config(trained.run)
    assert config_of_run.training.sequence_length == 512
    assert config_of_run.model.context == 4096
    assert tinylm.load(tmp_path / "long", adapters=[trained.run]).context == 4096
    own = tinylm.finetune_lora(corpus, out=tmp_path / "own", sequence_length=20, **options)
    assert own.epochs == pytest.approx(trained.epochs * 20 / 512)
    with pytest.raises(UsageError, match="sequence_length"):
        tinylm.finetune_lora(corpus, out=tmp_path / "too", sequence_length=5000, **options)
    with pytest.raises(UsageError, match="set `context`"):
        tinylm.train(corpus, out=tmp_path / "new", sequence_length=20, steps=1)
