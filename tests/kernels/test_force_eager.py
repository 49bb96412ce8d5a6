import pytest
import torch

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
