"""Reference: the models of reference_parts.py in float64 and their losses, summed one sequence at a time."""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import reference, reference_parts
from tests.objectives.conftest import LimitLogits
from tests.variants import randomised, small
from tinylm.config.model import ModelConfig
from tinylm.jobs.masked.job import masked_token
from tinylm.jobs.pairs.job import sequence_to_sequence
from tinylm.kernels.process import prepare_compiler
from tinylm.machine.device import can_compile
from tinylm.objectives.loss import Loss, next_token, next_two_tokens
from tinylm.text.batches import Batch
from tinylm.transformer.architectures import Decoder, Output
from tinylm.transformer.build import build_model
from tinylm.transformer.layers import CrossEntropy


def decoder(config: ModelConfig) -> Decoder:
    return randomised(build_model(config)).double()


def batch_of(config: ModelConfig, rows: int, length: int, scored: float | None = None) -> Batch:
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(config.vocab_size, (rows, length + 1), generator=rng)
    mask = None if scored is None else torch.rand(rows, length, generator=rng) < scored
    return Batch(ids[:, :-1], ids[:, 1:], mask)


def expected_loss(model: Decoder, config: ModelConfig, batch: Batch) -> float:
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    total = 0.0
    for row in range(len(batch)):
        logits = reference_parts.decoder_logits_with_parts(weights, config, batch.ids[row].tolist(), table=np.float32)
        for t, target in enumerate(batch.targets[row].tolist()):
            if batch.mask is None or batch.mask[row, t]:
                total += reference.cross_entropy(logits[t : t + 1], [target])
    return total


@pytest.mark.parametrize("config", [small(), small("original", kv_heads=4, tie=False)], ids=["modern", "original"])
def test_the_loss_is_its_formula_over_scored_targets(config: ModelConfig, limit_logits: LimitLogits) -> None:
    model = decoder(config)
    for scored in (None, 0.4):
        batch = batch_of(config, 3, 7, scored)
        expected = expected_loss(model, config, batch)
        for chunk in (1 << 25, 30):
            limit_logits(chunk)
            loss = next_token(model, batch)
            assert loss.total.item() == pytest.approx(expected, rel=1e-12)
            assert loss.n_targets == (21 if batch.mask is None else int(batch.mask.sum()))
            assert loss.aux.item() == 0


@pytest.mark.parametrize("chunk", [1 << 25, 30])
def test_multi_token_prediction_adds_the_loss_of_the_second_token(
    chunk: int, limit_logits: LimitLogits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the loss of the next token is smoothed. Both losses are those of the same logits."""
    limit_logits(chunk)
    config = small(tie=chunk == 30)
    model, batch = decoder(config), batch_of(config, 3, 7)
    weights = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    first, second = 0.0, 0.0
    for ids, targets in zip(batch.ids.tolist(), batch.targets.tolist(), strict=True):
        logits = reference_parts.decoder_logits_with_parts(weights, config, ids, table=np.float32)
        first += sum(reference_parts.label_smoothed(*pair, 0.2) for pair in zip(logits, targets, strict=True))
        second += 6 / 7 * reference.cross_entropy(logits[:-1], targets[1:])  # the reference is a mean of 6
    rows: list[int] = []
    compute = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: (rows.append(len(hidden)), compute(hidden))[1])
    loss = next_two_tokens(model, batch, 0.2, second_weight=0.3)
    assert sum(rows) == 3 * 7
    with torch.no_grad():
        same = next_two_tokens(model, batch, 0.2, second_weight=0.3)
    for found in (loss, same):
        assert found.total.item() == pytest.approx(first, rel=1e-12)
        assert (found.aux.item(), found.n_targets) == (pytest.approx(0.3 * second, rel=1e-12), 21)


ALL = ("decoder", "encoder", "encoder-decoder")


@pytest.mark.parametrize("architecture", ALL)
def test_label_smoothing_equals_its_formula(architecture: str) -> None:
    sides = {"architecture": architecture, "encoder_layers": 1 if architecture == "encoder-decoder" else None}
    config = small(**sides)
    model, batch = randomised(build_model(config)).double(), batch_of(config, 2, 6, 0.5)
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    source = [3, 1, 4]
    if architecture == "encoder-decoder":
        batch = Batch(batch.ids, batch.targets, batch.mask, torch.tensor([source] * 2), torch.tensor([3, 3]))
    expected = 0.0
    assert batch.mask is not None
    for ids, targets, scored in zip(batch.ids.tolist(), batch.targets.tolist(), batch.mask.tolist(), strict=True):
        match architecture:
            case "decoder":
                logits = reference_parts.decoder_logits_with_parts(weights, config, ids, table=np.float32)
            case "encoder":
                logits = reference_parts.encoder_logits(weights, config, ids, len(ids), table=np.float32)
            case _:
                logits = reference_parts.encoder_decoder_logits(weights, config, source, ids, table=np.float32)
        expected += sum(
            reference_parts.label_smoothed(row, target, 0.2)
            for row, target, counts in zip(logits, targets, scored, strict=True)
            if counts
        )
    objectives = dict(zip(ALL, (next_token, masked_token, sequence_to_sequence), strict=True))
    assert objectives[architecture](model, batch, 0.2).total.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("objective", ["tied", "untied", "two tokens"])
def test_the_chunked_loss_and_its_gradient_equal_the_unchunked_ones(
    objective: str, frozen: bool, limit_logits: LimitLogits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one row, of a few rows, and of all rows but one; also of an output layer that is not trained."""
    config = small(tie=objective == "tied")
    model, batch = decoder(config), batch_of(config, 3, 7, None if objective == "two tokens" else 0.6)
    (model.embedding if model.output is None else model.output).requires_grad_(not frozen)

    def loss() -> Loss:
        if objective == "two tokens":
            return next_two_tokens(model, batch, 0.2, second_weight=0.5)
        return next_token(model, batch, 0.2)

    def gradients(found: Loss) -> dict[str, Tensor]:
        model.zero_grad()
        (found.total * 2 + found.aux * 0.7).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    whole = loss()
    expected = gradients(whole)
    assert expected.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    rows: list[int] = []
    logits = model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: (rows.append(len(hidden)), logits(hidden))[1])
    for chunk in (1, 13, 40, 13 * 12):
        limit_logits(chunk)
        rows.clear()
        chunked = loss()
        found = gradients(chunked)
        assert max(rows) <= max(1, chunk // config.vocab_size)
        assert max(rows) - min(rows) < len(rows)  # chunks are about equal
        assert sum(rows) == batch.n_targets  # no logits are computed again in the backward pass
        with torch.no_grad():
            same = loss()
        for one in (chunked, same):
            assert one.total.item() == pytest.approx(whole.total.item(), rel=1e-12)
            assert one.aux.item() == pytest.approx(whole.aux.item(), rel=1e-12)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)


