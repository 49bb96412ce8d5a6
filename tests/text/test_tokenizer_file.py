"""An untrusted tokenizer.json cannot crash, hang or abort the process, and those of published models load."""

import faulthandler
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tokenizers

from tests.forgeries import forged_tokenizers
from tests.published import PATTERNS, TEXT, published
from tests.shell import ROOT
from tinylm.errors import TinyLMError
from tinylm.system.process_signals import Interrupted
from tinylm.text.decoding import decode_after, stream_decoder
from tinylm.text.tokenizer import END_OF_TEXT, Tokenizer
from tinylm.text.tokenizer_file import is_linear, validate_tokenizer
from tinylm.text.tokenizer_libraries import TokenizerLibraryError, wrap_library_errors

PUBLISHED = published()


def saved(tmp_path: Path, spec: dict[str, Any]) -> Path:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(spec), encoding="utf-8")
    return file


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_tokenizer_loads_and_gives_the_ids_and_text_of_the_library(model: str, tmp_path: Path) -> None:
    spec = PUBLISHED[model]
    library = tokenizers.Tokenizer.from_str(json.dumps(spec))
    library.save(str(tmp_path / "saved.json"))  # newer versions of the library add fields, which are accepted
    Tokenizer.load(tmp_path / "saved.json")
    library.encode_special_tokens = True
    tokenizer = Tokenizer.load(saved(tmp_path, spec))
    for text in (TEXT, "", " the  cat", f"a {END_OF_TEXT} b"):
        ids = library.encode(text, add_special_tokens=False).ids
        assert (tokenizer.encode(text).tolist(), tokenizer.decode(ids)) == (ids, library.decode(ids))
    valid = validate_tokenizer(json.dumps(spec))
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder", "added_tokens"):
        assert valid[part] == spec[part]
    assert valid["model"]["vocab"] == spec["model"]["vocab"]


def test_forged_tokenizers_are_refused_or_used_and_never_crash_hang_or_panic(tmp_path: Path) -> None:
    files = []
    for number, (_, text) in enumerate(itertools.islice(forged_tokenizers(0), 160)):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "tests.text.test_tokenizer_file", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = done.stdout.splitlines()  # one per file, which says whether it was refused or used
    assert done.returncode == 0, (lines[-1:], done.stderr)
    assert not done.stderr  # no panic of the library either
    assert len(lines) == len(files) and sum(": refused: " in line for line in lines) > 60
    assert sum(": used, 0 texts failed" in line for line in lines) > 20


TEXTS = (
    *(TEXT, "", "a" * 3000 + "!", " " * 3000 + "x", "漢" * 1000, "the cat <|endoftext|> [UNK] <unk> <x>"),
    *("\0\ud7ff\U0010ffff", "1" * 500),
)


def use(path: Path) -> str:
    """Run in the other process, which any error but TinyLMError ends."""
    try:
        tokenizer = Tokenizer.load(path)
    except TinyLMError as error:
        assert len(str(error)) < 600 + len(str(path)), "a long message"
        return f"refused: {error}"
    tokenizer.check_encoder(TEXTS)
    failed = 0
    for text in TEXTS:
        try:
            ids = tokenizer.encode(text).tolist()
            assert all(0 <= i < tokenizer.vocab_size for i in ids)
            tokenizer.decode(ids)
            tokenizer.decoded_size(ids)
            stream = stream_decoder(tokenizer, ids[:10])
            for i in ids[:200]:
                stream.decode([i])
            stream.finish()
            tokenizer.unknown_characters(text)
            tokenizer.safe_split_point(text)
        except TinyLMError:
            failed += 1
    return f"used, {failed} texts failed"


def load_error(tmp_path: Path, **changes: Any) -> str:
    spec = {**PUBLISHED["words"], **changes}
    with pytest.raises(TinyLMError) as caught:
        Tokenizer.load(saved(tmp_path, spec))
    return str(caught.value)


