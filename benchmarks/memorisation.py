"""Seconds and peak memory of the search for verbatim matches in a text of --megabytes.

    python benchmarks/memorisation.py
    python benchmarks/memorisation.py --documents 100000

The text is made of words drawn at random and written to a temporary folder, as one document or as JSONL. It is searched
for 200 texts of 500 characters, half of which are parts of it, as in `tinylm eval --memorisation --train-data`:
passages are drawn in a first pass, and matches are found in a second one. One thread, in this process, which loads no
model.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from pathlib import Path

from tinylm.memorisation import MemorisationConfig, corpus_documents, draw_passages, measure_copied
from tinylm.text.corpus import find_corpus

WORD_KINDS, WORDS_AT_ONCE = 50_000, 20_000
TEXTS, LENGTH = 100, 500


def write_text(path: Path, megabytes: int, documents: int) -> None:
    """Write random words, as documents of about equal length."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(WORD_KINDS)]
    size = megabytes * 10**6 // documents
    with path.open("w", encoding="ascii") as file:
        written = 0
        while written < megabytes * 10**6:
            text = " ".join(rng.choices(words, k=min(WORDS_AT_ONCE, size // 7 + 1))) + "\n"
            for at in range(0, len(text), size):
                part = text[at : at + size]
                written += file.write(part if documents == 1 else json.dumps({"text": part}) + "\n")


def megabytes_used() -> float:
    """Peak resident memory of this process so far, in MiB."""
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000, help="size of the text (default: 1000)")
    parser.add_argument("--documents", type=int, default=1, help="number of documents (default: 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("text.jsonl" if arguments.documents > 1 else "text.txt")
        write_text(path, arguments.megabytes, arguments.documents)
        before = megabytes_used()
        documents = corpus_documents(find_corpus([str(path)]))
        start = time.perf_counter()
        config = MemorisationConfig(num_samples=TEXTS, sample_length=LENGTH)
        passages = [passage.continuation for passage in draw_passages(documents, config)]
        drawn = time.perf_counter()
        reversed_texts = [passage[::-1] for passage in passages]
        result = measure_copied({"copied": passages, "other": reversed_texts}, documents, config.min_match)
        end = time.perf_counter()
    for source in result.sources:
        print(f"{source.source}: {100 * source.copied:.1f} % of {source.characters:,} characters")
    print(f"{arguments.megabytes:,} MB: passages {drawn - start:.1f} s, matches {end - drawn:.1f} s")
    print(f"peak memory: {megabytes_used():,.0f} MB, of which {before:,.0f} MB before the search")


if __name__ == "__main__":
    main()
