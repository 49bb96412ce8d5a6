"""Results of llama.cpp for a GGUF file, for test_llama_cpp.py. Needs llama-cpp-python and numpy, and nothing of tinylm.

    python llama_cpp_peer.py MODEL.gguf QUESTIONS.json ANSWERS.npz

QUESTIONS: `texts` to encode, `ids` to compute logits for, and `greedy`, the number of tokens to generate after them.
ANSWERS: `ids` (JSON, of each text), `logits` of `ids`, (number of ids, vocabulary) and `greedy`, the generated ids.
"""

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama

FLOAT32 = 0  # GGML_TYPE_F32, for keys and values in the cache


def main() -> None:
    model, questions_file, answers_file = sys.argv[1:]
    questions = json.loads(Path(questions_file).read_text(encoding="utf-8"))
    ids = questions["ids"]
    llama = Llama(
        model,
        n_ctx=len(ids) + questions["greedy"],
        n_batch=512,
        n_threads=2,
        logits_all=True,
        type_k=FLOAT32,
        type_v=FLOAT32,
        flash_attn=False,
        verbose=False,
    )
    texts = [llama.tokenize(text.encode("utf-8"), add_bos=False, special=False) for text in questions["texts"]]
    llama.eval(ids)
    logits = np.array(llama.scores[: len(ids)], dtype=np.float32)
    greedy: list[int] = []
    for position in range(len(ids) - 1, len(ids) + questions["greedy"] - 1):
        greedy.append(int(llama.scores[position].argmax()))
        llama.eval(greedy[-1:])
    np.savez(answers_file, ids=json.dumps(texts), logits=logits, greedy=np.array(greedy, dtype=np.int64))


main()
