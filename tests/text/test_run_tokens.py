"""The token files of an existing run: opened, or encoded again from its text."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.text.corpora import TEXT, split_of
from tinylm.cache_directory import cache_root
from tinylm.errors import TinyLMError, UsageError
from tinylm.reporter import SilentReporter
from tinylm.text.corpus import Corpus
from tinylm.text.corpus_encoding import encode_split
from tinylm.text.run_tokens import encode_again, has_tokens, reopen_tokens
from tinylm.text.tokenizer import Tokenizer, train_char
from tinylm.text.tokenizer_choice import choose_tokenizer


class Counts(SilentReporter):
    """Records the totals and the progress of counted work, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: dict[str, int | None] = {}
        self.done: dict[str, int] = {}

    @contextlib.contextmanager
    def counting(self, what: str, total: int | None, unit: str) -> Iterator[Callable[[int], None]]:
        self.totals[what], self.done[what] = total, 0

        def advance(number: int) -> None:
            self.done[what] += number

        yield advance


@pytest.mark.parametrize("with_val", [True, False])
def test_the_tokens_of_a_run_are_reopened_or_encoded_again_from_a_named_text(
    with_val: bool, corpus: Path, other: Path, tmp_path: Path
) -> None:
    """The recorded paths are shown and not opened, since an untrusted run could name any file."""
    run = tmp_path / "run"
    split = split_of(corpus, val=other if with_val else None)
    tokenizer = choose_tokenizer(split, "char", None)
    tokens, data = encode_split(split, tokenizer)
    expected = (tokens.train.tolist(), tokens.val.tolist())
    assert has_tokens(run, data, tokenizer)
    again = reopen_tokens(run, data, tokenizer)
    assert (again.train.tolist(), again.val.tolist()) == expected
    shutil.rmtree(cache_root())
    assert not has_tokens(run, data, tokenizer)
    with pytest.raises(TinyLMError, match=r"no longer in the cache; name its training text again.*path .*corpus\.txt"):
        reopen_tokens(run, data, tokenizer)
    counts = Counts()
    again = encode_again(run, data, tokenizer, split.corpus, split.val_corpus, counts)
    assert (again.train.tolist(), again.val.tolist()) == expected
    assert reopen_tokens(run, data, tokenizer).train.tolist() == expected[0]
    size = corpus.stat().st_size + (other.stat().st_size if with_val else 0)
    assert counts.done == counts.totals == {"reading": size, "encoding": split.characters}


def test_a_text_that_has_changed_or_is_not_named_is_not_encoded_again(
    corpus: Path, other: Path, tmp_path: Path
) -> None:
    split = split_of(corpus, val=other)
    tokenizer = choose_tokenizer(split, "char", None)
    _, data = encode_split(split, tokenizer)
    with pytest.raises(UsageError, match="The validation text is not the text"):
        encode_again(tmp_path / "run", data, tokenizer, split.corpus, None, SilentReporter())
    for file in (other, corpus):
        file.write_text(file.read_text()[::-1])
        words = rf"{file.name} is not the text that .*run was trained on, or has changed"
        with pytest.raises(UsageError, match=words):
            encode_again(tmp_path / "run", data, tokenizer, split.corpus, split.val_corpus, SilentReporter())


def test_damaged_token_files_and_those_of_another_text_are_refused(corpus: Path, other: Path, tmp_path: Path) -> None:
    tokenizer = choose_tokenizer(split_of(corpus, val=other), "char", None)
    tokens, data = encode_split(split_of(corpus), tokenizer, tmp_path / "run" / "tokens")
    encode_split(split_of(corpus, fraction=0.5), tokenizer, tmp_path / "other" / "tokens")
    with pytest.raises(TinyLMError, match="it is the encoding of another text"):
        reopen_tokens(tmp_path / "other", data, tokenizer)
    content = (tokens.path / "train.bin").read_bytes()
    (tokens.path / "train.bin").write_bytes(content[:-1] + b"\0")
    with pytest.raises(TinyLMError, match="is damaged"):
        reopen_tokens(tmp_path / "run", data, tokenizer)


def test_tokens_of_standard_input_are_opened_only_in_the_run_directory(corpus: Path, tmp_path: Path) -> None:
    piped = replace(split_of(corpus), corpus=Corpus(("-",), (corpus,)))
    tokenizer = train_char("".join(sorted(set(TEXT))))
    tokens, data = encode_split(piped, tokenizer, tmp_path / "run" / "tokens")
    expected = tokens.train.tolist()
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert reopen_tokens(moved, data, tokenizer).train.tolist() == expected
    shutil.rmtree(moved / "tokens")
    with pytest.raises(TinyLMError, match="recorded the path standard input"):
        reopen_tokens(moved, data, tokenizer)


def test_a_run_keeps_its_tokens_when_the_version_of_the_encoder_changes(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = split_of(corpus)
    tokenizer = choose_tokenizer(split, "char", None)
    tokens, data = encode_split(split, tokenizer)
    expected = tokens.train.tolist()
    monkeypatch.setattr(Tokenizer, "encoder", "another encoder")
    assert reopen_tokens(tmp_path / "run", data, tokenizer).train.tolist() == expected
    assert encode_split(split, tokenizer)[0].path != tokens.path
    shutil.rmtree(cache_root())
    encode_again(tmp_path / "run", data, tokenizer, split.corpus, None, SilentReporter())
    assert reopen_tokens(tmp_path / "run", data, tokenizer).train.tolist() == expected