class LinearModel(torch.nn.Module):
    """Logits from hidden vectors (B, T, D) that are given as ids."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.vocab_size, self.output_parameters = weight, len(weight), (weight,)
        self.cross_entropy = CrossEntropy()

    def __call__(self, ids: Tensor, cache: object = None) -> Output:
        return Output(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.weight)


def hidden_weight_and_targets() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 5, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, generator=rng, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(7, (2, 5), generator=rng)


@pytest.mark.parametrize(("dtype", "second_weight"), [(torch.bfloat16, 0.5), (torch.float16, 0.0)])
def test_under_autocast_chunks_equal_the_whole(
    dtype: torch.dtype, second_weight: float, limit_logits: LimitLogits
) -> None:
    """The weight is rounded once for all chunks, and its gradient is summed in single precision. Loss scale: 1024."""
    hidden, weight, targets = hidden_weight_and_targets()
    logits = hidden @ weight.T
    cross_entropy = functools.partial(torch.nn.functional.cross_entropy, reduction="sum")
    second = cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
    expected = cross_entropy(logits.flatten(0, 1), targets.flatten()) + second_weight / 5 * second
    expected.backward()
    limit_logits(2 * 7)
    leaves = [tensor.detach().float().requires_grad_() for tensor in (hidden, weight)]
    with torch.autocast("cpu", dtype):
        both = next_two_tokens(LinearModel(leaves[1]), Batch(leaves[0], targets), 0.0, second_weight)
    loss = both.total + both.aux
    (loss * 1024).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-2)
    for leaf, reference_tensor in zip(leaves, (hidden, weight), strict=True):
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32 and reference_tensor.grad is not None
        torch.testing.assert_close(leaf.grad.double() / 1024, reference_tensor.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.timeout(900)  # the C++ compiler of a busy machine takes minutes
@pytest.mark.filterwarnings("ignore")  # of torch's compiler
@pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")
@pytest.mark.parametrize("chunk", [1 << 25, 3 * 7])
def test_a_compiled_loss_has_the_gradients_of_the_eager_one(chunk: int, limit_logits: LimitLogits) -> None:
    """As training on CUDA compiles it."""
    limit_logits(chunk)
    prepare_compiler()
    hidden, weight, targets = hidden_weight_and_targets()
    model = LinearModel(weight)

    def loss_and_gradients() -> list[Tensor]:
        loss = next_token(model, Batch(hidden, targets), 0.1).total
        return [loss, *torch.autograd.grad(loss, (hidden, weight))]

    expected = loss_and_gradients()
    model.cross_entropy.compile()
    found = loss_and_gradients()
    torch.compiler.reset()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_two_losses_are_not_computed_by_compiled_code() -> None:
    hidden, weight, targets = hidden_weight_and_targets()
    model, batch = LinearModel(weight), Batch(hidden, targets)
    expected = next_two_tokens(model, batch, 0.1, second_weight=0.5)
    model.cross_entropy._compiled_call_impl = lambda *inputs: pytest.fail("compiled")
    assert next_two_tokens(model, batch, 0.1, second_weight=0.5) == expected
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        next_token(model, batch, 0.1)


def test_a_batch_without_scored_targets_has_zero_loss_and_gradient() -> None:
    model, batch = decoder(small()), batch_of(small(), 2, 6, 0.0)
    loss = next_token(model, batch)
    assert (loss.total.item(), loss.n_targets) == (0, 0)
    loss.total.backward()
