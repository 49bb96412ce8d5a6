"""Texts with labels: read from every format, numbered, encoded, and cut to a context."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.text.corpora import require_errors, write_file
from tests.text.test_tables import write_parquet
from tinylm.config.model import MAX_LABELS
from tinylm.errors import UsageError
from tinylm.jobs.labels.corpus import (
    LabelCorpus,
    LabelTokens,
    describe_labels,
    encode_labelled_text,
    parse_labelled_text,
)
from tinylm.jobs.reading import ModelReader, load_text
from tinylm.jobs.run_tokens import encode_split
from tinylm.reporter import LogReporter
from tinylm.text.file_selection import TextSource
from tinylm.text.scored_tokens import ScoredRows
from tinylm.text.split import SplitCorpus
from tinylm.text.tokenizer import train_char

TEXTS = [("good day", "10"), ("bad day", "9"), ("a day", "so, so"), ("good", "10"), ("bad, bad", "9"), ("day", "9")]
RECORDS = [{"text": text, "label": label} for text, label in TEXTS]
JSONL = "\n".join(map(json.dumps, RECORDS))
CSV = "label,text,n\n" + "\n".join(f'"{label}","{text}",3' for text, label in TEXTS)


def loaded(path: Path, labels: tuple[str, ...] | None = (), **settings: Any) -> SplitCorpus:
    reader = ModelReader(("text",) if labels is None else ("text", "labels"), labels or ())
    return load_text(TextSource(paths=(str(path),), **settings), path.parent, reader, LogReporter())


def decoded(tokens: LabelTokens, tokenizer: Any, labels: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for index in range(len(tokens)):
        ids, scored = tokens.tokens(index)
        assert scored.tolist() == [False] * (len(ids) - 1) + [True]
        found.append((tokenizer.decode(ids[:-1]), labels[ids[-1]]))
    return found


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
def test_texts_of_every_format_keep_their_labels(name: str, tmp_path: Path) -> None:
    if name.endswith("parquet"):
        columns = {"label": [label for _, label in TEXTS], "text": [text for text, _ in TEXTS]}
        file = write_parquet(tmp_path / name, columns)
    else:
        content = {"a.json": json.dumps(RECORDS), "a.csv": CSV}.get(name, JSONL)
        file = write_file(tmp_path / name, content)
    split = loaded(file, val_fraction=0.4)
    assert split.corpus.kind == "labels" and split.corpus.labels == ("9", "10", "so, so")  # numbers by their values
    assert (split.val_records, split.stats.documents) == (2, 6)
    tokenizer = train_char(split.alphabet)
    tokens, data = encode_split(split, tokenizer)
    parts = [decoded(LabelTokens(part), tokenizer, split.corpus.labels) for part in (tokens.train, tokens.val)]
    assert data.kind == "labels"
    assert sorted(parts[0] + parts[1]) == sorted(TEXTS) and len(parts[1]) == 2


def test_records_are_read_as_texts_alone_if_the_model_takes_no_labels_or_the_user_wants_that(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.jsonl", JSONL)
    assert [loaded(file, None).corpus.kind, loaded(file, format="jsonl").corpus.kind] == ["text", "text"]
    assert loaded(file, ("9", "10", "so, so", "x")).corpus.labels[-1] == "x"  # those of a model
    with pytest.raises(UsageError, match=r"line 3: the label 'so, so' is not one of the model's \(9, 10\)"):
        loaded(file, ("9", "10"))
    with pytest.raises(UsageError, match="does not fit the model, which takes plain text"):
        loaded(file, None, format="labels")
    renamed = write_file(tmp_path / "b.jsonl", JSONL.replace('"text"', '"review"'))
    assert loaded(renamed, text_key="review").corpus.labels == ("9", "10", "so, so")
    first = json.dumps({"text": "long " * 10_000, "label": "9"})  # the label is after the part that is looked at first
    assert loaded(write_file(tmp_path / "c.jsonl", f"{first}\n{JSONL}")).corpus.kind == "labels"


def test_a_label_of_the_validation_text_alone_has_a_number_too(tmp_path: Path) -> None:
    file = write_file(tmp_path / "a.jsonl", JSONL)
    other = write_file(tmp_path / "val.jsonl", json.dumps({"text": "day", "label": "new"}))
    assert loaded(file, val_data=str(other)).corpus.labels == ("9", "10", "new", "so, so")


def test_records_without_a_usable_label_are_errors_before_training(tmp_path: Path) -> None:
    rows: list[tuple[Any, str]] = [
        (
            {"text": "x", "label": ["a", "b"]},
            r"here: 'label' is .*; for several labels of a text, train one classifier",
        ),
        ({"text": "x"}, "here: 'label' is None; it must be a text or an integer"),
        ({"text": "x", "label": 1.5}, "here: 'label' is 1.5; it must be a text or an integer"),
        ({"text": "x", "label": ""}, "here: 'label' is ''"),
        ({"text": "x", "label": "y" * 201}, "the label has 201 characters; it can have at most 200"),
        ({"text": "", "label": "a"}, "here: the text under 'text' is empty"),
        ({"text": 3, "label": "a"}, "the value under 'text' is 3, which is not a string"),
        ({"label": "a"}, "here: no text under 'text'"),
        ("text", "here: 'label' is None"),
        ({"text": "x", "label": "\ud800"}, "here: a lone surrogate"),
    ]
    require_errors(lambda record: parse_labelled_text(record, "here", "text"), rows)
    assert parse_labelled_text({"text": "x", "label": True}, "here", "text") == ("x", "true")
    assert parse_labelled_text({"text": "x", "label": 3}, "here", "text") == ("x", "3")
    one = write_file(tmp_path / "one.jsonl", "\n".join([JSONL.splitlines()[0]] * 3))
    with pytest.raises(UsageError, match="There is a single label; a classifier needs two or more"):
        loaded(one)
    many = [json.dumps({"text": f"x{i}", "label": i}) for i in range(MAX_LABELS + 1)]
    with pytest.raises(UsageError, match=r"has more than 1,000 labels, .* `format=\"jsonl\"`"):
        loaded(write_file(tmp_path / "many.jsonl", "\n".join(many)))


def test_blanks_around_the_names_and_fields_of_a_csv_file_do_not_count(tmp_path: Path) -> None:
    """With a blank in the first line; a text with a separator is in quotes after a blank."""
    file = write_file(tmp_path / "a.csv", 'text , label\n"good, day", spam\n bad , "ham"\nx,spam \n')
    split = loaded(file)
    assert isinstance(split.corpus, LabelCorpus) and split.corpus.labels == ("ham", "spam")
    assert [tuple(found) for _, *found in split.corpus.labelled_texts()] == [
        ("good, day", "spam"),
        ("bad", "ham"),
        ("x", "spam"),
    ]
    assert loaded(write_file(tmp_path / "b.csv", "text,label\na, spam\nb,spam\n")).corpus.labels == (" spam", "spam")


def test_numbers_of_classes_in_parquet_become_their_names(tmp_path: Path) -> None:
    """As the datasets library writes them: the names in the metadata of the file, and -1 for no class."""
    names = ["World", "Sports", "Business"]
    features = {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": names, "_type": "ClassLabel"}}

    def written(numbers: list[int], metadata: object) -> Path:
        table = pa.table({"text": [f"text {n}" for n in range(len(numbers))], "label": numbers})
        pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(metadata)}), tmp_path / "a.parquet")
        return tmp_path / "a.parquet"

    split = loaded(written([2, 0, 0, 2], {"info": {"features": features}}))
    assert split.corpus.labels == ("Business", "World") and isinstance(split.corpus, LabelCorpus)
    assert [label for _, _, label in split.corpus.labelled_texts()] == ["Business", "World", "World", "Business"]
    with pytest.raises(UsageError, match=r"row 2: 'label' is 3, and the file names 3 classes"):
        loaded(written([2, 3], {"info": {"features": features}}))
    with pytest.raises(UsageError, match=r"row 2: 'label' is None"):
        loaded(written([2, -1], {"info": {"features": features}}))
    for odd in ([], {"info": 3}, {"info": {"features": {"label": {"names": [1], "_type": "ClassLabel"}}}}):
        assert loaded(written([2, 0, 0, 2], odd)).corpus.labels == ("0", "2")


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_several_labels_and_second_texts_are_refused_and_not_dropped(name: str, tmp_path: Path) -> None:
    def written(record: dict[str, Any]) -> Path:
        if name.endswith("parquet"):
            return write_parquet(tmp_path / name, {key: [value] * 4 for key, value in record.items()})
        rows = [",".join(record), *[",".join(map(str, record.values()))] * 4]
        content = rows if name.endswith("csv") else [json.dumps(record)] * 4
        return write_file(tmp_path / name, "\n".join(content) + "\n")

    for record, words in (
        ({"text": "a b", "labels": "x"}, r"'labels' is not supported; for a classifier, name the one label of a text"),
        ({"text": "a b", "label": "x", "text_pair": "c"}, r"'text_pair' is not supported; it is a second text"),
        ({"text": "a b", "text_pair": "c"}, r"'text_pair' .*; to read the texts alone, use `format=\"jsonl\"`"),
    ):
        with pytest.raises(UsageError, match=f"{name}, (line|row) [12]: {words}"):
            loaded(written(record))
        if not name.endswith("csv"):
            assert loaded(tmp_path / name, format="jsonl").corpus.kind == "text"
    pair = {"premise": "a b", "hypothesis": "c", "label": "x"}
    with pytest.raises(UsageError, match="'hypothesis' is not supported; it is a second text"):
        loaded(written(pair), text_key="premise")


def test_labels_are_listed_with_their_counts_and_alike_and_absent_ones_are_named() -> None:
    tokenizer, labels = train_char("ab"), ("Spam", "ham", "rare", "spam", "spam ")
    train, val = (
        LabelTokens(np.concatenate([encode_labelled_text("ab", number, tokenizer) for number in numbers]))
        for numbers in ([0, 0, 1, 1, 3, 4], [1, 2])
    )
    note, warnings = describe_labels(labels, train, val)
    assert note.endswith(
        "5 labels, with their numbers of texts: 'Spam' (2), 'ham' (3), 'rare' (1), 'spam' (1), 'spam ' (1)"
    )
    absent, alike = warnings
    assert absent.startswith("The model cannot learn labels without a training text: 'rare' (1).")
    assert "count as different ones: 'Spam' (2), 'spam' (1), 'spam ' (1)." in alike
    assert "'Spam' (2), 'ham' (2), 'rare' (0)" in describe_labels(labels, train, None)[0]  # validated on themselves
    many = tuple(map(str, range(30)))
    assert describe_labels(many, train, val)[0].endswith("'18' (0), '19' (0) and 10 others")


def test_more_labels_than_token_ids_are_encoded(tmp_path: Path) -> None:
    records = [json.dumps({"text": "ab"[i % 2], "label": i}) for i in range(500)]
    split = loaded(write_file(tmp_path / "a.jsonl", "\n".join(records)))
    tokens, _ = encode_split(split, train_char("ab"))
    numbers = [LabelTokens(part).numbers() for part in (tokens.train, tokens.val)]
    assert sorted(np.concatenate(numbers)) == list(range(500))


def test_a_text_that_is_longer_than_the_context_loses_its_end_and_keeps_its_label() -> None:
    tokenizer = train_char("abcdefgh")
    codes = [encode_labelled_text(text, label, tokenizer) for text, label in (("abcdefgh", 3), ("ab", 1))]
    tokens = LabelTokens(np.concatenate(codes))
    batch = ScoredRows(tokens, 4, packed=False).batch([0, 1])
    assert tokenizer.decode(batch.ids[0].tolist()) == "abcd"
    assert batch.lengths is not None and batch.mask is not None
    assert batch.lengths.tolist() == [4, 2] and batch.targets[batch.mask].tolist() == [3, 1]
    assert batch.mask.int().tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]
    assert tokens.describe_left_out(4, "training") == [
        "1 of 2 training texts are cut to the context of 4 tokens (the longest has 8)."
    ]
    assert tokens.describe_left_out(8, "training") == []
