import re
from pathlib import Path

from tinylm import kernels

DECISIONS = {path.name[:3] for path in (Path(__file__).parents[2] / "docs" / "decisions").glob("*.md")}


def rows() -> dict[str, list[str]]:
    """The cells of each row of the table by its first cell: module, needs, gain, fallback."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in [line for line in (kernels.__doc__ or "").splitlines() if "|" in line][2:]:
        cells = [cell.strip() for cell in line.split("|")]
        name = cells[0] or name  # a line without a module continues the row above
        found[name] = [f"{old} {new}".strip() for old, new in zip(found.get(name, [""] * 4), cells, strict=True)]
    return found


def test_the_table_of_kernels_lists_every_module_and_no_other() -> None:
    listed = {name.split(",")[0] for name in rows()}
    assert listed == {path.stem for path in Path(kernels.__file__).parent.glob("*.py")} - {"__init__"}


def test_each_row_names_a_gain_with_its_decision_or_the_row_that_has_it() -> None:
    for name, (_, _, gain, _) in rows().items():
        decisions = re.findall(r"\((\d{3})\)", gain)
        other = re.fullmatch(r"see (\w+)", gain)
        assert set(decisions) <= DECISIONS, name
        assert decisions or (other and other[1] in rows() and other[1] != name), name
