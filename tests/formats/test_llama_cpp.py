"""llama.cpp itself on GGUF files written here, and on those that other tests read. Run by name:

    LLAMA_CPP_PYTHON=/path/to/python pytest tests/formats/test_llama_cpp.py -m llamacpp -s

where that Python has llama-cpp-python, whose build takes minutes. Prints the largest difference of the logits.
"""

import json
import os
import random
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.formats.gguf_files import CASES, peer_metadata, peer_tensors, save_peer, write_file
from tests.formats.peers import load, make_peer
from tests.formats.test_gguf_tokenizer import EXAMPLES, WITH_NFC, bpe_metadata, encoder, sentencepiece_metadata
from tests.formats.test_gguf_writer import OWN, own_model
from tests.shell import story
from tinylm.formats.gguf_reader import read_gguf
from tinylm.formats.gguf_tokenizer import PRE_TOKENIZERS
from tinylm.formats.gguf_writer import write_gguf
from tinylm.model.decoder import Decoder
from tinylm.text.tokenizer import train_bpe, train_char

pytestmark = [pytest.mark.llamacpp, pytest.mark.timeout(600)]
PEER = Path(__file__).with_name("llama_cpp_peer.py")
PYTHON = os.environ.get("LLAMA_CPP_PYTHON", sys.executable)
TOLERANCE = 1e-3  # of logits, with weights and a cache of 32 bits
GELU = 1e-2  # of models with GELU, which llama.cpp looks up in a table of 16-bit numbers (GGML_GELU_FP16)
WITH_GELU = ("gpt2", "gpt_neox", "gemma")
GREEDY = 200
WORDS = (
    "the, cat,Hello,don't, I'LL,中文字符,，标点。,日本語テキスト,한국어,naïve,ß,Ωμέγα,👍🏽,🇫🇷,👩\u200d💻,"
    "\u200d,\x00,\x07,\x1b[0m,\t,\r\n,\n\n,  , ,\u00a0,\u3000,<|endoftext|>,<|im_start|>,<s>,</s>,[PAD0],"
    "<0x0A>,▁,Ġ,def f(x):\n    return x**2,{};,0,12,345,3.14,٣,½,!?,...,-->,'s,_x,\\,\""
)


class Answers(NamedTuple):
    """The results of llama.cpp: the ids of the texts, logits (T, V), and the ids it generated."""

    ids: list[list[int]]
    logits: np.ndarray
    greedy: list[int]


def texts() -> list[str]:
    """200 texts: Chinese, emoji, code, control characters, and text that looks like special tokens."""
    rng = random.Random(4)
    return ["".join(rng.choices(WORDS.split(","), k=rng.randint(1, 12))) for _ in range(200)]


def ask(model: Path, ids: list[int], *, texts: list[str], greedy: int = GREEDY) -> Answers:
    questions, answers = model.with_name("questions.json"), model.with_name("answers.npz")
    questions.write_text(json.dumps({"texts": texts, "ids": ids, "greedy": greedy}), encoding="utf-8")
    command = [PYTHON, str(PEER), str(model), str(questions), str(answers)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    with np.load(answers) as found:
        return Answers(json.loads(str(found["ids"])), found["logits"], found["greedy"].tolist())


@torch.no_grad()
def logits(model: Decoder, ids: list[int]) -> torch.Tensor:
    return model.logits(model(torch.tensor([ids])).hidden)[0]


def greedy(model: Decoder, ids: list[int], count: int = GREEDY) -> list[int]:
    ids = list(ids)
    for _ in range(count):
        ids.append(int(logits(model, ids)[-1].argmax()))
    return ids[-count:]


def compare(name: str, model: Decoder, ids: list[int], answers: Answers, tolerance: float) -> None:
    ours = logits(model, ids).numpy()
    difference = float(np.abs(ours - answers.logits).max())
    print(f"\n{name}: logits differ by at most {difference:.1e} (standard deviation {ours.std():.2f})")
    assert difference < tolerance
    assert (ours.argmax(-1) == answers.logits.argmax(-1)).all()


TOKENIZERS = {
    "characters": train_char("".join(dict.fromkeys("".join(texts())))),
    "bpe": train_bpe([story(5000), *texts()], 600),
}


@pytest.mark.parametrize("case", OWN)
def test_an_exported_model_has_equal_ids_logits_and_greedy_text(case: str, tmp_path: Path) -> None:
    for name, library in TOKENIZERS.items():
        model, exported = own_model(case, library, layers=3, context=256)
        write_gguf(tmp_path / "model.gguf", exported, "f32")
        ids = library.encode("the 中文 12\nHello 👍🏽").tolist()
        answers = ask(tmp_path / "model.gguf", ids, texts=texts())
        for text, found in zip(texts(), answers.ids, strict=True):
            assert found == library.encode(text).tolist(), repr(text)
        compare(f"{case}, {name}", model, ids, answers, GELU if case.startswith(WITH_GELU) else TOLERANCE)
        assert answers.greedy == greedy(model, ids)


@pytest.mark.parametrize("case", CASES)
def test_an_imported_model_has_equal_logits(case: str, tmp_path: Path) -> None:
    save_peer(case, tmp_path / "model.gguf")
    ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    answers = ask(tmp_path / "model.gguf", ids, texts=[], greedy=0)
    tolerance = GELU if case.startswith(WITH_GELU) else TOLERANCE
    compare(case, load(read_gguf(tmp_path / "model.gguf")), ids, answers, tolerance)


def test_imported_tokenizers_have_equal_ids(tmp_path: Path) -> None:
    for kind in (*PRE_TOKENIZERS, "SentencePiece", "SentencePiece without a prefix"):
        prefix = kind == "SentencePiece"
        values = bpe_metadata(kind) if kind in PRE_TOKENIZERS else sentencepiece_metadata(prefix=prefix)
        peer = make_peer("qwen2")
        peer.resize_token_embeddings(len(values["tokenizer.ggml.tokens"]))
        metadata = {name: value for name, value in peer_metadata("qwen2", peer).items() if name.startswith("qwen2.")}
        write_file(tmp_path / "model.gguf", "qwen2", metadata | values, dict(peer_tensors("qwen2", peer)))
        samples = [unicodedata.normalize("NFC", text) if kind in WITH_NFC else text for text in [*EXAMPLES, *texts()]]
        answers = ask(tmp_path / "model.gguf", [0], texts=samples, greedy=0)
        encode = encoder(read_gguf(tmp_path / "model.gguf").tokenizer)
        for text, found in zip(samples, answers.ids, strict=True):
            assert encode(text) == found, f"{kind}: {text!r}"


def test_a_model_in_8_bits_has_close_logits(tmp_path: Path) -> None:
    """llama.cpp quantizes the activations, too, so that its logits are not those of the dequantized weights."""
    library = TOKENIZERS["bpe"]
    _, exported = own_model("modern", library, layers=3, context=256)
    write_gguf(tmp_path / "model.gguf", exported, "q8_0")
    ids = library.encode("the 中文 12\nHello 👍🏽").tolist()
    answers = ask(tmp_path / "model.gguf", ids, texts=[], greedy=0)
    ours = logits(load(read_gguf(tmp_path / "model.gguf")), ids).numpy()
    error = float(np.sqrt(np.square(ours - answers.logits).mean()))
    print(f"\nq8_0: logits differ by {error:.1e} (root mean square; standard deviation {ours.std():.2f})")
    assert error < 0.05 * ours.std()
