"""The way from a user's corpus to encoded tokens: read it once to know it, choose a tokenizer, encode both parts."""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tinylm.cache import private_folder
from tinylm.config import DataConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.text.corpus import STANDARD_INPUT, Corpus, Scan, Stream, cut, find_corpus, scan
from tinylm.text.dataset import TokenFolder, encode_corpus, open_part, sample_for_tokenizer, token_key
from tinylm.text.pairs import PairCorpus, PairTokens
from tinylm.text.tokenizer import Tokenizer, describe_characters, train_bpe, train_char

CHAR_ALPHABET = 256  # more characters than this, or a longer text, and auto chooses BPE
CHAR_CHARACTERS = 20_000_000
# For texts up to so many characters: docs/decisions/016.
VOCAB_SIZES = ((3_000_000, 1024), (10_000_000, 4096), (100_000_000, 8192))
LARGEST_VOCAB_SIZE = 16_384
LEAST_TOKENS = {"train": 3, "val": 2}
BPE_SAMPLE = 1 << 23  # characters; a million distinct words in them take a gigabyte to learn from

CORPORA: dict[str, type[Corpus]] = {"text": Corpus, "pairs": PairCorpus}

Progress = Callable[[int], None]
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Reading:
    """A corpus that has been read through once. Validation is its end, or a corpus of its own.

    `val_fraction` is how much of the corpus was asked for as validation text.
    """

    corpus: Corpus
    found: Scan
    val_corpus: Corpus | None
    val_found: Scan | None
    train_characters: int
    val_fraction: float = 0.0

    @property
    def characters(self) -> int:
        """Of training and validation text."""
        return self.found.characters + (self.val_found.characters if self.val_found else 0)

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
    """Read all the text and cut it, by characters. `progress` is called with the bytes read from the disk.

    Raises UsageError for text that is empty or cannot be decoded, and for a fraction outside of (0, 1).
    """
    if not 0 < val_fraction < 1:
        raise UsageError(f"--val-fraction is {val_fraction}; it must be above 0 and below 1.")
    found = _scan(corpus, progress)
    val_found = _scan(val_corpus, progress) if val_corpus is not None else None
    held_out = 0 if val_found else max(1, int(found.characters * val_fraction))
    return Reading(corpus, found, val_corpus, val_found, corpus.whole(found.characters - held_out), val_fraction)


def _scan(corpus: Corpus, progress: Progress) -> Scan:
    found = scan(corpus.stream(progress))
    if not found.characters and corpus.known_part is not None:
        raise UsageError(f"The model knows none of the characters of {corpus.name}; give another text.")
    if not found.characters:
        raise UsageError(f"{corpus.name} has no text in it; give a file that has some.")
    return found


def choose_tokenizer(reading: Reading, wanted: str, vocab_size: int | None) -> Tokenizer:
    """`wanted` is auto, char, bpe, or the path of a tokenizer.json.

    Raises UsageError for contradictory options. That a given tokenizer knows the text is for `require_known` to see.
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
    return Tokenizer.load(path.resolve())  # a link is followed where the user names it


def _default_vocab_size(characters: int, pairs: bool) -> int:
    """Sources and targets have words of their own: docs/decisions/009."""
    size = next((size for most, size in VOCAB_SIZES if characters <= most), LARGEST_VOCAB_SIZE)
    return 2 * size if pairs else size


def require_known(tokenizer: Tokenizer, alphabet: str, who: str, otherwise: str | None = None) -> None:
    """Raises UsageError, listing them, when some of a text's characters have no id; `otherwise` is what can be done."""
    unknown = tokenizer.unknown(alphabet)
    if unknown:
        raise UsageError(
            f"{who} does not know {len(unknown)} of the text's characters: {describe_characters(unknown)}. "
            f"Leave such characters out with --unknown skip{f', or {otherwise}' if otherwise else ''}."
        )


def without_unknown(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """The corpus without the characters that have no id. Of pairs, one that loses all of a side is left out."""

    def known_part(text: str) -> str:
        unknown = tokenizer.unknown(text)
        return text.translate(dict.fromkeys(map(ord, unknown))) if unknown else text

    return replace(corpus, known_part=known_part)


def skip_unknown(reading: Reading, tokenizer: Tokenizer, progress: Progress = lambda size: None) -> Reading:
    """The same texts without the characters that have no id, read once more; `progress` as for `read_corpus`.

    Raises UsageError when nothing is left.
    """
    corpus = without_unknown(reading.corpus, tokenizer)
    val_corpus = without_unknown(reading.val_corpus, tokenizer) if reading.val_corpus else None
    return read_corpus(corpus, val_corpus, reading.val_fraction, progress)


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
    encoder: str | None = None,
) -> tuple[TokenFolder, DataConfig]:
    """Encode both parts into `folder`, by default one in the cache; `progress` receives the characters encoded.

    A sample of the text is first encoded with the `tokenizers` library as well; `warn` receives a message when they
    differ. `encoder` is the name under which the run recorded its encoder, if it is encoded again.

    Raises UsageError when either part is too short to train on or to validate with.
    """
    val_sample = reading.val_found.sample if reading.val_found else ()
    check_encoder(tokenizer, [*reading.found.sample, *val_sample], warn)
    encoder = encoder or tokenizer.encoder
    val_fingerprint = reading.val_found.fingerprint if reading.val_found else None
    key = token_key(reading.found.fingerprint, val_fingerprint, reading.train_characters, tokenizer, encoder)
    home = folder or private_folder("tokens") / key
    # Windows renames no folder with a mapped file in it, and a run is prepared under another name.
    mapped = folder is None or os.name != "nt"
    tokens = encode_corpus(home, key, reading.train_stream, reading.val_stream, tokenizer, progress, mapped=mapped)
    for part, least, found in (
        ("training", LEAST_TOKENS["train"], len(tokens.train)),
        ("validation", LEAST_TOKENS["val"], len(tokens.val)),
    ):
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
        format=reading.corpus.format,
        unknown="error" if reading.corpus.known_part is None else "skip",
        train_characters=reading.train_characters,
        fingerprint=reading.found.fingerprint,
        val_fingerprint=val_fingerprint,
        encoder=encoder,
        tokens_in_run=folder is not None,
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
    return tuple(path if path == STANDARD_INPUT else _absolute_path(path) for path in corpus.paths)


