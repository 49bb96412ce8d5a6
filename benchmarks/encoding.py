"""MB/s of encoding a corpus: tinylm and the `tokenizers` library, with characters and byte-level BPE.

    python benchmarks/encoding.py tinyshakespeare.txt

The text is kept in memory and repeated up to --megabytes. The ids of both for its beginning are compared first. The
library encodes the text as one string, and as a batch of chunks of 64 KB on all cores, whose ids may differ at the ends
of chunks. tinylm's BPE caches words, so each measurement starts with an empty cache; a repeated text still favours it,
and a text that is as long as --megabytes avoids this. tinylm encodes chunks of 2^20 characters: in sequence on one
core, and as a run does, the first 2^25 characters in threads (of which BPE occupies one core) and the rest in
processes. All take turns; ratios are relative to the faster variant of the library.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from measure import describe_machine, speedup, table, take_turns

from tinylm.text.token_files import encode_stream
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

LIBRARY_CHUNK = 1 << 16  # characters
TINYLM_CHUNK = 1 << 20  # characters, as when a corpus is read from disk


def contestants(text: str, tokenizer: Tokenizer) -> dict[str, Callable[[], object]]:
    """The encoders by name. Raises AssertionError if the ids of tinylm and the library differ in the first 2^22
    characters.
    """
    library = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    library.encode_special_tokens = True
    chunks = [text[start : start + TINYLM_CHUNK] for start in range(0, len(text), TINYLM_CHUNK)]
    library_chunks = [text[start : start + LIBRARY_CHUNK] for start in range(0, len(text), LIBRARY_CHUNK)]
    sample = text[: 4 * TINYLM_CHUNK]
    assert np.array_equal(encode_stream(iter([sample]), tokenizer), library.encode(sample).ids)

    def without_cached_words() -> Tokenizer:
        return Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_str()))

    def on_one_core() -> None:
        encoder = without_cached_words()
        for chunk in chunks:
            encoder.encode(chunk)

    return {
        "tokenizers, one string": lambda: library.encode(text),
        "tokenizers, chunks of 64 KB": lambda: library.encode_batch_fast(library_chunks),
        "tinylm, one core": on_one_core,
        "tinylm": lambda: encode_stream(iter(chunks), without_cached_words()),
    }


def rows(text: str, name: str, tokenizer: Tokenizer, rounds: int) -> list[list[str]]:
    """The rows of the table for a tokenizer with this name."""
    times = take_turns(contestants(text, tokenizer), rounds)
    variants = [name for name in times if name.startswith("tokenizers")]
    library = min(variants, key=lambda name: statistics.median(times[name]))
    megabytes = len(text.encode()) / 1e6
    return [
        [
            name,
            encoder,
            f"{megabytes / statistics.median(seconds):.1f}",
            "1" if encoder == library else str(speedup(times, encoder, library)),
        ]
        for encoder, seconds in times.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--megabytes", type=float, default=20, help="default: 20")
    parser.add_argument("--vocab-size", type=int, default=4096, help="vocabulary size of the BPE (default: 4096)")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    options = parser.parse_args(arguments)
    original = options.text.read_text(encoding="utf-8")
    text = original * max(1, round(options.megabytes * 1e6 / len(original.encode())))
    char, bpe = train_char("".join(sorted(set(original)))), train_bpe([original], options.vocab_size)
    measured = rows(text, "characters", char, options.rounds)
    measured += rows(text, f"BPE, {bpe.vocab_size:,} ids", bpe, options.rounds)
    print(f"{describe_machine(['tokenizers', 'gigatoken', 'numpy'])}; {os.cpu_count()} workers\n")
    print(table(["tokens", "encoder", "MB/s", "times tokenizers"], measured))


if __name__ == "__main__":
    main()
