"""A double of llama_cpp: the functions that tinylm calls, computed by torch from the GGUF file without any cache.

It rejects what llama.cpp would reject: positions that do not continue a sequence, and more tokens than the context has.
"""

import ctypes
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import torch

from tinylm.errors import TinyLMError
from tinylm.formats.gguf_reader import read_gguf
from tinylm.model.build import build_empty_model


class LlamaCppDouble:
    """opened: the files of the models. contexts: the options of each context."""

    LLAMA_FLASH_ATTN_TYPE_AUTO, LLAMA_FLASH_ATTN_TYPE_DISABLED = -1, 0
    llama_token = ctypes.c_int32

    def __init__(self) -> None:
        self.opened: list[Path] = []
        self.contexts: list[SimpleNamespace] = []

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_model_load_from_file(self, path: bytes, options: SimpleNamespace) -> Any:
        file = Path(os.fsdecode(path))
        try:
            foreign = read_gguf(file)
        except TinyLMError:
            return None
        self.opened.append(file)
        network = build_empty_model(foreign.config)
        network.load_state_dict({name: tensor.float() for name, tensor in foreign.tensors.items()}, assign=True)
        return network.eval()

    def llama_model_size(self, model: Any) -> int:
        """In bytes."""
        return int(sum(tensor.n_bytes for tensor in gguf.GGUFReader(self.opened[-1]).tensors))

    def llama_model_n_params(self, model: Any) -> int:
        return int(sum(tensor.n_elements for tensor in gguf.GGUFReader(self.opened[-1]).tensors))

    def llama_model_free(self, model: Any) -> None:
        pass

    def llama_model_get_vocab(self, model: Any) -> Any:
        return model

    def llama_vocab_n_tokens(self, vocabulary: Any) -> int:
        return vocabulary.vocab_size

    def llama_context_default_params(self) -> SimpleNamespace:
        return SimpleNamespace(flash_attn_type=self.LLAMA_FLASH_ATTN_TYPE_AUTO)

    def llama_init_from_model(self, model: Any, options: SimpleNamespace) -> Any:
        assert options.n_ctx % options.n_seq_max == 0 and options.n_ubatch <= options.n_batch
        self.contexts.append(options)
        texts: list[list[int]] = [[] for _ in range(options.n_seq_max)]
        return SimpleNamespace(model=model, texts=texts, slots=options.n_ctx // options.n_seq_max, logits=None)

    def llama_free(self, context: Any) -> None:
        pass

    def llama_get_memory(self, context: Any) -> Any:
        return context

    def llama_memory_seq_rm(self, memory: Any, sequence: int, start: int, end: int) -> bool:
        assert end == -1
        del memory.texts[sequence][start:]
        return True

    def llama_memory_seq_cp(self, memory: Any, source: int, target: int, start: int, end: int) -> None:
        assert (start, end) == (-1, -1) and not memory.texts[target]
        memory.texts[target] = [*memory.texts[source]]

    def llama_batch_init(self, tokens: int, embedding: int, sequences: int) -> Any:
        def pointer(kind: Any) -> Any:
            return ctypes.cast((kind * tokens)(), ctypes.POINTER(kind))

        return SimpleNamespace(
            n_tokens=0,
            token=pointer(ctypes.c_int32),
            pos=pointer(ctypes.c_int32),
            logits=pointer(ctypes.c_int8),
            n_seq_id=pointer(ctypes.c_int32),
            seq_id=[[0] * sequences for _ in range(tokens)],
        )

    def llama_batch_get_one(self, tokens: Any, count: int) -> Any:
        """Tokens that continue the first sequence."""
        return SimpleNamespace(
            n_tokens=count, token=tokens, pos=None, logits=[0] * (count - 1) + [1], seq_id=[[0]] * count
        )

    def llama_batch_free(self, batch: Any) -> None:
        pass

    def llama_set_n_threads(self, context: Any, threads: int, batch_threads: int) -> None:
        pass

    def llama_decode(self, context: Any, batch: Any) -> int:
        scored = []
        for index in range(batch.n_tokens):
            text = context.texts[batch.seq_id[index][0]]
            if (batch.pos and batch.pos[index] != len(text)) or len(text) == context.slots:
                return -1
            text.append(batch.token[index])
            if batch.logits[index]:
                with torch.inference_mode():
                    scored.append(context.model.logits(context.model(torch.tensor([text])).hidden)[0, -1])
        context.logits = torch.stack(scored).numpy()
        return 0

    def llama_get_logits(self, context: Any) -> Any:
        return context.logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
