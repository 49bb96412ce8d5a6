"""llama.cpp itself as a peer, by the package xllamacpp: its tokens of a text, and the text it generates."""

import http.client
import json
import signal
import socket
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp


class LlamaCppPeer:
    """A server of llama.cpp for a GGUF file, with 32-bit keys and values."""

    def __init__(self, model: Path, context: int = 256) -> None:
        self.path = str(Path(tempfile.mkdtemp(), "llama.sock"))
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(model)
        parameters.hostnames = [self.path]
        parameters.n_ctx, parameters.n_parallel, parameters.verbosity = context, 1, -1
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1
        parameters.fit_params = parameters.warmup = parameters.ui = False
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.server = xllamacpp.Server(parameters)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.post("/completion", {"prompt": [0], "n_predict": 1})  # a server whose loop has not begun yet never ends

    def post(self, path: str, request: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("localhost", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self.path)
        connection.request("POST", path, json.dumps(request))
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert "error" not in answer, answer
        return answer

    def tokens(self, text: str) -> list[int]:
        """The ids of a text without special tokens."""
        request = {"content": text, "add_special": False, "parse_special": False}
        return list(self.post("/tokenize", request)["tokens"])

    def greedy(self, ids: list[int], count: int, vocab_size: int) -> tuple[list[int], int, np.ndarray]:
        """The likeliest ids one after another, at most `count`; the first step that completes a character, since
        llama.cpp gives no probabilities for others; and the log-probabilities (V,) of all ids at this step.
        """
        settings = {"temperature": 0.0, "samplers": ["temperature"], "return_tokens": True}
        generated = self.post("/completion", {"prompt": ids, "n_predict": count} | settings)["tokens"]
        for step in range(len(generated)):
            request = {"prompt": ids + generated[:step], "n_predict": 1, "n_probs": vocab_size}
            if found := self.post("/completion", request | settings).get("completion_probabilities"):
                break
        scores = np.full(vocab_size, np.nan)
        for candidate in found[0]["top_logprobs"]:
            scores[candidate["id"]] = candidate["logprob"]
        return generated, step, scores
