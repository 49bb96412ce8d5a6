"""Training and sampling with a version of torch that lacks all private names that kernels use."""

import sys
from pathlib import Path

import pytest

from tests.shell import TINY, run_child, story

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
