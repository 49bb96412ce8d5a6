"""The tokenizer of a text: chosen and trained for it, or loaded, and then without ids for some of its characters."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tinylm.config.jobs import rows_on
from tinylm.errors import UnknownCharactersError, UsageError, concerning
from tinylm.reporter import Reporter, SilentReporter, counted
from tinylm.system.files import resolve_links
from tinylm.text.corpus import Corpus, CorpusStats, Stream, rechunk
from tinylm.text.readers import require_encodable
from tinylm.text.split import SplitCorpus, split_corpus
from tinylm.text.text_cache import train_or_recall
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, describe_characters, train_bpe, train_char

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
    return load_tokenizer(tokenizer)


@concerning("tokenizer")
def load_tokenizer(path: str) -> Tokenizer:
    """Load the given tokenizer.json. Raises UsageError if it is missing, and TinyLMError if it is not a tokenizer."""
    if not os.path.isfile(path):  # noqa: PTH113, Path.is_file raises an error for a long name
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


def handle_unknown_characters(
    split: SplitCorpus,
    tokenizer: Tokenizer,
    unknown: str,
    reporter: Reporter,
    *,
    vocabulary_owner: str,
    model: Path | None,
) -> SplitCorpus:
    """Return the split text without the characters that have no id, with a warning, if `unknown` is "skip".

    Raises UsageError if no text is left, and the errors of `require_known_characters`.
    """
    dropped = require_known_characters(split.corpus, split.alphabet, tokenizer, vocabulary_owner, model, unknown)
    if not dropped:
        return split
    corpora = [corpus_without_unknown(corpus, tokenizer) for corpus in split.corpora]
    with reporter.counting("reading", sum(corpus.size for corpus in corpora), "bytes") as advance:
        remaining = split_corpus(corpora, split.val_fraction, advance)
    report_dropped(dropped, corpora, split.all_stats, remaining.all_stats, reporter)
    return remaining


def require_known_characters(
    corpus: Corpus,
    alphabet: str,
    tokenizer: Tokenizer,
    vocabulary_owner: str,
    model: Path | None = None,
    unknown: str = "error",
) -> str:
    """The characters of `alphabet` that have no id and, since `unknown` is "skip", are to be left out.

    alphabet: the characters of the corpus and of its validation text. vocabulary_owner: the subject of the message,
    such as "The model checkpoints/a". model: path of the model that the tokenizer belongs to; it is an attribute of the
    error if the vocabulary can be extended.

    Raises UnknownCharactersError for such characters if `unknown` is "error", and for those that the chat template
    writes, which cannot be skipped.
    """
    missing = tokenizer.unknown_characters(alphabet)
    if not missing:
        return ""
    whose, advice = "text's characters", 'skip such characters with `unknown="skip"`'
    if written := corpus.written_by_template(alphabet, missing):
        whose, missing = "characters that the chat template writes", written
        advice = "choose a `chat_template` without them, since they cannot be skipped"
    if written or unknown != "skip":
        raise UnknownCharactersError(
            f"{vocabulary_owner} has no id for {len(missing)} of the {whose}, {describe_characters(missing)}; "
            f"{advice}.",
            model if tokenizer.kind == "char" else None,
            corpus.paths,
        )
    return missing


def corpus_without_unknown(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Return a copy of the corpus that also drops the characters without an id in the tokenizer.

    Pairs with a side that becomes empty, and conversations with a message that becomes empty, are skipped.
    """
    drop_others = corpus.drop_unknown or str

    def drop_unknown(text: str) -> str:
        text = drop_others(text)
        unknown = tokenizer.unknown_characters(text)
        return text.translate(dict.fromkeys(map(ord, unknown))) if unknown else text

    return replace(corpus, drop_unknown=drop_unknown)


def report_dropped(
    characters: str,
    corpora: Sequence[Corpus],
    before: Sequence[CorpusStats],
    after: Sequence[CorpusStats],
    reporter: Reporter,
) -> None:
    """Warn of the characters that were dropped from these corpora, and of records that lost a text that they need."""
    count = sum(stats.characters for stats in before) - sum(stats.characters for stats in after)
    reporter.warn(
        f"Skipped {counted(count, 'character')} of the text without an id, "
        f"{counted(len(characters), 'different one')} ({describe_characters(characters)})."
    )
    for corpus, *both in zip(corpora, before, after, strict=True):
        total, left = (stats.documents // corpus.documents_per_record for stats in both)
        if left < total:
            others = "; ..." if total - left > len(corpus.left_out) else ""
            places = f" ({'; '.join(corpus.left_out)}{others})" if corpus.left_out else ""
            reporter.warn(
                f"{total - left:,} of {total:,} {rows_on(corpus.kind)[0].records} are left out, since a text of theirs "
                f"has no other characters{places}."
            )


def without_unknown(text: str, tokenizer: Tokenizer, unknown: str, name: str) -> str:
    """The text without characters that are not in the vocabulary; may be empty. name: of the text, for messages.

    Raises UsageError for such characters if `unknown` is "error", and for text that UTF-8 cannot encode.
    """
    require_encodable(text, name)
    found = tokenizer.unknown_characters(text)
    if found and unknown == "error":
        raise UsageError(
            f"{name} has characters that are not in the vocabulary: {describe_characters(found)}; leave them out, or "
            'skip them with `unknown="skip"`.'
        )
    return text.translate(dict.fromkeys(map(ord, found))) if found else text
