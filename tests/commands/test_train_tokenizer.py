"""tinylm train-tokenizer."""

import errno
import json
from pathlib import Path

import pytest

from tests.shell import TINY, assert_error, records, run_ok, snapshot, story, tinylm
from tinylm.text.tokenizer import Tokenizer


def test_stdout_is_the_path_and_one_character_is_enough(corpus: Path, here: Path) -> None:
    result = run_ok("train-tokenizer", corpus)
    assert result.stdout == "tokenizer.json\n"
    assert "Vocabulary size: " in result.stderr
    assert Tokenizer.load(here / "tokenizer.json").kind == "bpe"
    assert run_ok("train-tokenizer", corpus, "-o", "t.json", "-q").stderr == ""
    (here / "one.txt").write_text("x")
    run_ok("train-tokenizer", "one.txt", "--kind", "char", "--force")
    assert Tokenizer.load(here / "tokenizer.json").unknown_characters(story(100))[0] == "t"


def test_decoding_the_encoded_text_gives_the_text(corpus: Path, here: Path) -> None:
    text = corpus.read_text()
    for kind, size in (("char", len(set(text)) + 1), ("bpe", 270)):
        options = ("--vocab-size", size) if kind == "bpe" else ()
        (record,) = records(run_ok("train-tokenizer", corpus, "--kind", kind, *options, "--out", kind, "--json"))
        assert record == {"tokenizer": kind, "kind": kind, "vocab_size": size}
        tokenizer = Tokenizer.load(here / kind)
        assert tokenizer.vocab_size == size
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_tokenizer_is_the_one_that_train_makes_or_takes(corpus: Path, here: Path) -> None:
    run_ok("train-tokenizer", corpus, "--vocab-size", 300)
    for name, choice in (("made", ("bpe", "--vocab-size", 300)), ("taken", ("tokenizer.json",))):
        run_ok("train", corpus, "--out", name, "--tokenizer", *choice, "--steps", 1, *TINY)
        assert (here / "tokenizer.json").read_bytes() == (here / name / "tokenizer.json").read_bytes()


def test_texts_may_be_standard_input_folders_and_jsonl(corpus: Path, here: Path) -> None:
    text = corpus.read_text()
    (here / "folder").mkdir()
    (here / "folder/a.txt").write_text(text)
    (here / "a.jsonl").write_text(json.dumps({"body": text}) + "\n")
    for name, source in (("0", corpus), ("1", "-"), ("2", "folder")):
        run_ok("train-tokenizer", source, "--out", name, stdin=text)
    run_ok("train-tokenizer", "a.jsonl", "--out", "3", "--text-key", "body")
    assert len({(here / name).read_bytes() for name in "0123"}) == 1


def test_an_existing_file_is_replaced_only_with_force(corpus: Path, here: Path) -> None:
    (here / "tokenizer.json").write_text("precious")
    assert_error(tinylm("train-tokenizer", corpus), 2, "tokenizer.json is already there", "--force", "--out")
    assert (here / "tokenizer.json").read_text() == "precious"
    run_ok("train-tokenizer", corpus, "--force")
    Tokenizer.load(here / "tokenizer.json")


def test_a_full_disk_leaves_the_old_file_alone(corpus: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "tokenizer.json").write_text("precious")
    before = snapshot(here)
    written = Path.write_text

    def full(self: Path, text: str, **how: str) -> int:
        written(self, text[:10], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = tinylm("train-tokenizer", corpus, "--force")
    assert_error(result, 1, "Cannot write tokenizer.json: No space left on device")
    assert snapshot(here) == before
