"""The tokenizer that is chosen for a text, and the sample that BPE is trained on."""

from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.text.corpora import TEXT, require_errors, split_of, write_file, write_pairs
from tinylm.errors import TinyLMError, UsageError
from tinylm.text.split import split_corpus
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char
from tinylm.text.tokenizer_choice import choose_tokenizer, require_known_characters, sample_for_tokenizer


def test_auto_chooses_characters_for_short_texts_with_small_alphabets_and_else_bpe(tmp_path: Path) -> None:
    letters = "".join(map(chr, range(0x4E00, 0x4F00)))
    rows = ((TEXT, None, "char"), (TEXT, 300, "bpe"), (letters, None, "char"), (letters + "x", None, "bpe"))
    for text, vocab_size, kind in rows:
        split = split_of(write_file(tmp_path / "a.txt", text))
        assert choose_tokenizer(split, "auto", vocab_size).kind == kind


def test_the_alphabet_comes_from_both_parts_and_the_merges_only_from_training(tmp_path: Path) -> None:
    split = split_of(write_file(tmp_path / "c.txt", "abab" * 30 + "xyxy" * 10), fraction=0.25)
    assert choose_tokenizer(split, "char", None).unknown_characters("abxyz") == "z"
    tokenizer = choose_tokenizer(split, "bpe", 300)
    assert len(tokenizer.encode("abab" * 30)) < 60 and len(tokenizer.encode("xyxy" * 10)) == 40


class Training:
    """In place of the training of BPE: keeps the sizes of the vocabularies and the lengths of the texts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.characters: list[int] = []

    def __call__(self, chunks: Iterable[str], size: int, *rest: object) -> Tokenizer:
        self.sizes.append(size)
        self.characters.append(sum(map(len, chunks)))
        return train_bpe(["ab"], 257)


def test_the_choice_by_length_is_that_of_the_documents(tmp_path: Path) -> None:
    """The table of docs/training.md."""
    letters = "abcdefghijklmnopq"
    for characters, vocab_size in (
        (150_000, None),
        (150_001, 512),
        (400_000, 512),
        (400_001, 1024),
        (2_000_000, 1024),
        (2_000_001, 2048),
        (3_000_000, 2048),
        (3_000_001, 4096),
    ):
        training = Training()
        split = split_of(write_file(tmp_path / "c.txt", (f"{letters}\n" * characters)[:characters]))
        kind = choose_tokenizer(split, "auto", None, train_bpe=training).kind
        assert (kind, training.sizes) == (("char", []) if vocab_size is None else ("bpe", [vocab_size]))
    split = split_of(write_file(tmp_path / "c.txt", f"{letters[1:]} \t\n" * 160_000))  # 16 letters, as in hexadecimal
    assert choose_tokenizer(split, "auto", None).kind == "char"


def test_the_default_vocab_size_is_doubled_for_pairs(tmp_path: Path) -> None:
    training = Training()
    split = split_of(write_file(tmp_path / "c.txt", "abcde" * 1000))
    pairs = split_corpus([write_pairs(tmp_path / "p.tsv", "abcd\tefgh\n" * 600)], 0.1)
    for text, tokenizer, vocab_size in ((split, "bpe", None), (split, "bpe", 300), (pairs, "auto", None)):
        choose_tokenizer(text, tokenizer, vocab_size, train_bpe=training)
    assert training.sizes == [512, 300, 1024]


def test_a_tokenizer_may_be_a_link_and_unknown_characters_are_listed(corpus: Path, other: Path, tmp_path: Path) -> None:
    """The files of the Hugging Face cache are links."""
    file = write_file(tmp_path / "mine.json", train_char("".join(sorted(set(TEXT)))).to_str())
    assert choose_tokenizer(split_of(corpus), str(file), None).sha256 == Tokenizer.load(file).sha256
    with pytest.raises(UsageError) as caught:
        split = split_of(corpus, val=other)
        require_known_characters(split.corpus, split.alphabet, Tokenizer.load(file), f"The tokenizer {file}")
    assert "mine.json has no id for 4 of the text's characters, '!' (U+0021), 'Z' (U+005A), 'b'" in str(caught.value)
    split = split_of(write_file(tmp_path / "s.txt", "abc " * 50))
    (tmp_path / "blob").write_text(train_char("abc ").to_str())
    (tmp_path / "tokenizer.json").symlink_to("blob")
    assert choose_tokenizer(split, str(tmp_path / "tokenizer.json"), None).kind == "char"
    with pytest.raises(TinyLMError, match="it is a symbolic link"):
        Tokenizer.load(tmp_path / "tokenizer.json")


def test_invalid_settings_of_the_tokenizer_are_refused(corpus: Path) -> None:
    rows = [
        ("char", 300, "`vocab_size` is for BPE, and the tokenizer is 'char'; leave"),
        ("absent.json", None, "`tokenizer` is 'absent.json'; it must be auto, char, bpe or the path of"),
        ("bpe", 100, "`vocab_size` is 100"),
        ("bpe", 0, "`vocab_size` is 0"),
    ]
    require_errors(lambda name, vocab_size: choose_tokenizer(split_of(corpus), name, vocab_size), rows)


@given(st.lists(st.text("ab \n", min_size=1, max_size=40), max_size=8), st.integers(1, 200))
def test_a_bpe_sample_consists_of_parts_of_the_text_in_order(chunks: list[str], limit: int) -> None:
    text = "".join(chunks)
    sample = list(sample_for_tokenizer(iter(chunks), len(text), limit))
    position = 0
    for part in sample:
        position = text.index(part, position) + len(part)
    if limit >= len(text):
        assert "".join(sample) == text


def test_a_bpe_sample_is_evenly_spread_also_where_documents_of_every_kind_alternate() -> None:
    text = "".join(f"line {i:04d}\n" for i in range(1000))
    sample = list(sample_for_tokenizer(iter([text[i : i + 100] for i in range(0, len(text), 100)]), 10_000, 2500))
    assert 2000 <= sum(map(len, sample)) <= 3000 and all(part.endswith("\n") for part in sample)
    assert min(int(part[5:9]) for part in sample) < 100 and max(int(part[5:9]) for part in sample) > 900
    for characters in (2501, 5000, 100_000):  # one long line is sampled as any other text
        sample = list(sample_for_tokenizer(iter(["x" * characters]), characters, 2500))
        assert 1000 <= sum(map(len, sample)) <= 2500 + 2500 // 16
    for period in (2, 3, 4, 5):
        documents = [f"{'abcde'[n % period]} {n:03d}\n" for n in range(600)]
        stream = chain.from_iterable((document, None) for document in documents)
        sample = list(sample_for_tokenizer(stream, 6 * 600, 6 * 600 // period))
        counts = [sum(text.startswith(letter) for text in sample) for letter in "abcde"[:period]]
        assert min(counts) > 0.5 * sum(counts) / period
        assert 0.8 * 600 / period <= sum(counts) <= 1.2 * 600 / period


def test_a_time_budget_limits_the_text_that_bpe_is_trained_on(tmp_path: Path) -> None:
    """At 0.2 million characters per second, which a text of random letters takes, to a tenth of the budget."""
    training = Training()
    split = split_of(write_file(tmp_path / "c.txt", "x" * 4_000_000))
    for seconds in (None, 1e6, 60.0, 1.0):
        choose_tokenizer(split, "bpe", None, seconds, train_bpe=training)
    expected = [split.train_characters * share for share in (1.0, 1.0, 60 * 20_000 / 4e6, 2**18 / 4e6)]
    assert training.characters == pytest.approx(expected, rel=0.4)
