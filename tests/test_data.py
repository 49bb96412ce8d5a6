import subprocess
import sys
from pathlib import Path

from tests.shell import CHILD_LIMIT

DATA = Path(__file__).parent.parent / "data"


def test_the_corpus_is_what_its_script_makes() -> None:
    made = subprocess.run(
        [sys.executable, str(DATA / "make_corpus.py")], capture_output=True, check=True, timeout=CHILD_LIMIT
    ).stdout
    assert made == (DATA / "corpus.txt").read_bytes()
