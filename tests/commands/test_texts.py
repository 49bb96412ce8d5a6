"""Reading texts: skipped files, formats, unknown characters, and tinylm train-tokenizer."""

import errno
import glob
import gzip
import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import tinylm as tinylm_package
from tests.shell import TINY, assert_error, records, run_ok, snapshot, story, tinylm
from tests.trained_runs import BOTH, REVERSED, pairs_file
from tinylm.run_directory.loading import read_config
from tinylm.system.files import cache_root
from tinylm.text import corpus as corpus_module
from tinylm.text.tokenizer import Tokenizer

ONE_STEP = ("--steps", 1, *TINY)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(5000)
JSONL = "".join(json.dumps({"body": story(900, seed)}) + "\n" for seed in range(3))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_texts_and_models_may_have_names_that_are_not_utf_8(here: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    text, rows, run, lora, folder, adapter, report = (
        Path(os.fsdecode(b"caf\xe9" + end)) for end in (b".txt", b".parquet", b"", b"-lora", b"-hf", b"-peft", b".html")
    )
    text.write_text(story(3000))
    with rows.open("wb") as file:
        parquet.write_table(pyarrow.table({"text": [story(900, seed) for seed in range(3)]}), file)
    (trained,) = records(run_ok("train", text, *ONE_STEP, "--json"))[-1:]
    run = Path("checkpoints", run)
    assert trained["run"] == str(run) == "checkpoints/caf\udce9"  # Python's form of the byte E9
    commands: tuple[tuple[object, ...], ...] = (
        ("train", rows, "--steps", 1, *TINY, "--out", "rows", "--json"),
        ("train", "--resume", run, "--steps", 2, "--json"),
        ("sample", "--model", run.name, "-p", "the", "-n", 2, "--json"),
        ("eval", text, "--model", run, "--json"),
        ("compare", run, "rows", text, "--json"),
        ("finetune-lora", text, "--model", run, "--steps", 1, "--out", lora, "--json"),
        ("merge-lora", lora, "--out", "merged", "--json"),
        ("export", run, "--to", "hf", "--out", folder, "--json"),
        ("import", folder, "--out", "imported", "--json"),
        ("export", lora, "--to", "peft", "--out", adapter, "--json"),
        ("sample", "--model", run, "--adapter", adapter, "-p", "the", "-n", 2, "--json"),
        ("info", run, "--json"),
        ("runs", "--json"),
        ("report", run, "--out", report, "--json"),
    )
    for command in commands:
        result = run_ok(*command)
        assert records(result) and "damaged" not in result.stdout, command
    assert "caf\\udce9" in report.read_text(encoding="utf-8")


# Folders and globs


def test_skipped_files_are_a_note_or_if_they_are_most_of_a_folder_a_warning(here: Path) -> None:
    (here / "texts").mkdir()
    (here / "texts/a.txt").write_text(story(2000))
    (here / "texts/b.png").write_bytes(PNG[:1000])
    (here / "texts/.hidden").touch()
    note = "Skipped in texts: 1 binary (1,000 bytes: b.png), 1 hidden (.hidden). Read: 2,0"
    result = run_ok("train", "texts", *ONE_STEP)
    assert note in result.stderr and f"Warning: {note}" not in result.stderr
    assert note not in run_ok("train", "texts", "--out", "quiet", "-q", *ONE_STEP).stderr
    (here / "texts/c.png").write_bytes(PNG)
    assert "Warning: Skipped in texts: 2 binary" in run_ok("train", "texts", "--out", "more", "-q", *ONE_STEP).stderr


def test_a_text_named_twice_is_read_once_and_one_of_both_splits_is_a_warning(here: Path) -> None:
    (here / "a.txt").write_text(story(2000))
    (here / "b.txt").symlink_to("a.txt")
    (once,) = records(run_ok("train", "a.txt", "--dry-run", "--json", *ONE_STEP))
    for others, names in ((["./*.txt"], "a.txt, b.txt"), (["a.txt"], "a.txt"), ([here], "a.txt, b.txt")):
        result = run_ok("train", "a.txt", *others, "--dry-run", "--json", *ONE_STEP)
        assert f"{names.count(',') + 1} named twice ({names}). Read: " in result.stderr
        assert records(result)[0]["data"]["characters"] == once["data"]["characters"]
    (here / "b.txt").unlink()
    (here / "b.txt").write_text(story(2000, 1))
    words = "Warning: a.txt is text for training and for validation"
    options = ("--dry-run", *ONE_STEP)
    assert words in run_ok("train", "a.txt", "b.txt", "--val-data", "a.txt", *options).stderr
    assert words not in run_ok("train", "a.txt", "--val-data", "b.txt", *options).stderr


def test_a_corpus_may_be_a_glob_and_its_run_is_resumed_elsewhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = here / "te[x]ts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(story(1000))
    (folder / "c.md").write_text("not this one")
    monkeypatch.chdir(folder)
    result = run_ok("train", "*.txt", *ONE_STEP)
    assert result.stdout == "checkpoints/te[x]ts\n"
    run = folder / "checkpoints/te[x]ts"
    assert read_config(run).data.documents == 2
    shutil.rmtree(cache_root())
    monkeypatch.chdir(here)
    assert_error(tinylm("train", "--resume", run, "--steps", 2), 1, "is no longer in the cache", "te[x]ts")
    run_ok("train", "--resume", run, glob.escape(str(folder)) + "/*.txt", "--steps", 2)
    assert_error(tinylm("train", "*.csv", *ONE_STEP), 2, "No file matches the pattern '*.csv'")


def test_files_that_cannot_be_read_are_one_error_with_the_command_that_leaves_them_out(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is resumed without them, and other commands take the same options."""
    good = {"a.txt": story(1000), "b.txt": story(1000, 1)}
    bad = {"c.txt": "café\n".encode("latin-1"), "d.txt.gz": gzip.compress(story(9000).encode())[:-9]}
    for name, content in {**good, **bad, "noise.log": "#~|" * 99}.items():
        (here / "texts").mkdir(exist_ok=True)
        (here / "texts" / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    options = ("--exclude", "*.log", "--exclude", "none", *ONE_STEP)
    result = tinylm("train", "texts", *options)
    skipping = "To leave them out: tinylm train texts --exclude '*.log'"
    words = ("2 of 4 files cannot be read: texts/c.txt is", "; texts/d.txt.gz is", "--encoding", skipping)
    assert_error(result, 2, *words, sentences=3)
    result = run_ok(*shlex.split(result.stderr.split("To leave them out: tinylm ")[1].rstrip(".\n")))
    assert "Warning: Skipped 2 of 4 files, which cannot be read: texts/c.txt is not valid UTF-8" in result.stderr
    assert "1 excluded (noise.log)" in result.stderr
    assert "Warning: No file matches the pattern 'none' of --exclude" in result.stderr
    data = read_config(here / "checkpoints/texts").data
    assert (data.exclude, data.skip_bad, data.documents) == (("*.log", "none"), True, 2)
    assert data.characters == sum(map(len, good.values()))
    shutil.rmtree(cache_root())
    run_ok("train", "--resume", "checkpoints/texts", "texts", "--steps", 2)
    (whole,) = records(run_ok("eval", *(f"texts/{name}" for name in good), "--json"))
    (left,) = records(run_ok("eval", "texts", "--exclude", "*.log", "--skip-bad", "--json"))
    assert left == whole | {"text": "texts"}
    evaluation = tinylm_package.load("checkpoints/texts").evaluate("texts", exclude=("*.log",), skip_bad=True)
    assert evaluation.loss == pytest.approx(whole["loss"], abs=1e-6)
    run_ok("train-tokenizer", "texts", "--skip-bad", "--exclude", "*.log", "--kind", "char")
    assert set(Tokenizer.load(here / "tokenizer.json").unknown_characters("#~|é")) == set("#~|é")
    monkeypatch.setattr(corpus_module, "MAX_CHECKED_BYTES", 0)  # in a large corpus, the first error is shown
    shown = tinylm("train", "texts/a.txt", "texts/d.txt.gz", *ONE_STEP)
    assert_error(shown, 2, "d.txt.gz is damaged or not gzip data", "To leave them out", sentences=3)
    assert_error(tinylm("train", "texts/c.txt", "--skip-bad", *ONE_STEP), 2, "c.txt is not valid UTF-8")


def test_a_text_with_other_line_ends_is_the_same_text_with_one_note(here: Path) -> None:
    """In training, when resuming, in eval and as a prompt."""
    text = story(900).replace(". ", ".\n")
    for name, end in (("lf", "\n"), ("crlf", "\r\n"), ("cr", "\r")):
        (here / f"{name}.txt").write_bytes(text.replace("\n", end).encode())
        note = f"{text.count(chr(10))} line ends of the text, \\r\\n or \\r, are read as \\n."
        for file in (f"{name}.txt", "-"):
            options = ("--out", name, "--force", *ONE_STEP)
            result = run_ok("train", file, *options, "--tokenizer", "char", stdin=(here / f"{name}.txt").read_bytes())
            assert result.stderr.count(note) == (name != "lf")
    fingerprints = {read_config(here / name).data.fingerprint for name in ("lf", "crlf", "cr")}
    assert len(fingerprints) == 1
    results = [records(run_ok("eval", f"{name}.txt", "-m", "crlf", "--json"))[0] for name in ("lf", "crlf", "cr")]
    assert [result | {"text": ""} for result in results] == [results[0] | {"text": ""}] * 3
    assert results[0]["bytes"] == len(text.encode()) - len(text[0].encode())  # of the text with line feeds
    prompts = ["the\nsea", "the\r\nsea", "the\rsea"]
    assert len({run_ok("sample", "-m", "crlf", "-p", prompt, "-n", 5, "-t", 0).stdout for prompt in prompts}) == 1


def test_html_is_trained_on_with_a_note_unless_its_format_is_given(here: Path) -> None:
    page = f"<!DOCTYPE html>\n<html><body><p>{story(2000)}</p></body></html>\n"
    for name in ("a.html", "b.HTM", "saved page"):
        (here / name).write_text(page)
    note = "is HTML, and is read with its tags. For the text alone, convert it first, for example with pandoc -t plain."
    for file in ("a.html", "saved page"):
        assert f"{file} {note}" in run_ok("train", file, "--dry-run", *ONE_STEP).stderr
    assert note not in run_ok("train", "a.html", "--format", "text", "--dry-run", *ONE_STEP).stderr
    stderr = run_ok("train", "a.html", "b.HTM", "--dry-run", *ONE_STEP).stderr
    assert f"a.html (and 1 more) {note}" in stderr


# Formats


def test_the_format_is_recorded_and_options_from_variables_apply_only_where_they_fit(here: Path, corpus: Path) -> None:
    (here / "names").write_text("\n".join(story(2000).split()))
    run_ok("train", "names", "--format", "lines", *ONE_STEP)
    data = read_config(here / "checkpoints/names").data
    assert (data.format, data.documents) == ("lines", len(story(2000).split()))
    shutil.rmtree(cache_root())
    run_ok("train", "--resume", "checkpoints/names", "names", "--steps", 2)
    assert "tokens" in records(run_ok("eval", "-m", "checkpoints/names", "names", "--format", "lines", "--json"))[0]
    env = {"TINYLM_TRAIN_TEXT_KEY": "body", "TINYLM_TRAIN_TRAIN_ON": "last"}
    run_ok("train", corpus, *ONE_STEP, env=env)
    env["TINYLM_TRAIN_FORMAT"] = "lines"
    run_ok("train", pairs_file(here / "p.tsv"), "--out", "pairs", "--steps", 1, *BOTH, env=env)
    (here / "a.jsonl").write_text(JSONL)
    run_ok("train", "a.jsonl", *ONE_STEP, env={"TINYLM_TRAIN_TEXT_KEY": "body"})
    assert read_config(here / "checkpoints/a").data.documents == 3


def test_train_tokenizer_reads_pairs_with_format_pairs(here: Path) -> None:
    pairs = pairs_file(here / "p.tsv")
    run_ok("train-tokenizer", pairs, "--kind", "char", "--format", "pairs", "--out", "pairs.json")
    assert Tokenizer.load(here / "pairs.json").unknown_characters("\t\n") == "\t\n"
    result = run_ok("train-tokenizer", pairs, "--kind", "char", "--out", "text.json")
    assert "--format pairs reads TSV as sources and targets." in result.stderr
    run_ok("train-tokenizer", pairs, "--format", "pairs", "--vocab-size", 300, "--out", "bpe.json")
    bpe = ("bpe" if option == "char" else option for option in BOTH)
    run_ok("train", pairs, "--out", "run", "--steps", 1, *bpe, "--vocab-size", 300)
    assert (here / "bpe.json").read_bytes() == (here / "run/tokenizer.json").read_bytes()


# Unknown characters


def test_unknown_characters_are_skipped_in_training_when_resuming_and_in_eval(run: Path, here: Path) -> None:
    text = story(1500).replace("sea", "séa").replace("joy", "jöy")
    skipped = text.replace("é", "").replace("ö", "")
    (here / "unseen.txt").write_text(text)
    (here / "skipped.txt").write_text(skipped)
    count = len(text) - len(skipped)
    message = f"{count} characters of the text without an id, 2 different ones ('é' (U+00E9), 'ö' (U+00F6))"
    options = ("--steps", 1, "--batch-size", 4, "--init-from", run, "--out")
    result = run_ok("train", "unseen.txt", *options, "new", "--unknown", "skip")
    assert f"Warning: Skipped {message}." in result.stderr
    data = read_config(here / "new").data
    assert (data.unknown, data.characters) == ("skip", len(skipped))
    run_ok("train", "skipped.txt", *options, "plain")
    assert read_config(here / "plain").data.fingerprint == data.fingerprint
    shutil.rmtree(cache_root())
    run_ok("train", "--resume", "new", "unseen.txt", "--steps", 2)
    assert_error(tinylm("eval", "-m", run, "unseen.txt"), 2, "--unknown skip", "--extend-vocab")
    result = run_ok("eval", "-m", run, "unseen.txt", "--unknown", "skip", "--json")
    assert message in result.stderr
    (plain,) = records(run_ok("eval", "-m", run, "skipped.txt", "--json"))
    assert records(result) == [plain | {"text": "unseen.txt"}]


def test_a_pair_with_an_empty_side_after_skipping_is_dropped(here: Path) -> None:
    pairs = [(a, b) for a, b in REVERSED for _ in range(4)]
    run_ok("train", pairs_file(here / "p.tsv", pairs), "--out", "base", "--steps", 1, *BOTH)
    source, target = pairs[0]
    changed = [("éé", target), (source, "é"), (f"é{source}", f"{target}é"), *pairs]
    options = ("--init-from", "base", "--steps", 1, "--batch-size", 4, "--unknown", "skip")
    run_ok("train", pairs_file(here / "q.tsv", changed), "--out", "new", *options)
    run_ok("train", pairs_file(here / "r.tsv", [pairs[0], *pairs]), "--out", "same", *options)
    assert read_config(here / "new").data.fingerprint == read_config(here / "same").data.fingerprint


# A text per line


NAMES = "ab\ncd\nef\ngh\n" * 30


def test_a_model_of_lines_prints_one_text_per_line_and_ends_it_where_it_ends(here: Path) -> None:
    """Greedy text would not be one of the lines if sampling went on after the end of a line."""
    (here / "names.txt").write_text(NAMES)
    run_ok("train", "names.txt", "--format", "lines", "--steps", 150, "--lr", 0.01, *TINY)
    options = ("sample", "-N", 20, "--seed", 1, "-n", 50)
    printed = run_ok(*options).stdout
    assert len(printed.splitlines()) == 20 and printed.endswith("\n")
    assert sum(line in NAMES.split() for line in printed.splitlines()) >= 15
    texts = [record["text"] for record in records(run_ok(*options, "--json"))]
    assert printed.splitlines() == texts
    assert run_ok(*options, "--separator", "|").stdout == "|".join(texts) + "\n"


def test_a_list_of_short_lines_gets_the_command_for_texts_of_one_line(here: Path) -> None:
    (here / "my names.txt").write_text(NAMES)
    (here / "prose.txt").write_text(story(2000))
    hint = "my names.txt is a list of short lines. If each is a text of its own, such as a name: tinylm train"
    command = f"{hint} 'my names.txt' --format lines"
    plan = ("train", "my names.txt", "--dry-run", *ONE_STEP)
    assert run_ok(*plan).stderr.splitlines().count(command) == 1
    for words in ((*plan, "--format", "text"), (*plan, "--quiet"), ("train", "prose.txt", *plan[2:])):
        assert "list of short lines" not in run_ok(*words).stderr


def test_stdout_is_the_path_and_one_character_is_enough(corpus: Path, here: Path) -> None:
    result = run_ok("train-tokenizer", corpus)
    assert result.stdout == "tokenizer.json\n"
    assert "Vocabulary size: " in result.stderr
    assert Tokenizer.load(here / "tokenizer.json").kind == "bpe"
    assert run_ok("train-tokenizer", corpus, "-o", "t.json", "-q").stderr == ""
    (here / "one.txt").write_text("x")
    run_ok("train-tokenizer", "one.txt", "--kind", "char", "--force")
    assert Tokenizer.load(here / "tokenizer.json").unknown_characters(story(100))[0] == "t"


def test_a_tokenizer_decodes_what_it_encodes_and_is_the_one_that_train_makes_or_takes(corpus: Path, here: Path) -> None:
    text = corpus.read_text()
    for kind, size in (("char", len(set(text)) + 1), ("bpe", 270)):
        options = ("--vocab-size", size) if kind == "bpe" else ()
        (record,) = records(run_ok("train-tokenizer", corpus, "--kind", kind, *options, "--out", kind, "--json"))
        assert record == {"tokenizer": kind, "kind": kind, "vocab_size": size}
        tokenizer = Tokenizer.load(here / kind)
        assert tokenizer.vocab_size == size
        assert tokenizer.decode(tokenizer.encode(text)) == text
    run_ok("train-tokenizer", corpus, "--vocab-size", 300)
    for name, choice in (("made", ("bpe", "--vocab-size", 300)), ("taken", ("tokenizer.json",))):
        run_ok("train", corpus, "--out", name, "--tokenizer", *choice, "--steps", 1, *TINY)
        assert (here / "tokenizer.json").read_bytes() == (here / name / "tokenizer.json").read_bytes()


def test_a_full_disk_leaves_the_old_file_alone(corpus: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "tokenizer.json").write_text('{"version": "1.0", "truncation": null, "precious": true}')
    before = snapshot(here)
    written = Path.write_text

    def full(self: Path, text: str, **how: str) -> int:
        written(self, text[:10], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    result = tinylm("train-tokenizer", corpus, "--force")
    assert_error(result, 1, "Cannot write tokenizer.json: No space left on device")
    assert snapshot(here) == before
