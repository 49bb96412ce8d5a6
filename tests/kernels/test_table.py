from pathlib import Path

from tinylm import kernels


def test_the_table_of_kernels_lists_every_module_and_no_other() -> None:
    rows = [line.split("|")[0].split(",")[0].strip() for line in (kernels.__doc__ or "").splitlines() if "|" in line]
    listed = {row for row in rows[2:] if row}
    assert listed == {path.stem for path in Path(kernels.__file__).parent.glob("*.py")} - {"__init__"}
