"""The way from a user's corpus to encoded tokens: read it once to know it, choose a tokenizer, encode both parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath  # the latter reads the paths of every system

from tinylm.cache import private_folder
from tinylm.config import DataConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.text.corpus import STANDARD_INPUT, Corpus, Scan, Stream, cut, find_corpus, scan
from tinylm.text.dataset import TEXT_DIGITS, TokenFolder, encode_corpus, sample_for_tokenizer, token_key
from tinylm.text.pairs import PairCorpus, PairTokens
from tinylm.text.tokenizer import Tokenizer, describe_characters, train_bpe, train_char

CHAR_ALPHABET = 256  # more characters than this, or a longer text, and auto chooses BPE
CHAR_CHARACTERS = 20_000_000
# For texts up to so many characters: docs/decisions/016.
VOCAB_SIZES = ((3_000_000, 1024), (10_000_000, 4096), (100_000_000, 8192))
LARGEST_VOCAB_SIZE = 16_384
BPE_SAMPLE = 1 << 23  # characters; a million distinct words in them take a gigabyte to learn from

CORPORA: dict[str, type[Corpus]] = {"text": Corpus, "pairs": PairCorpus}

Progress = Callable[[int], None]
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """A corpus that has been read through once. Validation is its end, or a corpus of its own."""

    corpus: Corpus
    found: Scan
    val_corpus: Corpus | None
    val_found: Scan | None
    train_characters: int

    @property
    def alphabet(self) -> str:
        """The characters of training and validation text."""
        return "".join(sorted({*self.found.alphabet, *(self.val_found.alphabet if self.val_found else "")}))

    def train_stream(self) -> Stream:
        return _exactly(self.train_characters, cut(self.corpus.stream(), 0, self.train_characters))

    def val_stream(self) -> Stream:
        if self.val_corpus is not None:
            assert self.val_found is not None
            return _exactly(self.val_found.characters, self.val_corpus.stream())
        characters = self.found.characters
        return _exactly(
            characters - self.train_characters, cut(self.corpus.stream(), self.train_characters, characters)
        )


def _exactly(characters: int, stream: Stream) -> Stream:
    """The stream; raises TinyLMError at its end when a file has changed since it was first read."""
    for piece in stream:
        characters -= len(piece or "")
        yield piece
    if characters:
        raise TinyLMError("The text changed while it was being read; run the command again.")


def read_corpus(
    corpus: Corpus, val_corpus: Corpus | None, val_fraction: float, progress: Progress = lambda size: None
) -> Reading:
    """Read all the text and cut it, by characters. `progress` is told the characters of each piece.

    Raises UsageError for text that is empty or cannot be decoded, and for a fraction outside of (0, 1).
    """
    if not 0 < val_fraction < 1:
        raise UsageError(f"--val-fraction is {val_fraction}; it must be above 0 and below 1.")
    found = _scan(corpus, progress)
    val_found = _scan(val_corpus, progress) if val_corpus is not None else None
    held_out = 0 if val_found else max(1, int(found.characters * val_fraction))
    return Reading(corpus, found, val_corpus, val_found, corpus.whole(found.characters - held_out))


def _scan(corpus: Corpus, progress: Progress) -> Scan:
    def told(stream: Stream) -> Stream:
        for piece in stream:
            progress(len(piece or ""))
            yield piece

    found = scan(told(corpus.stream()))
    if not found.characters:
        raise UsageError(f"{corpus.name} has no text in it; give a file that has some.")
    return found


def choose_tokenizer(reading: Reading, wanted: str, vocab_size: int | None) -> Tokenizer:
    """`wanted` is auto, char, bpe, or the path of a tokenizer.json.

    Raises UsageError for contradictory options and for characters that a given tokenizer does not know.
    """
    pairs = isinstance(reading.corpus, PairCorpus)
    if wanted == "auto":
        few = len(reading.alphabet) <= CHAR_ALPHABET and reading.found.characters <= CHAR_CHARACTERS
        wanted = "char" if few and not pairs and vocab_size is None else "bpe"  # pairs are short, and learned as words
    if vocab_size is not None and wanted != "bpe":
        raise UsageError(f"--vocab-size is for --tokenizer bpe, and contradicts --tokenizer {wanted}; leave one out.")
    if wanted == "char":
        return train_char(reading.alphabet)
    if wanted == "bpe":
        sample = sample_for_tokenizer(reading.train_stream(), reading.train_characters, BPE_SAMPLE)
        size = _default_vocab_size(reading.found.characters, pairs) if vocab_size is None else vocab_size
        return train_bpe(sample, size)
    path = Path(wanted)
    if not path.is_file():
        raise UsageError(f"--tokenizer {wanted!r} is neither auto, char or bpe nor a tokenizer.json that exists.")
    tokenizer = Tokenizer.load(path.resolve())  # a link is followed where the user names it
    require_known(tokenizer, reading.alphabet, f"The tokenizer {path}")
    return tokenizer


def _default_vocab_size(characters: int, pairs: bool) -> int:
    """Sources and targets have words of their own: docs/decisions/009."""
    size = next((size for most, size in VOCAB_SIZES if characters <= most), LARGEST_VOCAB_SIZE)
    return 2 * size if pairs else size


def require_known(
    tokenizer: Tokenizer, alphabet: str, who: str, otherwise: str = "train a model on it instead"
) -> None:
    """Raises UsageError, listing them, when some of a text's characters have no id; `otherwise` is what can be done."""
    unknown = tokenizer.unknown(alphabet)
    if unknown:
        raise UsageError(
            f"{who} does not know {len(unknown)} of the text's characters: {describe_characters(unknown)}. "
            f"Take them out of the text, or {otherwise}."
        )


