"""llama.cpp itself on GGUF files written here, and on those that other tests read."""

import random
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.formats.gguf_files import CASES, peer_metadata, peer_tensors, save_peer, write_file
from tests.formats.llama_cpp_peer import LlamaCppPeer
from tests.formats.peers import load, make_peer
from tests.formats.test_gguf_tokenizer import EXAMPLES, WITH_NFC, bpe_metadata, encoder, sentencepiece_metadata
from tests.formats.test_gguf_writer import OWN, own_model
from tests.shell import story
from tinylm.formats.gguf_model import read_gguf, write_gguf
from tinylm.formats.gguf_tokenizer import PRE_TOKENIZERS
from tinylm.text.tokenizer import train_bpe, train_char
from tinylm.transformer.architectures import Decoder

TOLERANCE = 2e-3  # of log-probabilities, with weights and a cache of 32 bits
GELU = 2e-2  # of models with GELU, which llama.cpp looks up in a table of 16-bit numbers (GGML_GELU_FP16)
WITH_GELU = ("gpt2", "gpt_neox", "gemma")
CONTEXT, GREEDY = 256, 200
WORDS = (
    "the, cat,Hello,don't, I'LL,中文字符,，标点。,日本語テキスト,한국어,naïve,ß,Ωμέγα,👍🏽,🇫🇷,👩\u200d💻,"
    "\u200d,\x07,\x1b[0m,\t,\r\n,\n\n,  , ,\u00a0,\u3000,<|endoftext|>,<|im_start|>,<s>,</s>,[PAD0],"
    "<0x0A>,▁,Ġ,def f(x):\n    return x**2,{};,0,12,345,3.14,٣,½,!?,...,-->,'s,_x,\\,\""
)


def texts() -> list[str]:
    """200 texts: Chinese, emoji, code, control characters, and text that looks like special tokens."""
    rng = random.Random(4)
    return ["".join(rng.choices(WORDS.split(","), k=rng.randint(1, 12))) for _ in range(200)]


def assert_close(expected: np.ndarray, found: np.ndarray, tolerance: float) -> None:
    """Log-probabilities (V,). Small ones differ more, since llama.cpp computes probabilities in 32 bits."""
    likely = expected > -20
    assert float(np.abs(expected - found)[likely].max()) < tolerance


@torch.no_grad()
def assert_same_text(name: str, model: Decoder, ids: list[int], peer: LlamaCppPeer, count: int) -> None:
    """llama.cpp's likeliest tokens are also the model's, unless two are as close as the tolerance (a near-tie)."""
    tolerance = GELU if name.startswith(WITH_GELU) else TOLERANCE
    found, step, scores = peer.greedy(ids, count, model.vocab_size)
    hidden = model(torch.tensor([ids + found[:-1]])).hidden[0, len(ids) - 1 :]
    expected = model.logits(hidden).double().log_softmax(-1).numpy()  # (steps, V)
    assert_close(expected[step], scores, tolerance)
    chosen = expected[np.arange(len(found)), found]
    assert (expected.max(-1) - chosen < tolerance).all(), name


TOKENIZERS = {
    "characters": train_char("".join(dict.fromkeys("".join(texts())))),
    "bpe": train_bpe([story(5000), *texts()], 600),
}


@pytest.mark.parametrize("case", OWN)
def test_an_exported_model_has_equal_ids_and_the_same_greedy_text_with_equal_probabilities(
    case: str, tmp_path: Path
) -> None:
    for number, (name, library) in enumerate(TOKENIZERS.items()):
        model, exported = own_model(case, library, layers=3, context=CONTEXT)
        write_gguf(tmp_path / f"{number}.gguf", exported, "f32")
        peer = LlamaCppPeer(tmp_path / f"{number}.gguf")
        for text in texts() if case == "modern" else texts()[:20]:
            assert peer.tokens(text) == library.encode(text).tolist(), repr(text)
        ids = library.encode("the 中文 12\nHello 👍🏽").tolist()
        assert_same_text(f"{case}, {name}", model, ids, peer, GREEDY)


@pytest.mark.parametrize("case", CASES)
def test_an_imported_model_has_the_same_greedy_text_with_equal_probabilities(case: str, tmp_path: Path) -> None:
    save_peer(case, tmp_path / "model.gguf")
    ids = torch.randint(256, (20,), generator=torch.Generator().manual_seed(2)).tolist()
    model = load(read_gguf(tmp_path / "model.gguf"))
    assert_same_text(case, model, ids, LlamaCppPeer(tmp_path / "model.gguf"), 20)


@pytest.mark.parametrize("kind", [*PRE_TOKENIZERS, "SentencePiece", "SentencePiece without a prefix"])
def test_imported_tokenizers_have_equal_ids(kind: str, tmp_path: Path) -> None:
    values = bpe_metadata(kind) if kind in PRE_TOKENIZERS else sentencepiece_metadata(prefix=kind == "SentencePiece")
    model = make_peer("qwen2")
    model.resize_token_embeddings(len(values["tokenizer.ggml.tokens"]))
    metadata = {name: value for name, value in peer_metadata("qwen2", model).items() if name.startswith("qwen2.")}
    write_file(tmp_path / "model.gguf", "qwen2", metadata | values, dict(peer_tensors("qwen2", model)))
    peer, encode = LlamaCppPeer(tmp_path / "model.gguf"), encoder(read_gguf(tmp_path / "model.gguf").tokenizer)
    for text in [*EXAMPLES, *texts()]:
        sample = unicodedata.normalize("NFC", text) if kind in WITH_NFC else text
        assert encode(sample) == peer.tokens(sample), repr(sample)


@torch.no_grad()
def test_a_model_in_8_bits_has_close_probabilities(tmp_path: Path) -> None:
    """llama.cpp quantizes the activations, too, so that its logits are not those of the dequantized weights."""
    library = TOKENIZERS["bpe"]
    _, exported = own_model("modern", library, layers=3, context=CONTEXT)
    write_gguf(tmp_path / "model.gguf", exported, "q8_0")
    ids = library.encode("the 中文 12\nHello 👍🏽").tolist()
    model = load(read_gguf(tmp_path / "model.gguf"))
    found, step, scores = LlamaCppPeer(tmp_path / "model.gguf").greedy(ids, 9, model.vocab_size)
    expected = model.logits(model(torch.tensor([ids + found[:step]])).hidden)[0, -1].double().log_softmax(-1).numpy()
    assert_close(expected, scores, 0.1 * expected.std())
