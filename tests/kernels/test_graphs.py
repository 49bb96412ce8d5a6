"""Compiled modules that run eagerly, and optimizers that import no compiler.

References: `sys.modules` for the imports, and torch's optimizers for the updates.
"""

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
from tinylm.kernels.graphs import discard_compiled, force_eager


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("private_name", [True, False])
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # by torch's compiler
def test_compiled_modules_run_eagerly_inside_the_context_and_after_their_code_was_discarded(
    private_name: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the private name of compiled code, everything runs eagerly then."""
    layer, other, x, compiled = Double(), Double(), torch.ones(1, 2), []
    for module in (layer, other):
        module.compile(backend=lambda graph, inputs, module=module: compiled.append(module) or graph.forward)
    with force_eager():
        layer(x)
    assert compiled == []
    layer(x)
    assert compiled == [layer]
    try:
        with monkeypatch.context() as patch:
            if not private_name:
                patch.delattr(torch.nn.Module, "_compiled_call_impl")
            discard_compiled([other])
        assert torch.equal(other(x), 2 * x)
        assert compiled == [layer]
    finally:
        torch.compiler.set_stance("default")


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
