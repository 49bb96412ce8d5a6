"""Choose the tokenizer of a new model: train one on the training text, or load a tokenizer.json."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tinylm.errors import UsageError, concerning
from tinylm.reporter import Reporter, SilentReporter
from tinylm.system.files import resolve_links
from tinylm.text.corpus import Stream, rechunk
from tinylm.text.split import SplitCorpus
from tinylm.text.text_cache import train_or_recall
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, train_bpe, train_char

TRAINED = ("auto", "char", "bpe")  # choices of a tokenizer that is trained on the text
# Limits up to which `tokenizer="auto"` chooses a character tokenizer (decision 016).
MAX_CHAR_ALPHABET = 256  # distinct characters
MAX_CHAR_TEXT = 150_000  # characters
MAX_TINY_ALPHABET = 16  # characters other than white space, as in DNA or hexadecimal; such a text may have any length
# Default BPE vocabulary sizes by length of the text: (characters up to which it applies, size), decision 016.
VOCAB_SIZES = ((400_000, 512), (2_000_000, 1024), (3_000_000, 2048), (10_000_000, 4096), (100_000_000, 8192))
LARGEST_VOCAB_SIZE = 16_384  # for longer texts
SAMPLE_SEED = 0  # for the random choice of chunks of a longer text
BPE_SAMPLE = 1 << 23  # characters to train BPE on, to bound memory: one million distinct words take 1 GB
# With a time budget, the trainer takes at most a tenth of it: 0.2 million characters per second if every word is new,
# as in DNA or base64, and 1.3 million in source code.
SAMPLE_PER_SECOND = 20_000  # characters
MIN_BPE_SAMPLE = 1 << 18
MAX_SAMPLE_CHUNK = 1 << 16  # characters that are chosen together


def choose_tokenizer(
    split: SplitCorpus,
    tokenizer: str,
    vocab_size: int | None,
    seconds: float | None = None,
    reporter: Reporter = SilentReporter(),  # noqa: B008, has no state
    train_bpe: Callable[..., Tokenizer] = train_bpe,
) -> Tokenizer:
    """Train or load a tokenizer: "auto", "char", "bpe", or the path of a tokenizer.json.

    A character tokenizer has the characters of the training and the validation text; BPE is trained on the training
    text alone. A loaded tokenizer may have no ids for some characters of the text (see `require_known_characters`). A
    tokenizer trained on conversations has the special tokens of their chat template. `seconds` is the time budget of
    the run, which limits the text that BPE is trained on.

    Raises UsageError for contradictory settings, a `vocab_size` that is too small and a missing file, and TinyLMError
    for a file that is not a tokenizer.
    """
    languages = split.corpus.languages
    if tokenizer == "auto":
        small = len(split.alphabet) <= MAX_CHAR_ALPHABET and split.stats.characters <= MAX_CHAR_TEXT
        small |= len("".join(split.alphabet.split())) <= MAX_TINY_ALPHABET
        # Several languages always get BPE, which makes their sequences short.
        tokenizer = "char" if small and languages == 1 and vocab_size is None else "bpe"
    if vocab_size is not None and tokenizer != "bpe":
        raise UsageError(f"`vocab_size` is for BPE, and the tokenizer is {tokenizer!r}; leave `vocab_size` out.")
    chat = split.corpus.rendering
    special = tuple(token for token in ([] if chat is None else chat.special_tokens) if token != END_OF_TEXT)
    if tokenizer == "char":
        return train_char(split.alphabet, special)
    if tokenizer == "bpe":
        sizes = (size for limit, size in VOCAB_SIZES if split.stats.characters <= limit)
        size = languages * next(sizes, LARGEST_VOCAB_SIZE) if vocab_size is None else vocab_size
        limit = BPE_SAMPLE
        if seconds is not None:
            limit = min(limit, max(MIN_BPE_SAMPLE, int(seconds * SAMPLE_PER_SECOND)))

        def train() -> Tokenizer:
            sample = sample_for_tokenizer(split.stream("train"), split.train_characters, limit)
            with reporter.counting("training the tokenizer", None, "seconds") as advance:
                return train_bpe(sample, size, special, advance)

        settings = [split.train_characters, split.val_records, size, list(special), limit, SAMPLE_SEED]
        return train_or_recall(split.stats, settings, train)
    return load_tokenizer_file(tokenizer)


@concerning("tokenizer")
def load_tokenizer_file(path: str) -> Tokenizer:
    """Load a tokenizer.json. Raises UsageError for a missing file, and TinyLMError for one that is not a tokenizer."""
    if not Path(path).is_file():
        raise UsageError(f"`tokenizer` is {path!r}; it must be auto, char, bpe or the path of a tokenizer.json.")
    return Tokenizer.load(resolve_links(Path(path)))  # `load` refuses links; this one was named by the user


def sample_for_tokenizer(stream: Stream, characters: int, limit: int) -> Iterator[str]:
    """Yield text to train BPE on: the whole stream, or chunks from all of it with about `limit` characters in total.

    `characters` is the length of the stream. A chunk ends at the last line break within MAX_SAMPLE_CHUNK characters,
    and within 1/16 of `limit`, or else there, or at the end of a document. One of every `ceil(characters / limit)`
    consecutive chunks is chosen at random (with a fixed seed), since documents may alternate in a regular way.
    """
    stride = max(1, -(-characters // limit))
    chunk = max(1, min(MAX_SAMPLE_CHUNK, limit // 16))
    chunks = rechunk(stream, lambda text: text.rfind("\n", 0, chunk) + 1 if len(text) >= chunk else 0, chunk)
    rng = random.Random(SAMPLE_SEED)
    chosen = 0
    for index, text in enumerate(c for c in chunks if c is not None):
        if index % stride == 0:
            chosen = index + rng.randrange(stride)
        if index == chosen:
            yield text
