"""A tokenizer file from a stranger cannot crash, hang or abort the process, and those of published models load."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.forgeries import forged_tokenizers
from tests.published import PATTERNS, TEXT, published
from tinylm.errors import TinyLMError
from tinylm.interrupts import Interrupted
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer
from tinylm.text.tokenizer_file import LibraryError, is_linear, library_errors, validate

REPOSITORY = Path(__file__).parents[2]
PUBLISHED = published()


def saved(tmp_path: Path, layout: dict[str, Any]) -> Path:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(layout), encoding="utf-8")
    return file


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_tokenizer_loads_and_gives_the_ids_and_text_of_the_library(model: str, tmp_path: Path) -> None:
    layout = PUBLISHED[model]
    library = tokenizers.Tokenizer.from_str(json.dumps(layout))
    library.encode_special_tokens = True
    tokenizer = Tokenizer.load(saved(tmp_path, layout))
    for text in (TEXT, "", " the  cat", f"a {END_OF_TEXT} b"):
        ids = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == ids
        assert tokenizer.decode(ids) == library.decode(ids)


def steps_kept(layout: dict[str, Any]) -> dict[str, Any]:
    parts = ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens")
    return {part: layout[part] for part in parts}


@pytest.mark.parametrize("model", PUBLISHED)
def test_validation_changes_nothing_of_a_published_tokenizer(model: str) -> None:
    layout = PUBLISHED[model]
    valid = validate(json.dumps(layout))
    assert steps_kept(valid) == steps_kept(layout)
    assert valid["model"]["vocab"] == layout["model"]["vocab"]


def test_a_file_that_was_saved_by_the_library_loads_with_every_kind_of_step(tmp_path: Path) -> None:
    """The library adds fields with newer versions; what it writes has to pass."""
    for model, layout in PUBLISHED.items():
        file = tmp_path / f"{model}.json"
        tokenizers.Tokenizer.from_str(json.dumps(layout)).save(str(file))
        Tokenizer.load(file)


# Forged files, each tried in a process that may not crash or hang.


def tried(files: list[Path]) -> list[str]:
    """One line per file: what became of it."""
    command = [sys.executable, "-m", "tests.text.try_tokenizers", *map(str, files)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr)
    assert not done.stderr  # no panic of the library either
    return done.stdout.splitlines()


def test_forged_tokenizers_are_refused_or_used_and_never_crash_hang_or_panic(tmp_path: Path) -> None:
    files = []
    for number, (_, text) in enumerate(itertools.islice(forged_tokenizers(0), 160)):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(text, encoding="utf-8")
    lines = tried(files)
    assert len(lines) == len(files)
    assert sum(": refused: " in line for line in lines) > 60
    assert sum(": used, 0 texts failed" in line for line in lines) > 20


def test_a_seed_always_forges_the_same_files() -> None:
    first, second = (dict(itertools.islice(forged_tokenizers(7), 120)) for _ in range(2))
    assert first == second
    assert len(first) == 120
    assert first != dict(itertools.islice(forged_tokenizers(8), 120))


# What is refused, and how.


def refusal(tmp_path: Path, **changes: Any) -> str:
    layout = {**PUBLISHED["words"], **changes}
    with pytest.raises(TinyLMError) as caught:
        Tokenizer.load(saved(tmp_path, layout))
    return str(caught.value)


def test_an_error_names_the_file_the_reason_and_what_to_do(tmp_path: Path) -> None:
    message = refusal(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    assert message == (
        f"{tmp_path / 'tokenizer.json'} is not a tokenizer that can be used: its normalizer has a step of the kind "
        "'Precompiled', which is not supported. Restore the file, or use another tokenizer."
    )


@pytest.mark.parametrize("i", [-1, 1 << 19, 2**31, 2**32 - 1, 2**32, 2**64, 1.0, True, "7", None])
def test_an_id_that_is_no_small_integer_is_refused(i: Any, tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": i}, "unk_token": "a"}
    assert "the id of its token 'b' is " in refusal(tmp_path, model=model)
    token = {**PUBLISHED["gpt2"]["added_tokens"][0], "content": "<x>", "id": i}
    assert "the id of its token '<x>' is " in refusal(tmp_path, added_tokens=[token])


@pytest.mark.parametrize("score", [10**400, -(10**400), "1", None, True, [], 1e6])
def test_a_score_that_is_no_moderate_number_is_refused(score: Any, tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [["a", 0], ["b", score]], "unk_id": None}
    assert "which is not a token with its score" in refusal(tmp_path, model=model)


@pytest.mark.parametrize(
    "value", ["x" * 10**6, [[0] * 1000] * 1000, {"x": {"x": {"x": {"x": 0}}}}, 10**4000, "\x1b[31m"]
)
def test_a_message_is_short_and_without_control_characters_whatever_the_value(value: Any, tmp_path: Path) -> None:
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        message = refusal(tmp_path, **{part: {"type": "Replace", "pattern": value, "content": ""}})
        assert len(message) < 600 + len(str(tmp_path))
        assert message.isprintable()


def test_deep_values_are_refused_with_a_reason(tmp_path: Path) -> None:
    """Deep enough for what follows the parser to fail at it."""
    for depth in range(10, 1200, 70):
        file = tmp_path / "deep.json"
        deep = "[" * depth + "]" * depth
        file.write_text(json.dumps({**PUBLISHED["words"], "model": "DEEP"}).replace('"DEEP"', f'{{"merges": {deep}}}'))
        with pytest.raises(TinyLMError, match="is not a tokenizer that can be used"):
            Tokenizer.load(file)


def test_ids_that_the_library_would_change_are_refused(tmp_path: Path) -> None:
    token = {**PUBLISHED["gpt2"]["added_tokens"][0], "content": "<x>", "id": 9}
    assert "the token '<x>' has the id 9 in the file, and 3 once it is loaded" in refusal(
        tmp_path, added_tokens=[token]
    )


def test_a_byte_pair_models_dropout_is_left_out_so_that_encoding_is_not_random(tmp_path: Path) -> None:
    layout = {**PUBLISHED["gpt2"], "model": {**PUBLISHED["gpt2"]["model"], "dropout": 0.9}}
    plain = Tokenizer.load(saved(tmp_path, PUBLISHED["gpt2"])).encode(TEXT).tolist()
    tokenizer = Tokenizer.load(saved(tmp_path, layout))
    assert all(tokenizer.encode(TEXT).tolist() == plain for _ in range(5))


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "large.json"
    with file.open("wb") as sparse:
        sparse.truncate((1 << 26) + 1)
    with pytest.raises(TinyLMError, match="larger than 64 MB"):
        Tokenizer.load(file)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_the_patterns_of_published_tokenizers_take_linear_time(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern", [r"\s+", r"\d", "[0-9]+", "-", r"\p{P}", r" ?\w+|\n", "a{2,3}b+", r"[^\]\s]+", "x+y*z?", ".", "漢"]
)
def test_a_simple_pattern_takes_linear_time(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "|", "a|", "|a", "(a+)+$", "(a|a)*b", "a*a*b", "a+b", ".*x", r"\s*x", r"\s+$", r"\s*[\r\n]+", "a?a?a?b"),
        *(r"(\w)\1", "(?<=a+)b", "(?=a)", r"\b\w+\b", "^a", "a$", r"\R+", r"\X", "[a", "(", "a)", "[[a]b]+", "[a&&b]"),
        *("a{99}", "a{1,99}", "a{2,}b", "a{1}{2}", "a**", "x|" * 40 + "x", "x" * 1001, "\\", r"\p{", r"\s+(?!\S)+"),
    ],
)
def test_any_other_pattern_is_not_taken_to_be_linear(pattern: str) -> None:
    assert not is_linear(pattern)


def test_a_pattern_of_any_characters_is_judged_at_once() -> None:
    for part in ("a", "a?", "a|", "(", "[a", "\\", "[\\", "a{1,2}", "[a]?", "a+a*", "'s|", "a{", r"\s*[\r\n]|"):
        is_linear(part * (1000 // len(part)))  # the suite's limit would stop it


# What the library still raises.


class PanicException(BaseException):
    """As pyo3's: not an Exception, and known by its module."""

    __module__ = "pyo3_runtime"


