"""Loads and uses each tokenizer file named on the command line; run by a test in a process of its own.

Prints one line per file: its name, and whether it was refused or used. Any error but TinyLMError ends the process.
"""

import faulthandler
import sys
from pathlib import Path

from tests.published import TEXT
from tinylm.errors import TinyLMError
from tinylm.text.decoding import stream_decoder
from tinylm.text.tokenizer import Tokenizer

TEXTS = (
    TEXT,
    "",
    "a" * 3000 + "!",
    " " * 3000 + "x",
    "漢" * 1000,
    "the cat <|endoftext|> [UNK] <unk> <x>",
    "\0\ud7ff\U0010ffff",
    "1" * 500,
)


def use(path: Path) -> str:
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


if __name__ == "__main__":
    for name in sys.argv[1:]:
        faulthandler.dump_traceback_later(20, exit=True)
        print(f"{Path(name).name}: ", end="", flush=True)
        print(use(Path(name)).encode("ascii", "backslashreplace").decode(), flush=True)
        faulthandler.cancel_dump_traceback_later()
