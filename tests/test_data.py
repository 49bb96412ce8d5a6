"""The bundled corpus: its script reproduces it, and its text is consistent."""

import re
import subprocess
import sys
from pathlib import Path

from tests.shell import CHILD_LIMIT

DATA = Path(__file__).parent.parent / "data"
CORPUS = (DATA / "corpus.txt").read_text("ascii")


def test_the_script_reproduces_the_corpus() -> None:
    made = subprocess.run(
        [sys.executable, str(DATA / "make_corpus.py")], capture_output=True, check=True, timeout=CHILD_LIMIT
    ).stdout
    assert made == (DATA / "corpus.txt").read_bytes()


def test_the_corpus_is_without_notation_its_ledgers_add_up_and_its_people_have_one_trade() -> None:
    assert not re.search(r"[{}<>\[\]~*^|#@$/]", CORPUS)
    assert not re.search(r" [,.;:!?]|\. [a-z]|\ba (?!one|once|eu|ewe)[aeio]", CORPUS.replace("\n", " "))
    ledgers = re.findall(r"^Sold to .*\n\n((?:\d+ .* at \d+ +\d+\n)+)Total +(\d+)\n(.*)\n?(.*)", CORPUS, re.MULTILINE)
    assert len(ledgers) > 50
    for rows, total, payment, rest in ledgers:
        sums = [[int(number) for number in re.findall(r"\d+", row)] for row in rows.splitlines()]
        assert all(number * price == cost for number, price, cost in sums)
        assert sum(cost for _, _, cost in sums) == int(total)
        paid = int(payment.split()[-1])
        difference = int(rest.split()[-1]) if rest else 0
        assert paid - difference == int(total) if rest.startswith("Change") else paid + difference == int(total)
    facts = re.findall(r"\n\n\n([A-Z]+) ([A-Z]+)\n\n\w+ \w+ is the ([\w\s-]+?)\s+of\s+([\w\s]+?)\.", CORPUS)
    assert len(facts) > 10
    assert len({fact[:2] for fact in facts}) == len({tuple(" ".join(part.split()) for part in fact) for fact in facts})
