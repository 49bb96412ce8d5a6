"""Muon. References: torch.optim.Muon, which is not batched, and the singular value decomposition in float64."""

import pytest
import torch

from tinylm.training.muon import Muon, orthogonalise

SHAPES = [(8, 8), (4, 8), (8, 4), (16, 8), (8, 8), (4, 8), (1, 5)]


@pytest.mark.parametrize(("decay", "momentum"), [(0.0, 0.95), (0.1, 0.9)])
def test_updates_of_batched_matrices_equal_those_of_torchs_muon(decay: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    theirs = [torch.nn.Parameter(matrix.detach().clone()) for matrix in ours]
    optimizers = (
        Muon(ours, lr=0.02, weight_decay=decay, momentum=momentum, precision=torch.bfloat16),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"),
    )
    for step in range(4):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if index != step:  # in each step, another matrix has no gradient
                one.grad = torch.randn(one.shape, generator=generator)
                other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)  # updates are 0.02; bf16 has 8 significant bits


@pytest.mark.parametrize("shape", [(12, 12), (6, 20), (20, 6)])
def test_orthogonalising_keeps_singular_vectors_and_brings_singular_values_near_one(shape: tuple[int, int]) -> None:
    """In the basis of the singular vectors, the result is nearly diagonal, with entries near 1."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    (found,) = orthogonalise([matrix], torch.bfloat16)
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    across = u.T @ found.double() @ v.T
    assert ((across - across.diag().diag()).abs() < 0.05).all()
    kept = across.diag()[values > 0.05 * values.max()]
    assert ((kept > 0.6) & (kept < 1.25)).all()
    assert found.shape == matrix.shape
