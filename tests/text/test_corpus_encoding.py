"""Splitting and encoding of corpora, compared with slices of the text; the token files of an existing run."""

import hashlib
import itertools
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import tokenizers

from tests.text.corpora import TEXT, documents_of, require_errors, split_of, write_file
from tests.text.test_tokenizer import SAMPLE, faulty_gigatoken
from tinylm.config.jobs import all_data
from tinylm.config.run import DataConfig, RunConfig
from tinylm.errors import TinyLMError, UsageError
from tinylm.jobs.reading import ModelReader, load_text
from tinylm.jobs.run_tokens import encode_recorded_text, encode_split, encode_text, reopen_tokens
from tinylm.reporter import LogReporter, SilentReporter
from tinylm.system.files import cache_root
from tinylm.text.chat_format import template_tokens
from tinylm.text.chat_template import CHATML
from tinylm.text.corpus import Corpus, find_corpus
from tinylm.text.file_selection import TextSource
from tinylm.text.split import split_corpus
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char
from tinylm.text.tokenizer_choice import choose_tokenizer, handle_unknown_characters


def test_validation_is_the_end_of_the_text_or_a_corpus_of_its_own(corpus: Path, other: Path) -> None:
    for fraction in (0.001, 0.1, 0.25, 0.5, 0.999):
        split = split_of(corpus, fraction=fraction)
        train, val = ("".join(filter(None, stream)) for stream in map(split.stream, ("train", "val")))
        assert (train + val, len(val)) == (TEXT, max(1, int(fraction * len(TEXT))))
        assert split.train_characters == len(train)
    split = split_of(other, corpus, fraction=0.5)  # a document that is split has no separator at the split
    assert list(split.stream("train")) == ["Zebras!\n", None, TEXT[: split.train_characters - 8]]
    assert list(split.stream("val")) == [TEXT[split.train_characters - 8 :]]
    split = split_of(corpus, val=other)
    assert [documents_of(stream) for stream in map(split.stream, ("train", "val"))] == [[TEXT], ["Zebras!\n"]]
    assert split.alphabet == "".join(sorted({*TEXT, *"Zebras!\n"}))
    assert (split.train_characters, split.characters) == (len(TEXT), len(TEXT) + 8)


