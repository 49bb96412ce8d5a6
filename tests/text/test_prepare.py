"""From files to tokens as a command goes it; the judge is the text of the files, sliced."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import gigatoken
import numpy as np
import pytest

from tinylm.cache import cache_root
from tinylm.errors import TinyLMError, UsageError
from tinylm.text import prepare
from tinylm.text.corpus import Corpus, find_corpus
from tinylm.text.pairs import PairCorpus
from tinylm.text.prepare import (
    Reading,
    choose_tokenizer,
    encode_again,
    encode_reading,
    has_tokens,
    read_corpus,
    reopen_tokens,
    require_known,
)
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer, train_bpe, train_char

TEXT = "The cat sat on the mat, and the dog did not.\n" * 4


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def reading_of(*files: Path, val: Path | None = None, fraction: float = 0.25) -> Reading:
    return read_corpus(find_corpus([str(file) for file in files]), find_corpus([str(val)]) if val else None, fraction)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return written(tmp_path / "corpus.txt", TEXT)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return written(tmp_path / "other.txt", "Zebras!\n")


# Reading.


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.25, 0.5, 0.999])
def test_validation_is_the_end_of_the_text_in_one_piece(fraction: float, corpus: Path) -> None:
    reading = reading_of(corpus, fraction=fraction)
    train, val = ("".join(filter(None, stream)) for stream in (reading.train_stream(), reading.val_stream()))
    assert train + val == TEXT
    assert len(val) == max(1, int(fraction * len(TEXT)))
    assert reading.train_characters == len(train)


def test_a_document_that_is_cut_in_two_gets_no_separator_there(corpus: Path, other: Path) -> None:
    reading = reading_of(other, corpus, fraction=0.5)
    assert list(reading.train_stream()) == ["Zebras!\n", None, TEXT[: reading.train_characters - 8]]
    assert list(reading.val_stream()) == [TEXT[reading.train_characters - 8 :]]


def test_validation_text_of_its_own_leaves_the_corpus_whole(corpus: Path, other: Path) -> None:
    reading = reading_of(corpus, val=other)
    assert "".join(filter(None, reading.train_stream())) == TEXT
    assert "".join(filter(None, reading.val_stream())) == "Zebras!\n"
    assert reading.alphabet == "".join(sorted({*TEXT, *"Zebras!\n"}))


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_fraction_that_leaves_nothing_is_refused(fraction: float, corpus: Path) -> None:
    with pytest.raises(UsageError, match=r"--val-fraction is .* above 0 and below 1"):
        reading_of(corpus, fraction=fraction)


def test_text_without_characters_is_refused_wherever_it_stands(corpus: Path, tmp_path: Path) -> None:
    empty = written(tmp_path / "empty.txt", "\ufeff")
    for files, val in (((empty,), None), ((corpus,), empty)):
        with pytest.raises(UsageError, match=r"empty\.txt has no text in it"):
            reading_of(*files, val=val)


def test_reading_tells_the_characters_it_has_read(corpus: Path, other: Path) -> None:
    told: list[int] = []
    read_corpus(find_corpus([str(corpus), str(other)]), find_corpus([str(other)]), 0.1, told.append)
    assert sum(told) == len(TEXT) + 2 * 8


# Choosing a tokenizer.


def test_few_characters_are_one_id_each_and_many_are_bpe(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_tokenizer(reading_of(corpus), "auto", None).kind == "char"
    assert choose_tokenizer(reading_of(corpus), "auto", 300).kind == "bpe"
    letters = "".join(map(chr, range(0x4E00, 0x4F00)))
    assert choose_tokenizer(reading_of(written(tmp_path / "256.txt", letters)), "auto", None).kind == "char"
    assert choose_tokenizer(reading_of(written(tmp_path / "257.txt", letters + "x")), "auto", None).kind == "bpe"
    monkeypatch.setattr(prepare, "CHAR_CHARACTERS", len(TEXT) - 1)
    assert choose_tokenizer(reading_of(corpus), "auto", None).kind == "bpe"


def test_the_character_set_is_of_both_parts_and_the_merges_of_training_alone(tmp_path: Path) -> None:
    corpus = written(tmp_path / "c.txt", "abab" * 30 + "xyxy" * 10)
    reading = reading_of(corpus, fraction=0.25)
    assert choose_tokenizer(reading, "char", None).unknown("abxyz") == "z"
    tokenizer = choose_tokenizer(reading, "bpe", 300)
    assert len(tokenizer.encode("abab" * 30)) < 60
    assert len(tokenizer.encode("xyxy" * 10)) == 40


@pytest.mark.parametrize(("characters", "vocab_size"), [(5000, 1024), (15_000, 4096)])
def test_a_longer_text_gets_a_larger_vocabulary(
    characters: int, vocab_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "VOCAB_SIZES", ((10_000, 1024), (20_000, 4096)))
    asked: list[int] = []
    monkeypatch.setattr(prepare, "train_bpe", lambda pieces, size: asked.append(size) or train_bpe(pieces, 257))
    reading = reading_of(written(tmp_path / "c.txt", "abcde" * (characters // 5)))
    choose_tokenizer(reading, "bpe", None)
    choose_tokenizer(reading, "bpe", 300)
    pairs = find_corpus([str(written(tmp_path / "p.tsv", "abcd\tefgh\n" * (characters // 8)))], kind=PairCorpus)
    choose_tokenizer(read_corpus(pairs, None, 0.1), "auto", None)
    assert asked == [vocab_size, 300, 2 * vocab_size]


def test_a_given_tokenizer_is_used_and_lists_what_it_lacks(corpus: Path, other: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "mine.json", train_char("".join(sorted(set(TEXT)))).to_str())
    assert choose_tokenizer(reading_of(corpus), str(file), None).sha256 == Tokenizer.load(file).sha256
    with pytest.raises(UsageError) as caught:
        require_known(Tokenizer.load(file), reading_of(corpus, val=other).alphabet, f"The tokenizer {file}")
    assert "mine.json does not know 4 of the text's characters: '!' (U+0021), 'Z' (U+005A), 'b'" in str(caught.value)


@pytest.mark.parametrize(
    ("wanted", "vocab_size", "words"),
    [
        ("char", 300, "--vocab-size is for --tokenizer bpe, and contradicts --tokenizer char"),
        ("absent.json", None, "--tokenizer 'absent.json' is neither auto, char or bpe nor a tokenizer.json"),
        ("bpe", 100, "--vocab-size is 100"),
        ("bpe", 0, "--vocab-size is 0"),
    ],
)
def test_contradictions_are_refused(wanted: str, vocab_size: int | None, words: str, corpus: Path) -> None:
    with pytest.raises(UsageError, match=words):
        choose_tokenizer(reading_of(corpus), wanted, vocab_size)


# Encoding.


def test_both_parts_are_encoded_into_the_cache_and_described(corpus: Path, other: Path) -> None:
    reading = reading_of(corpus, other, fraction=0.5)
    tokenizer = choose_tokenizer(reading, "char", None)
    tokens, data = encode_reading(reading, tokenizer)
    ids = [*tokens.train.tolist(), *tokens.val.tolist()]
    whole = (TEXT, "Zebras!\n")
    assert ids == [*tokenizer.encode(whole[0]).tolist(), tokenizer.end_of_text, *tokenizer.encode(whole[1]).tolist()]
    assert tokens.path.parent == cache_root() / "tokens"
    assert not data.tokens_in_run
    assert (data.characters, data.bytes, data.documents) == (len(TEXT) + 8, len(TEXT) + 8, 2)
    assert (data.train_tokens, data.val_tokens) == (len(tokens.train), len(tokens.val))
    assert data.train_characters == reading.train_characters
    assert data.fingerprint == hashlib.sha256(b"\xff".join(text.encode() for text in whole)).hexdigest()
    assert (data.corpus, data.val_corpus) == ((str(corpus), str(other)), ())


def test_the_same_text_is_encoded_once_and_another_cut_again(corpus: Path) -> None:
    tokenizer = choose_tokenizer(reading_of(corpus), "char", None)
    told: list[int] = []
    first, _ = encode_reading(reading_of(corpus), tokenizer, progress=told.append)
    again, _ = encode_reading(reading_of(corpus), tokenizer, progress=lambda size: pytest.fail("encoded again"))
    assert sum(told) == len(TEXT)
    assert again.path == first.path
    assert encode_reading(reading_of(corpus, fraction=0.5), tokenizer)[0].path != first.path


def test_a_run_can_keep_its_own_tokens(corpus: Path, tmp_path: Path) -> None:
    reading = reading_of(corpus)
    tokens, data = encode_reading(reading, choose_tokenizer(reading, "char", None), tmp_path / "run" / "tokens")
    assert (tokens.path, data.tokens_in_run) == (tmp_path / "run" / "tokens", True)
    assert not (cache_root() / "tokens").exists()


@pytest.mark.parametrize(
    ("text", "fraction", "words"),
    [
        ("a", 0.1, "leaves 0 tokens for training, and 3 are needed"),
        ("abc", 0.1, "leaves 2 tokens for training"),
        ("abcd", 0.1, "leaves 1 tokens for validation, and 2 are needed"),
        ("abcdefgh", 0.9, "leaves 1 tokens for training"),
    ],
)
def test_a_text_that_is_too_short_is_refused(text: str, fraction: float, words: str, tmp_path: Path) -> None:
    reading = reading_of(written(tmp_path / "short.txt", text), fraction=fraction)
    with pytest.raises(UsageError, match=rf"short\.txt {words}"):
        encode_reading(reading, train_char("abcdefgh"))


def test_the_shortest_text_that_can_be_used_is_used(tmp_path: Path) -> None:
    tokens, _ = encode_reading(reading_of(written(tmp_path / "s.txt", "abcde"), fraction=0.4), train_char("abcde"))
    assert (tokens.train.tolist(), tokens.val.tolist()) == ([1, 2, 3], [4, 5])


def test_text_like_the_end_of_text_does_not_end_it(tmp_path: Path) -> None:
    text = f"a{END_OF_TEXT}b" * 20
    reading = reading_of(written(tmp_path / "c.txt", text), fraction=0.5)
    for wanted in ("char", "bpe"):
        tokenizer = choose_tokenizer(reading, wanted, None)
        tokens, _ = encode_reading(reading, tokenizer)
        assert tokenizer.end_of_text not in tokens.train
        assert tokenizer.decode([*tokens.train, *tokens.val]) == text


# Opening the tokens of a run again.


def lose_the_cache() -> None:
    shutil.rmtree(cache_root())


@pytest.mark.parametrize("with_val", [True, False])
def test_the_tokens_of_a_run_are_opened_again(with_val: bool, corpus: Path, other: Path, tmp_path: Path) -> None:
    reading = reading_of(corpus, val=other if with_val else None)
    tokenizer = choose_tokenizer(reading, "char", None)
    tokens, data = encode_reading(reading, tokenizer)
    assert has_tokens(tmp_path / "run", data, tokenizer)
    again = reopen_tokens(tmp_path / "run", data, tokenizer)
    assert (again.train.tolist(), again.val.tolist()) == (tokens.train.tolist(), tokens.val.tolist())


@pytest.mark.parametrize("with_val", [True, False])
def test_lost_tokens_are_encoded_again_from_a_text_that_the_user_names(
    with_val: bool, corpus: Path, other: Path, tmp_path: Path
) -> None:
    """The recorded paths are shown and not opened: a run from a stranger may name any file of this machine."""
    reading = reading_of(corpus, val=other if with_val else None)
    tokenizer = choose_tokenizer(reading, "char", None)
    tokens, data = encode_reading(reading, tokenizer)
    expected = (tokens.train.tolist(), tokens.val.tolist())
    lose_the_cache()
    assert not has_tokens(tmp_path / "run", data, tokenizer)
    with pytest.raises(TinyLMError, match=r"is not here any more; name the text .* had it as: .*corpus\.txt"):
        reopen_tokens(tmp_path / "run", data, tokenizer)
    again = encode_again(tmp_path / "run", data, tokenizer, reading.corpus, reading.val_corpus)
    assert (again.train.tolist(), again.val.tolist()) == expected
    assert reopen_tokens(tmp_path / "run", data, tokenizer).train.tolist() == expected[0]


@pytest.mark.parametrize("changed", ["corpus.txt", "other.txt"])
def test_another_text_than_the_run_was_trained_on_is_refused_by_name(
    changed: str, corpus: Path, other: Path, tmp_path: Path
) -> None:
    reading = reading_of(corpus, val=other)
    tokenizer = choose_tokenizer(reading, "char", None)
    _, data = encode_reading(reading, tokenizer)
    file = tmp_path / changed
    file.write_text(file.read_text()[::-1])
    with pytest.raises(UsageError, match=rf"{changed} is not the text that .*run was trained on, or has changed"):
        encode_again(tmp_path / "run", data, tokenizer, reading.corpus, reading.val_corpus)


def test_a_validation_text_must_be_named_again_as_well(corpus: Path, other: Path, tmp_path: Path) -> None:
    reading = reading_of(corpus, val=other)
    tokenizer = choose_tokenizer(reading, "char", None)
    _, data = encode_reading(reading, tokenizer)
    with pytest.raises(UsageError, match="The validation text is not the text"):
        encode_again(tmp_path / "run", data, tokenizer, reading.corpus, None)


def test_tokens_of_another_text_than_the_recorded_one_are_refused(corpus: Path, other: Path, tmp_path: Path) -> None:
    tokenizer = choose_tokenizer(reading_of(corpus, val=other), "char", None)
    _, data = encode_reading(reading_of(corpus), tokenizer, tmp_path / "run" / "tokens")
    encode_reading(reading_of(corpus, fraction=0.5), tokenizer, tmp_path / "other" / "tokens")
    shutil.rmtree(tmp_path / "run" / "tokens")
    shutil.copytree(tmp_path / "other" / "tokens", tmp_path / "run" / "tokens")
    with pytest.raises(TinyLMError, match="it is the encoding of another text"):
        reopen_tokens(tmp_path / "run", data, tokenizer)


def test_damaged_tokens_of_a_run_are_never_trained_on(corpus: Path, tmp_path: Path) -> None:
    reading = reading_of(corpus)
    tokenizer = choose_tokenizer(reading, "char", None)
    tokens, data = encode_reading(reading, tokenizer)
    expected = tokens.train.tolist()
    content = (tokens.path / "train.bin").read_bytes()
    (tokens.path / "train.bin").write_bytes(content[:-1] + b"\0")
    try:
        assert reopen_tokens(tmp_path / "run", data, tokenizer).train.tolist() == expected
    except TinyLMError as error:
        assert "is damaged" in str(error)


def test_text_that_came_from_standard_input_is_opened_in_the_run_or_missed(corpus: Path, tmp_path: Path) -> None:
    piped = replace(reading_of(corpus), corpus=Corpus(("-",), (corpus,)))
    tokenizer = train_char("".join(sorted(set(TEXT))))
    tokens, data = encode_reading(piped, tokenizer, tmp_path / "run" / "tokens")
    expected = tokens.train.tolist()
    moved = tmp_path / "moved"
    (tmp_path / "run").rename(moved)
    assert reopen_tokens(moved, data, tokenizer).train.tolist() == expected
    shutil.rmtree(moved / "tokens")
    with pytest.raises(TinyLMError, match="had it as: standard input"):
        reopen_tokens(moved, data, tokenizer)


# The fast encoder, compared with the library.


def test_a_text_that_gigatoken_encodes_otherwise_is_encoded_by_the_library_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Faulty:
        def encode(self, text: str) -> np.ndarray:
            return np.zeros(len(text), dtype=np.uint32)

    text = "It is the cause, it is the cause, my soul. " * 100
    corpus = written(tmp_path / "s.txt", text)
    reading = reading_of(corpus)
    sound, _ = encode_reading(reading, choose_tokenizer(reading, "bpe", 300), warn=pytest.fail)
    monkeypatch.setattr(gigatoken.Tokenizer, "from_json", lambda file: Faulty())
    warnings: list[str] = []
    tokenizer = choose_tokenizer(reading, "bpe", 300)
    tokens, _ = encode_reading(reading, tokenizer, warn=warnings.append)
    assert tokens.train.tolist() == sound.train.tolist()
    assert tokens.val.tolist() == sound.val.tolist()
    assert tokens.path != sound.path
    (warning,) = warnings
    assert warning.startswith("gigatoken 0.10.") and "encoded with the library, which is slower" in warning


def test_a_tokenizer_is_found_through_a_link_that_the_user_names(tmp_path: Path) -> None:
    """As files of the Hugging Face cache are."""
    reading = reading_of(written(tmp_path / "s.txt", "abc " * 50))
    (tmp_path / "blob").write_text(train_char("abc ").to_str())
    (tmp_path / "tokenizer.json").symlink_to("blob")
    assert choose_tokenizer(reading, str(tmp_path / "tokenizer.json"), None).kind == "char"
    with pytest.raises(TinyLMError, match="it is a symbolic link"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_a_run_keeps_its_tokens_when_the_encoder_gets_another_version(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = reading_of(corpus)
    tokenizer = choose_tokenizer(reading, "char", None)
    tokens, data = encode_reading(reading, tokenizer)
    expected = tokens.train.tolist()
    monkeypatch.setattr(Tokenizer, "encoder", "table of tomorrow")
    assert reopen_tokens(tmp_path / "run", data, tokenizer).train.tolist() == expected
    assert encode_reading(reading, tokenizer)[0].path != tokens.path
    lose_the_cache()
    encode_again(tmp_path / "run", data, tokenizer, reading.corpus, None)
    assert reopen_tokens(tmp_path / "run", data, tokenizer).train.tolist() == expected
