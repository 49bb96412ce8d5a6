"""Judge: Python's own list of what was imported, and torch's optimizers for what they do to weights."""

import sys
from pathlib import Path

import pytest
import torch

from tests.shell import TINY, run_child, story
from tinylm.training import eager


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


TRAINING = """
import sys
from tinylm.__main__ import main

sys.argv = ["tinylm", "train", "corpus.txt", "--out", "run", "--quiet", *sys.argv[1:]]
try:
    main()
finally:
    print("torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "adam"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_does_not_import_torchs_compiler_where_nothing_is_compiled(
    optimizer: str, dropout: float, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text(story(3000))
    words = f"--steps 4 --eval-every 2 --save-every 3 --optimizer {optimizer} --dropout {dropout}".split()
    command = [sys.executable, "-c", TRAINING, *TINY, *words]
    result = run_child(command, cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "run\nFalse\n"), result.stderr


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # by what torch's compiler imports
def test_what_is_compiled_runs_as_it_was_written_where_that_is_wanted() -> None:
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.append(graph)
        return graph.forward

    layer = Double()
    layer.compile(backend=backend)
    with eager.eagerly():
        layer(torch.ones(1, 2))
    assert not compiled
    layer(torch.ones(1, 2))
    assert compiled


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_optimizers_are_torchs(name: str, fused: bool) -> None:
    def trained(module: object) -> list[torch.Tensor]:
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

    for ours, torchs in zip(trained(eager), trained(torch.optim), strict=True):
        assert torch.equal(ours, torchs)