class Panicking:
    """A library that fails at everything it is asked."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        raise self.error

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        raise self.error


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), ValueError("x"), OverflowError("y" * 10_000)])
def test_a_panic_while_text_is_encoded_or_decoded_is_an_error_of_tinylm(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(saved(tmp_path, PUBLISHED["words"]))
    monkeypatch.setattr(tokenizer, "_library", Panicking(error))
    with pytest.raises(TinyLMError, match=r"cannot encode the text \(.{1,120}\)\. Use another"):
        tokenizer.encode("the cat")
    with pytest.raises(TinyLMError, match=r"cannot decode the tokens \(.{1,120}\)\. Use another"):
        tokenizer.decode([1])
    with pytest.raises(TinyLMError, match="cannot decode"):
        tokenizer.stream_decoder().finish()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, Interrupted])
def test_an_interrupt_and_a_lack_of_memory_stay_what_they_are(error: type[BaseException]) -> None:
    with pytest.raises(error), library_errors():
        raise error


def test_a_real_panic_of_the_library_is_caught(capfd: pytest.CaptureFixture[str]) -> None:
    layout = {**PUBLISHED["words"], "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    with pytest.raises(LibraryError, match="Precompiled"), library_errors():
        tokenizers.Tokenizer.from_str(json.dumps(layout))
    capfd.readouterr()  # what the panic printed


def test_a_decoder_that_rewrites_earlier_text_is_held_back_until_the_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(saved(tmp_path, PUBLISHED["bert"]))
    ids = tokenizer.encode("the cat's hat, don't they?").tolist()
    stream = tokenizer.stream_decoder()
    shown = "".join([*(stream.push(i) for i in ids), stream.finish()])
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", tokenizer.decode(ids))
