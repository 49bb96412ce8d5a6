"""Files of pairs, compared with their lines."""

import json
from pathlib import Path

import pytest

from tests.text.corpora import PAIRS, documents_of, tsv, write_pairs
from tinylm.errors import UsageError
from tinylm.text.corpus_encoding import split_corpus
from tinylm.text.pairs import Pair


def test_a_line_is_a_source_a_tab_and_a_target(tmp_path: Path) -> None:
    corpus = write_pairs(tmp_path / "p.tsv", " a b \tc d\r\n\ne\tf\n")
    assert list(corpus.pairs()) == [Pair("a b", "c d"), Pair("e", "f")]


def test_a_line_of_jsonl_is_a_source_and_a_target(tmp_path: Path) -> None:
    lines = [json.dumps({"target": target, "source": source, "id": 3}) for source, target in PAIRS]
    assert [tuple(pair) for pair in write_pairs(tmp_path / "p.jsonl", "\n".join(lines)).pairs()] == PAIRS


@pytest.mark.parametrize(
    ("line", "problem"),
    [("no tab", "no tab"), ("a\tb\tc", "2 tabs"), ("a\t", "an empty side"), ("\tb", "an empty side")],
)
def test_an_error_about_an_invalid_line_says_what_was_expected(line: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        list(write_pairs(tmp_path / "p.tsv", f"a\tb\n\n{line}\n").pairs())
    assert str(caught.value) == (
        f"{tmp_path / 'p.tsv'}, line 3: expected a source, a tab and a target, but found {problem}; correct the line."
    )


@pytest.mark.parametrize(
    "line", ["[1]", '{"source": "a"}', '{"source": "a", "target": 3}', '{"source": "", "target": "b"}']
)
def test_an_error_about_an_invalid_line_of_jsonl_gives_its_number(line: str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"p\.jsonl, (line|element) 1: expected an object with texts under 'source' and 'target'"
    ):
        list(write_pairs(tmp_path / "p.jsonl", line).pairs())


def test_a_pair_is_two_documents_of_a_stream_and_is_never_split(tmp_path: Path) -> None:
    corpus = write_pairs(tmp_path / "p.tsv", tsv(PAIRS))
    assert list(corpus.stream()) == [
        "abc",
        None,
        "ij",
        None,
        "d",
        None,
        "hgf",
        None,
        "a b",
        None,
        "j",
        None,
        "efgh",
        None,
        "iiii",
    ]
    split = split_corpus(corpus, None, 0.5)
    halves = [documents_of(stream) for stream in (split.train_stream(), split.val_stream())]
    assert split.val_records == 2
    pairs = [pair for half in halves for pair in zip(half[::2], half[1::2], strict=True)]
    assert sorted(pairs) == sorted(PAIRS) and len(halves[1]) == 4
