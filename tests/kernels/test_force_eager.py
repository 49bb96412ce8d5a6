import pytest
import torch

from tinylm.kernels.force_eager import discard_compiled, force_eager

compiling = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # by torch's compiler


class Double(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def compiled_layer() -> tuple[Double, list[object]]:
    """A layer that is compiled at its first call, and the list of compiled graphs."""
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiled.append(graph)
        return graph.forward

    layer = Double()
    layer.compile(backend=backend)
    return layer, compiled


@compiling
def test_compiled_modules_run_eagerly_inside_the_context_or_after_their_code_was_discarded() -> None:
    layer, compiled = compiled_layer()
    with force_eager():
        layer(torch.ones(1, 2))
    assert not compiled
    layer(torch.ones(1, 2))
    assert compiled
    layer, compiled = compiled_layer()
    discard_compiled([layer])
    assert torch.equal(layer(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    assert not compiled


@compiling
def test_without_the_private_name_of_compiled_code_everything_runs_eagerly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, compiled = compiled_layer()
    try:
        with monkeypatch.context() as patch:
            patch.delattr(torch.nn.Module, "_compiled_call_impl")
            discard_compiled([layer])
        assert torch.equal(layer(torch.ones(1, 2)), torch.full((1, 2), 2.0))
        assert not compiled
    finally:
        torch.compiler.set_stance("default")