def _absolute_path(path: str) -> str:
    """Of a pattern, only what the user wrote is one: a folder above may have brackets in its name."""
    if glob.has_magic(path) and not os.path.lexists(path):
        return str(Path(glob.escape(str(Path.cwd())), path))
    return str(Path(path).absolute())


def recorded_corpus(paths: tuple[str, ...], data: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """The corpus at some paths, to be read as the run's own was."""
    corpus = find_corpus(paths, data.text_key, data.encoding, kind=CORPORA[data.kind], format=data.format)
    return without_unknown(corpus, tokenizer) if data.unknown == "skip" else corpus


def reopen_tokens(run: Path, data: DataConfig, tokenizer: Tokenizer) -> TokenFolder:
    """The tokens that the run was trained on, from the run directory or from the cache.

    The paths recorded in a run are not opened: whoever made the run chose them.

    Raises TinyLMError when the tokens are not there or damaged.
    """
    train, val = (reopen_part(run, data, tokenizer, part) for part in ("train", "val"))
    return TokenFolder(_token_place(run, data, tokenizer)[0], train, val)


def reopen_part(
    run: Path, data: DataConfig, tokenizer: Tokenizer, part: str, *, trust_times: bool = False
) -> np.ndarray:
    """One part, `train` or `val`, of the tokens that the run was trained on; `trust_times` as for `open_part`.

    Raises TinyLMError when it is not there or damaged.
    """
    folder, key = _token_place(run, data, tokenizer)
    if not os.path.lexists(folder):
        text = ", ".join(("standard input" if path == STANDARD_INPUT else path) for path in data.corpus)
        raise TinyLMError(
            f"The encoded text of {run} is not here any more; name the text that it was trained on again, "
            f"beside --resume (its author had it as: {text[:200]})."
        )
    ids = open_part(folder, part, key, tokenizer.vocab_size, trust_times=trust_times)
    if len(ids) != (data.train_tokens if part == "train" else data.val_tokens) or len(ids) < LEAST_TOKENS[part]:
        raise TinyLMError(f"The encoded text in {folder} is not that of {run}; delete that folder.")
    return ids


def has_tokens(run: Path, data: DataConfig, tokenizer: Tokenizer) -> bool:
    """Whether the run's tokens are at hand, without opening them."""
    try:
        return _token_place(run, data, tokenizer)[0].is_dir()
    except TinyLMError:  # there is no cache
        return False


def _token_place(run: Path, data: DataConfig, tokenizer: Tokenizer) -> tuple[Path, str]:
    """The token folder of a run, and the key that it must carry."""
    key = token_key(data.fingerprint, data.val_fingerprint, data.train_characters, tokenizer, data.encoder)
    return (run / "tokens" if data.tokens_in_run else private_folder("tokens") / key), key


def encode_again(
    run: Path,
    data: DataConfig,
    tokenizer: Tokenizer,
    corpus: Corpus,
    val_corpus: Corpus | None,
    progress: Progress = lambda size: None,
) -> TokenFolder:
    """Encode the text of a run again, after its tokens were lost from the cache; the user named the text.

    Raises UsageError when it is not the text that the run was trained on.
    """
    found = _scan(corpus, progress)
    val_found = _scan(val_corpus, progress) if val_corpus else None
    for name, scan_found, recorded in (
        (corpus.name, found, data.fingerprint),
        (val_corpus.name if val_corpus else "The validation text", val_found, data.val_fingerprint),
    ):
        if (scan_found.fingerprint if scan_found else None) != recorded:
            raise UsageError(
                f"{name} is not the text that {run} was trained on, or has changed since; restore it, or begin from "
                "the run's weights as a new run."
            )
    reading = Reading(corpus, found, val_corpus, val_found, data.train_characters)
    folder = run / "tokens" if data.tokens_in_run else None
    tokens, _ = encode_reading(reading, tokenizer, folder, progress, encoder=data.encoder)
    if (len(tokens.train), len(tokens.val)) != (data.train_tokens, data.val_tokens):
        raise TinyLMError(f"The text does not give the tokens that {run} was trained on; the encoder is another one.")
    return tokens