def test_an_error_names_the_file_the_reason_and_what_to_do_short_and_printable_for_any_value(tmp_path: Path) -> None:
    """A file that is too large is not parsed."""
    message = load_error(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    assert message == (
        f"Cannot use {tmp_path / 'tokenizer.json'} as a tokenizer: its normalizer has a step of type 'Precompiled', "
        "which is not supported. Restore the file, or use another tokenizer."
    )
    for value in ("x" * 10**6, [[0] * 1000] * 1000, {"x": {"x": {"x": {"x": 0}}}}, 10**4000, "\x1b[31m"):
        for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
            message = load_error(tmp_path, **{part: {"type": "Replace", "pattern": value, "content": ""}})
            assert len(message) < 600 + len(str(tmp_path)) and message.isprintable()
    file = tmp_path / "large.json"
    with file.open("wb") as sparse:
        sparse.truncate((1 << 26) + 1)
    with pytest.raises(TinyLMError, match="larger than 64 MB"):
        Tokenizer.load(file)


def test_ids_and_scores_that_are_not_small_numbers_are_refused(tmp_path: Path) -> None:
    special = {**PUBLISHED["gpt2"]["added_tokens"][0], "content": "<x>"}
    for i in (-1, 1 << 19, 2**31, 2**32 - 1, 2**32, 2**64, 1.0, True, "7", None):
        model = {"type": "WordLevel", "vocab": {"a": 0, "b": i}, "unk_token": "a"}
        assert "the id of its token 'b' is " in load_error(tmp_path, model=model)
        assert "the id of its token '<x>' is " in load_error(tmp_path, added_tokens=[{**special, "id": i}])
    for score in (10**400, -(10**400), "1", None, True, [], 1e6):
        model = {"type": "Unigram", "vocab": [["a", 0], ["b", score]], "unk_id": None}
        assert "which is not a token with its score" in load_error(tmp_path, model=model)
    changed = "its token '<x>' has the id 9 in the file, but 3 once it is loaded"  # by the library
    assert changed in load_error(tmp_path, added_tokens=[{**special, "id": 9}])


def test_the_dropout_of_a_bpe_model_is_removed_so_that_encoding_is_deterministic(tmp_path: Path) -> None:
    spec = {**PUBLISHED["gpt2"], "model": {**PUBLISHED["gpt2"]["model"], "dropout": 0.9}}
    plain = Tokenizer.load(saved(tmp_path, PUBLISHED["gpt2"])).encode(TEXT).tolist()
    tokenizer = Tokenizer.load(saved(tmp_path, spec))
    assert all(tokenizer.encode(TEXT).tolist() == plain for _ in range(5))


class PanicException(BaseException):
    """Like pyo3's PanicException: not a subclass of Exception, recognised by its module."""

    __module__ = "pyo3_runtime"


def test_panics_of_a_library_are_errors_and_interrupts_pass(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.load(saved(tmp_path, PUBLISHED["words"]))
    for error in (PanicException("index out of bounds"), ValueError("x"), OverflowError("y" * 10_000)):
        tokenizer._library = Mock(**{"encode.side_effect": error, "decode.side_effect": error})
        with pytest.raises(TinyLMError, match=r"cannot encode the text \(.{1,120}\)\. Use another"):
            tokenizer.encode("the cat")
        with pytest.raises(TinyLMError, match=r"cannot decode the tokens \(.{1,120}\)\. Use another"):
            tokenizer.decode([1])
        with pytest.raises(TinyLMError, match="cannot decode"):
            decode_after(tokenizer, [], [1])
    spec = {**PUBLISHED["words"], "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    with pytest.raises(TokenizerLibraryError, match="Precompiled"), wrap_library_errors():
        tokenizers.Tokenizer.from_str(json.dumps(spec))
    capfd.readouterr()  # discard the message that the panic printed
    for passing in (KeyboardInterrupt, SystemExit, MemoryError, Interrupted):
        with pytest.raises(passing), wrap_library_errors():
            raise passing


SIMPLE = (r"\s+", r"\d", "[0-9]+", "-", r"\p{P}", r" ?\w+|\n", "a{2,3}b+", r"[^\]\s]+", "x+y*z?", ".", "漢")
NOT_LINEAR = (
    *("", "|", "a|", "|a", "(a+)+$", "(a|a)*b", "a*a*b", "a+b", ".*x", r"\s*x", r"\s+$", r"\s*[\r\n]+", "a?a?a?b"),
    *(r"(\w)\1", "(?<=a+)b", "(?=a)", r"\b\w+\b", "^a", "a$", r"\R+", r"\X", "[a", "(", "a)", "[[a]b]+", "[a&&b]"),
    *("a{99}", "a{1,99}", "a{2,}b", "a{1}{2}", "a**", "x|" * 40 + "x", "x" * 1001, "\\", r"\p{", r"\s+(?!\S)+"),
)


def test_the_patterns_of_published_tokenizers_and_simple_ones_are_linear_and_no_others() -> None:
    assert [pattern for pattern in (*PATTERNS.values(), *SIMPLE) if not is_linear(pattern)] == []
    assert [pattern for pattern in NOT_LINEAR if is_linear(pattern)] == []
    for part in ("a", "a?", "a|", "(", "[a", "\\", "[\\", "a{1,2}", "[a]?", "a+a*", "'s|", "a{", r"\s*[\r\n]|"):
        is_linear(part * (1000 // len(part)))  # stopped by the suite's time limit otherwise


if __name__ == "__main__":
    for name in sys.argv[1:]:
        faulthandler.dump_traceback_later(20, exit=True)
        print(f"{Path(name).name}: ", end="", flush=True)
        print(use(Path(name)).encode("ascii", "backslashreplace").decode(), flush=True)
        faulthandler.cancel_dump_traceback_later()