def drawn(records: int, number: int) -> list[int]:
    """By definition: the record at a random place of each of `number` runs of consecutive records."""
    random_number = random.Random(0).random
    edges = [records * index // number for index in range(number + 1)]
    return [start + int(random_number() * (stop - start)) for start, stop in itertools.pairwise(edges)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_validation_records_are_drawn_from_all_of_the_text(name: str, tmp_path: Path) -> None:
    """Regression: they were the last tenth, such as the last facts of a list. Of a few documents, it is the end."""
    for records, number in ((10, 1), (47, 4), (200, 20)):
        texts = [f"text {index}" for index in range(records)]
        content = [json.dumps({"text": text}) if name == "a.jsonl" else text for text in texts]
        file = write_file(tmp_path / name, "\n".join(content) + "\n")
        split = split_corpus([find_corpus([str(file)], format="lines" if name == "a.txt" else "auto")], 0.1)
        chosen = drawn(records, number)
        assert len(set(chosen)) == number and chosen != list(range(records - number, records))
        assert documents_of(split.stream("val")) == [texts[index] for index in chosen]
        assert documents_of(split.stream("train")) == [text for index, text in enumerate(texts) if index not in chosen]
        _, data = encode_split(split, choose_tokenizer(split, "char", None))
        assert data.val_records == number
        ends = records - 2  # ends of text between documents
        assert data.train_tokens + data.val_tokens == sum(map(len, texts)) + ends
    write_file(file, "".join(json.dumps({"text": "ab"}) + "\n" for _ in range(201)))
    with pytest.raises(TinyLMError, match="changed while it was being read"):
        list(split.stream("train"))
    file = write_file(tmp_path / "a.jsonl", "".join(json.dumps({"text": c * 100}) + "\n" for c in "abc"))
    split = split_of(file, fraction=0.1)
    assert (split.val_records, documents_of(split.stream("val"))) == (0, ["c" * 30])


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
@pytest.mark.parametrize(("name", "line_end"), [("a.txt", "\n"), ("a.txt", "\r\n"), ("a.jsonl", "\n")])
def test_the_scored_bytes_include_line_breaks(name: str, line_end: str, tokenizer: str, tmp_path: Path) -> None:
    """Regression: a line's end was a scored token without a byte, so that bits per byte seemed larger."""
    texts = [f"{'ünï' * (index % 4)} {index}" for index in range(200)]
    content = [json.dumps(text) if name == "a.jsonl" else text for text in texts]
    file = write_file(tmp_path / name, "".join(line + line_end for line in content))
    split = split_corpus([find_corpus([str(file)], format="lines" if name == "a.txt" else "auto")], 0.1)
    encoder = choose_tokenizer(split, tokenizer, 300 if tokenizer == "bpe" else None)
    _, data = encode_split(split, encoder)
    lines = [texts[index] for index in drawn(200, 20)]
    between = "" if name == "a.jsonl" else "\n"
    unscored = encoder.decode(encoder.encode(lines[0])[:1])
    assert data.val_bytes == len(between.join(lines).encode()) - len(unscored.encode())


RECORDS: dict[str, Callable[[str], str]] = {  # a line of a file with a text in it, by the kind of corpus
    "labels": lambda text: json.dumps({"text": text, "label": len(text) % 2}),
    "chat": lambda text: json.dumps({"prompt": "a", "completion": text}),
    "preferences": lambda text: json.dumps({"prompt": "a", "chosen": text, "rejected": "b"}),
    "pairs": lambda text: json.dumps({"source": text, "target": "b"}),
    "jsonl": lambda text: json.dumps({"text": text}),
    "lines": lambda text: text,
}


@pytest.mark.parametrize("kind", RECORDS)
def test_repeated_records_are_counted_and_those_without_known_characters_are_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The third record has no known character, and the fourth one. The first and the last are in the training text."""
    caplog.set_level("INFO")
    texts = {"a.txt": ["ab", "ba", "aab", "abb", "bab"], "val.txt": ["bab", "aaa", "ßß", "ßa", "ab"]}
    file, val = (write_file(tmp_path / n, "\n".join(map(RECORDS[kind], some)) + "\n") for n, some in texts.items())
    source = TextSource(paths=(str(file),), val_data=str(val), format=kind)
    split = load_text(source, tmp_path, ModelReader((kind,) if kind in all_data() else ("text",)), LogReporter())
    tokenizer = train_char(split.alphabet.replace("ß", ""), template_tokens(CHATML))
    known = handle_unknown_characters(split, tokenizer, "skip", LogReporter(), vocabulary_owner="The model", model=None)
    encode_text(known, tokenizer, tmp_path, LogReporter())
    names = {"labels": "texts", "chat": "conversations", "jsonl": "documents", "lines": "documents"}
    name = names.get(kind, kind)
    place = "" if kind in ("jsonl", "lines") else f" ({val}, line 3)"
    assert f"1 of 5 {name} are left out, since a text of theirs has no other characters{place}." in caplog.text
    assert f"2 of 4 {name} for validation are training {name}, too" in caplog.text


def test_a_fraction_or_a_text_that_leaves_nothing_is_refused(corpus: Path, tmp_path: Path) -> None:
    empty = write_file(tmp_path / "empty.txt", "\ufeff")
    bounds = r"`val_fraction` is .* greater than 0 and below 1"
    rows = [
        *((corpus, None, fraction, bounds) for fraction in (0.0, 1.0, -0.1, 1.5, float("nan"))),
        (empty, None, 0.1, r"empty\.txt contains no text"),
        (corpus, empty, 0.1, r"empty\.txt contains no text"),
    ]
    require_errors(lambda file, val, fraction: split_of(file, val=val, fraction=fraction), rows)


def test_both_parts_are_encoded_once_into_the_cache_or_a_run(corpus: Path, other: Path, tmp_path: Path) -> None:
    split = split_of(corpus, other, fraction=0.5)
    tokenizer = choose_tokenizer(split, "char", None)
    progress: list[int] = []
    tokens, data = encode_split(split, tokenizer, progress=progress.append)
    assert sum(progress) == len(TEXT) + 8
    again, _ = encode_split(split, tokenizer, progress=lambda size: pytest.fail("encoded again"))
    assert again.path == tokens.path != encode_split(split_of(corpus, other), tokenizer)[0].path
    in_run, recorded = encode_split(split, tokenizer, tmp_path / "run" / "tokens")
    assert (in_run.path, recorded.tokens_in_run) == (tmp_path / "run" / "tokens", True)
    ids = [*tokens.train.tolist(), *tokens.val.tolist()]
    texts = (TEXT, "Zebras!\n")
    assert ids == [*tokenizer.encode(texts[0]).tolist(), tokenizer.end_of_text_id, *tokenizer.encode(texts[1]).tolist()]
    assert tokens.path.parent == cache_root() / "tokens" and not data.tokens_in_run
    assert (data.characters, data.bytes, data.documents) == (len(TEXT) + 8, len(TEXT) + 8, 2)
    assert (data.train_tokens, data.val_tokens) == (len(tokens.train), len(tokens.val))
    assert data.train_characters == split.train_characters
    assert data.fingerprint == hashlib.sha256(b"\xff".join(text.encode() for text in texts)).hexdigest()
    assert (data.corpus, data.val_corpus) == ((str(corpus), str(other)), ())


def test_a_text_that_is_too_short_is_refused_by_its_name(corpus: Path, tmp_path: Path) -> None:
    rows = [
        ("a", 0.1, "leaves 0 tokens for training, and at least 3 are needed"),
        ("abc", 0.1, "leaves 2 tokens for training"),
        ("abcd", 0.1, "leaves 1 token for validation, and at least 2 are needed"),
        ("abcdefgh", 0.9, "leaves 1 token for training"),
    ]

    def encode(text: str, fraction: float) -> object:
        return encode_split(
            split_of(write_file(tmp_path / "short.txt", text), fraction=fraction), train_char("abcdefgh")
        )

    require_errors(encode, [(*row, rf"short\.txt {words}") for *row, words in rows])
    tokens, _ = encode("abcde", 0.4)
    assert (tokens.train.tolist(), tokens.val.tolist()) == ([1, 2, 3], [4, 5])
    split = split_of(corpus, val=write_file(tmp_path / "val.txt", "T"))
    with pytest.raises(UsageError, match=r"val\.txt has 1 token, which is not scored; give more `val_data`"):
        encode_split(split, choose_tokenizer(split, "char", None))


def test_if_gigatoken_gives_other_ids_the_library_encodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = split_of(write_file(tmp_path / "s.txt", "It is the cause, it is the cause, my soul. " * 100))
    expected, _ = encode_split(split, train_bpe([SAMPLE], 400), warn=pytest.fail)
    warnings: list[str] = []
    faulty = faulty_gigatoken(monkeypatch, lambda text: [0] * len(text))
    tokens, _ = encode_split(split, faulty, warn=warnings.append)
    assert (tokens.train.tolist(), tokens.val.tolist()) == (expected.train.tolist(), expected.val.tolist())
    assert tokens.path != expected.path
    (warning,) = warnings
    assert warning.startswith("The ids of gigatoken 0.10.") and "encoded with the library, which is slower" in warning


def encode_again(run: Path, data: DataConfig, tokenizer: Tokenizer, file: Path, val: Path | None = None) -> TokenFolder:
    """Encode a run's text from these files; of its configuration, only the data is used for plain text."""
    config = cast(RunConfig, SimpleNamespace(data=data, labels=(), tokenizer=SimpleNamespace(chat_template=None)))
    return encode_recorded_text(run, config, tokenizer, (str(file),), val and str(val), SilentReporter())


@pytest.mark.parametrize("with_val", [True, False])
def test_tokens_of_a_run_are_reopened_or_made_again(with_val: bool, corpus: Path, other: Path, tmp_path: Path) -> None:
    """The recorded paths are shown and not opened, since an untrusted run could name any file."""
    run = tmp_path / "run"
    split = split_of(corpus, val=other if with_val else None)
    tokenizer = choose_tokenizer(split, "char", None)
    tokens, data = encode_split(split, tokenizer)
    expected = (tokens.train.tolist(), tokens.val.tolist())
    again = reopen_tokens(run, data, tokenizer)
    assert (again.train.tolist(), again.val.tolist()) == expected
    shutil.rmtree(cache_root())
    with pytest.raises(TinyLMError, match=r"no longer in the cache; name its training text again.*path .*corpus\.txt"):
        reopen_tokens(run, data, tokenizer)
    again = encode_again(run, data, tokenizer, corpus, *[other] * with_val)
    assert (again.train.tolist(), again.val.tolist()) == expected
    assert reopen_tokens(run, data, tokenizer).train.tolist() == expected[0]


def test_a_text_that_has_changed_or_is_not_named_is_not_encoded(corpus: Path, other: Path, tmp_path: Path) -> None:
    split = split_of(corpus, val=other)
    tokenizer = choose_tokenizer(split, "char", None)
    _, data = encode_split(split, tokenizer)
    with pytest.raises(UsageError, match="The validation text is not the text"):
        encode_again(tmp_path / "run", data, tokenizer, corpus)
    for file in (other, corpus):
        file.write_text(file.read_text()[::-1])
        words = rf"{file.name} is not the text that .*run was trained on, or has changed"
        with pytest.raises(UsageError, match=words):
            encode_again(tmp_path / "run", data, tokenizer, corpus, other)


def test_tokens_of_standard_input_are_opened_only_in_the_run_directory(corpus: Path, tmp_path: Path) -> None:
    piped = replace(split_of(corpus), corpora=(Corpus(("-",), (corpus,)),))
    tokenizer = train_char("".join(sorted(set(TEXT))))
    tokens, data = encode_split(piped, tokenizer, tmp_path / "run" / "tokens")
    expected = tokens.train.tolist()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert reopen_tokens(moved, data, tokenizer).train.tolist() == expected
    shutil.rmtree(moved / "tokens")
    with pytest.raises(TinyLMError, match="recorded the path standard input"):
        reopen_tokens(moved, data, tokenizer)


class NewTokenizer(Tokenizer):
    """A tokenizer in a new version of its library."""

    @property
    def encoder(self) -> str:
        return "another encoder"


def test_a_run_keeps_its_tokens_in_new_versions(tmp_path: Path, corpus: Path) -> None:
    split = split_of(corpus)
    tokenizer = choose_tokenizer(split, "char", None)
    tokens, data = encode_split(split, tokenizer)
    expected = tokens.train.tolist()
    tokenizer = NewTokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_str()))
    assert reopen_tokens(tmp_path / "run", data, tokenizer).train.tolist() == expected
    assert encode_split(split, tokenizer)[0].path != tokens.path
    shutil.rmtree(cache_root())
    encode_again(tmp_path / "run", data, tokenizer, corpus)
    assert reopen_tokens(tmp_path / "run", data, tokenizer).train.tolist() == expected