def check_encoder(tokenizer: Tokenizer, sample: Sequence[str], warn: Warn) -> None:
    """Encode with the `tokenizers` library from now on, and warn, if the fast encoder gives the sample other ids."""
    encoder = tokenizer.encoder
    if not tokenizer.check_encoder(sample):
        warn(
            f"{encoder} does not give this text the ids that the tokenizers library gives; it is encoded with the "
            "library, which is slower. Install the version of gigatoken that tinylm asks for, or report this."
        )


def encode_reading(
    reading: Reading,
    tokenizer: Tokenizer,
    folder: Path | None = None,
    progress: Progress = lambda size: None,
    warn: Warn = lambda message: None,
) -> tuple[TokenFolder, DataConfig]:
    """Encode both parts into `folder`, by default one in the cache; `progress` is told the characters encoded.

    A sample of the text is first encoded with the `tokenizers` library as well; `warn` is told of a difference.

    Raises UsageError when either part is too short to train on or to validate with.
    """
    scans = [reading.found] + ([reading.val_found] if reading.val_found else [])
    check_encoder(tokenizer, [text for found in scans for text in found.sample], warn)
    fingerprints = [found.fingerprint for found in scans]
    home = folder or private_folder("tokens") / token_key(fingerprints, reading.train_characters, tokenizer)
    tokens = encode_corpus(home, reading.train_stream, reading.val_stream, tokenizer, progress)
    for part, least, found in (("training", 3, len(tokens.train)), ("validation", 2, len(tokens.val))):
        if found < least:
            raise UsageError(
                f"{reading.corpus.name} leaves {found} tokens for {part}, and {least} are needed; give more text, or "
                "another --val-fraction."
            )
    pairs = isinstance(reading.corpus, PairCorpus)
    data = DataConfig(
        kind="pairs" if pairs else "text",
        corpus=_absolute(reading.corpus),
        val_corpus=_absolute(reading.val_corpus) if reading.val_corpus else (),
        text_key=reading.corpus.text_key,
        encoding=reading.corpus.encoding,
        train_characters=reading.train_characters,
        fingerprint=reading.found.fingerprint,
        token_folder="tokens" if folder else str(home),
        characters=reading.found.characters,
        bytes=reading.found.bytes,
        documents=reading.found.documents,
        train_tokens=len(tokens.train),
        val_tokens=len(tokens.val),
        train_pairs=len(PairTokens(tokens.train, tokenizer.end_of_text)) if pairs else 0,
    )
    return tokens, data


def _absolute(corpus: Corpus) -> tuple[str, ...]:
    """What the user named, so that it is found from any folder."""
    return tuple(path if path == STANDARD_INPUT else str(Path(path).absolute()) for path in corpus.paths)


def reopen_tokens(
    run: Path, data: DataConfig, tokenizer: Tokenizer, progress: Progress = lambda size: None
) -> TokenFolder:
    """The tokens that a run was trained on: from where they were kept, or encoded again from an unchanged corpus.

    Raises TinyLMError when neither is to be had.
    """
    folder = run / data.token_folder  # an absolute path stays what it is
    if folder.exists():
        return TokenFolder.open(folder)
    if STANDARD_INPUT in (*data.corpus, *data.val_corpus):
        raise TinyLMError(f"{folder} is missing, and the text came from standard input; train again from the text.")
    kind = CORPORA[data.kind]
    corpus = find_corpus(data.corpus, data.text_key, data.encoding, kind=kind)
    val_corpus = find_corpus(data.val_corpus, data.text_key, data.encoding, kind=kind) if data.val_corpus else None
    found = _scan(corpus, progress)
    val_found = _scan(val_corpus, progress) if val_corpus else None
    fingerprints = [found.fingerprint] + ([val_found.fingerprint] if val_found else [])
    key = token_key(fingerprints, data.train_characters, tokenizer)
    if PureWindowsPath(data.token_folder).name[:TEXT_DIGITS] != key[:TEXT_DIGITS]:  # the encoder may be another
        changed = corpus if found.fingerprint != data.fingerprint or val_corpus is None else val_corpus
        raise TinyLMError(
            f"{changed.name} has changed since {run} began; restore the text, or begin from its weights with "
            f"tinylm train --init-from {run}."
        )
    reading = Reading(corpus, found, val_corpus, val_found, data.train_characters)
    return encode_reading(reading, tokenizer, progress=progress)[0]
