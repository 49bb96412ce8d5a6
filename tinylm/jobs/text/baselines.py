"""Baselines without a neural network: bits per byte of gzip, xz and PPMd."""

import gzip
import lzma

import numpy as np

from tinylm.reporter import Reporter
from tinylm.system.process_signals import interruptible
from tinylm.text.token_files import Tokens
from tinylm.text.tokenizer import Tokenizer

SECONDS_PER_BYTE = 0.7e-6  # on one core, of the texts together
MAX_BYTES = 5_000_000  # of each text
PPMD_ORDER = 6  # longest history, in bytes; that of 7z by default
PPMD_MEMORY_PER_BYTE = 32  # of the texts; with less than 16, the model of random text begins anew
PPMD_MIN_MEMORY = 1 << 20
MIN_DICTIONARY = 4096  # of xz, in bytes


def baseline_bits_per_byte(
    tokenizer: Tokenizer, tokens: np.ndarray, training: Tokens | None, reporter: Reporter
) -> dict[str, float]:
    """Bits per byte of the text `tokens` (N,) under each baseline, by name.

    training: tokens (M,) of the text that PPMd has read before; `None` leaves PPMd out.

    Empty for tokens that encode no text, and without a compressor that makes the text larger, as all do with the
    shortest. Only the first 5 MB of each text are used.
    """

    def beginning(ids: Tokens) -> str:
        # Every token encodes at least one byte, except special tokens, which are few.
        return tokenizer.decode(np.asarray(ids[:MAX_BYTES])).encode()[:MAX_BYTES].decode("utf-8", "ignore")

    def scores() -> dict[str, float]:
        text = beginning(tokens)
        if not text:  # special tokens only
            return {}
        found = compression_bits_per_byte(text)
        if training is not None:
            found["PPMd"] = ppmd_bits_per_byte(beginning(training), text)
        return {name: bits for name, bits in found.items() if bits < 8}

    if tokenizer.decoded_size(tokens)[1] > MAX_BYTES:
        reporter.note(f"The baselines use the first {MAX_BYTES // 10**6} MB.")
    return interruptible(scores)  # xz takes five seconds for 5 MB


def compression_bits_per_byte(text: str) -> dict[str, float]:
    """Bits per byte of the text under gzip -9 and xz -9, by name."""
    data = text.encode()
    dictionary = max(MIN_DICTIONARY, len(data))  # xz -9 allocates 674 MiB for a dictionary of 64 MiB
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    return {
        "gzip": 8 * len(gzip.compress(data, 9, mtime=0)) / len(data),
        "xz": 8 * len(lzma.compress(data, filters=filters)) / len(data),
    }


def ppmd_bits_per_byte(training_text: str, text: str) -> float:
    """Bits per byte of `text` under PPMd (Shkarin 2002, variant H), a byte model of order 6 that adapts to the training
    text and then, while it scores, to the text.

    8 * (size of training_text + text - size of training_text) / bytes of text, with the sizes compressed and in bytes.
    """
    import pyppmd  # takes 10 ms, and every command that opens a model imports this module

    training, data = training_text.encode(), text.encode()
    memory = max(PPMD_MIN_MEMORY, PPMD_MEMORY_PER_BYTE * (len(training) + len(data)))

    def compressed_size(content: bytes) -> int:
        encoder = pyppmd.Ppmd7Encoder(PPMD_ORDER, memory)
        return len(encoder.encode(content)) + len(encoder.flush())

    return 8 * (compressed_size(training + data) - compressed_size(training)) / len(data)
