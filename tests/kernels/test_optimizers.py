"""References: `sys.modules` for the imports, and torch's optimizers for the updates."""

import inspect
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.kernels.absent import loaded_again
from tests.shell import TINY, run_child, story
from tinylm.kernels import graphs

TRAINING = """
import sys
from tinylm.__main__ import main

sys.argv = ["tinylm", "train", "corpus.txt", "--out", "run", "--quiet", *sys.argv[1:]]
try:
    main()
finally:
    print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "dropout"), [("muon", 0.1), ("adamw", 0.0), ("adam", 0.1)])
def test_training_does_not_import_the_compiler_if_nothing_is_compiled(
    optimizer: str, dropout: float, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text(story(3000))
    words = f"--steps 4 --eval-every 2 --save-every 3 --optimizer {optimizer} --dropout {dropout}".split()
    result = run_child([sys.executable, "-c", TRAINING, *TINY, *words], cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "run\nFalse\n"), result.stderr


@pytest.fixture(params=["unwrapped", "nothing to unwrap"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if request.param == "unwrapped":
        return graphs
    for name in ("add_param_group", "zero_grad"):
        monkeypatch.setattr(torch.optim.Optimizer, name, inspect.unwrap(getattr(torch.optim.Optimizer, name)))
    return loaded_again(graphs)


def test_updates_equal_those_of_the_optimizers_of_torch(kernel: ModuleType) -> None:
    def trained(module: object, name: str, fused: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.randn(3, 4, requires_grad=True), torch.randn(5, requires_grad=True)]
        groups = [{"params": weights[:1], "weight_decay": 0.3}, {"params": weights[1:]}]
        optimizer = getattr(module, name)(groups, lr=0.1, betas=(0.8, 0.95), fused=fused)
        for _ in range(3):
            sum((weight**4).sum() for weight in weights).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert all(weight.grad is None for weight in weights)
        return weights

    for case in itertools.product(("Adam", "AdamW"), (True, False)):
        for ours, torchs in zip(trained(kernel, *case), trained(torch.optim, *case), strict=True):
            assert torch.equal(ours, torchs), case
