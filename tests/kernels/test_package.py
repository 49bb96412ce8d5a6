"""The table of kernels, and tinylm with a version of torch that lacks all private names that kernels use."""

import re
import sys
from pathlib import Path

import pytest

from tests.shell import TINY, run_child, story
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


WITHOUT_PRIVATE_NAMES = """
import sys
import torch

from tests.kernels.absent import NamespaceWithout

torch.ops.mkldnn = NamespaceWithout(torch.ops.mkldnn, "_linear_pointwise")
torch.ops.aten = NamespaceWithout(torch.ops.aten, "native_layer_norm_backward")
for name in ("get_capabilities", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
    if hasattr(torch.cpu, name):
        delattr(torch.cpu, name)

from tinylm.__main__ import main

sys.argv = ["tinylm", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_models_are_trained_and_sampled_without_the_private_names(dtype: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text(story(3000))
    train = f"train corpus.txt --out run --quiet --steps 2 --dropout 0.1 --dtype {dtype}".split()
    sample = ["sample", "--model", "run", "--max-tokens", "3", "--engine", "torch", "--quiet"]
    for command in ([*train, *TINY], sample):
        result = run_child([sys.executable, "-c", WITHOUT_PRIVATE_NAMES, *command], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
