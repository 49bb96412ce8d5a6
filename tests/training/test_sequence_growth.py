"""Sequence length warmup: windows that are split into shorter sequences in most steps of a run."""

from collections.abc import Callable

import pytest
import torch

from tests.machines import MATMUL_RATE
from tests.planning.planned import planned, planned_pairs
from tests.training.trainer_bench import (
    Bench,
    assert_same,
    decoder,
    gradient,
    random_batch,
    update_of,
    watched,
    with_auxiliary,
)
from tinylm.config.presets import make_model_config
from tinylm.config.training import SEQUENCE_GROWTHS, Budget, mean_share, window_parts
from tinylm.errors import UsageError
from tinylm.objectives.loss import Loss, next_token
from tinylm.planning.recipes import MATMUL_EFFICIENCY
from tinylm.text.batches import Batch


def test_the_number_of_sequences_halves_after_60_and_85_percent_and_is_one_in_every_eighth_step() -> None:
    assert SEQUENCE_GROWTHS == (1, 2, 4)
    for growth, parts in ((1, [1] * 6), (2, [2, 2, 1, 1, 1, 1]), (4, [4, 4, 2, 2, 1, 1])):
        assert [window_parts(0, progress, growth) for progress in (0.0, 0.599, 0.6, 0.849, 0.85, 1.0)] == parts
        lengths = [1 / window_parts(step, step / 8000, growth) for step in range(8000)]
        assert mean_share(growth) == pytest.approx(sum(lengths) / 8000)
    assert [window_parts(step, 0.0, 4) for step in range(16)] == [4, 4, 4, 4, 4, 4, 4, 1] * 2


def test_a_window_is_split_into_consecutive_sequences_with_their_next_tokens() -> None:
    text = torch.arange(25)
    batch = Batch(torch.stack([text[0:12], text[12:24]]), torch.stack([text[1:13], text[13:25]]))
    parts = batch.split_windows(4)
    assert parts.ids.tolist() == [list(range(start, start + 3)) for start in range(0, 24, 3)]
    assert torch.equal(parts.targets, parts.ids + 1)
    assert parts.n_targets == batch.n_targets
    of_no_rows = random_batch(0).every(6, 6)  # of a rank, if there are more ranks than windows
    assert of_no_rows.split_windows(2).ids.shape == (0, 3)


def split_by_hand(batch: Batch) -> Batch:
    """The halves of each row: (B, 6) -> (2 B, 3)."""
    return Batch(*(torch.cat([row.view(2, 3) for row in rows]) for rows in (batch.ids, batch.targets)))


@pytest.mark.parametrize(("micro_batch", "objective"), [(6, next_token), (1, next_token), (4, with_auxiliary)])
def test_the_gradient_is_that_of_the_shorter_sequences(micro_batch: int, objective: Callable[..., Loss]) -> None:
    """Reference: the gradient of the halves, in one pass without accumulation."""
    bench = Bench(sequence_growth=2, micro_batch=micro_batch, objective=objective)
    expected = gradient(bench.model, split_by_hand(random_batch(0)), objective)
    assert_same(update_of(bench), expected)
    whole = gradient(decoder(), random_batch(0), objective)
    assert not torch.allclose(expected["embedding.weight"], whole["embedding.weight"])


@pytest.mark.parametrize("micro_batch", [6, 2])
def test_a_run_ends_with_whole_windows_and_a_micro_batch_keeps_its_number_of_tokens(micro_batch: int) -> None:
    shapes: list[tuple[int, ...]] = []
    objective = watched(lambda model, batch: torch.is_grad_enabled() and shapes.append(tuple(batch.ids.shape)))
    bench = Bench(sequence_growth=2, budget=Budget(steps=15), objective=objective, micro_batch=micro_batch, lr=0.01)
    lengths: set[int] = set()
    bench.trainer.task.validation_objective = watched(lambda model, batch: lengths.add(batch.ids.shape[1]))
    bench.run()
    assert lengths == {6}, "the validation loss is that of whole windows"
    split, whole = [[shape] * (6 // micro_batch) for shape in ((2 * micro_batch, 3), (micro_batch, 6))]
    assert shapes == 7 * split + whole + split + 6 * whole


def test_sequences_of_new_decoders_on_text_grow() -> None:
    assert planned().training.sequence_growth == 4
    assert planned(training={"sequence_growth": 1}).training.sequence_growth == 1
    gpt2_with_rope = {"preset": "gpt2", "position": "rope"}
    for different in ({"preset": "gpt2"}, gpt2_with_rope, {"position": "learned"}, {"architecture": "encoder"}):
        assert planned(model={"context": 256, **different}).training.sequence_growth == 1
    base = make_model_config(vocab_size=100, preset="modern", size="mini")
    assert planned(base=base).training.sequence_growth == 1
    assert planned_pairs([10]).training.sequence_growth == 1
    for context, growth in ((127, 1), (128, 2), (256, 4), (258, 2), (259, 1)):  # of at least 64 tokens
        assert planned(model={"context": context}).training.sequence_growth == growth
    with pytest.raises(UsageError, match="`sequence_growth` is for plain text"):
        planned_pairs([10], training={"sequence_growth": 2})


def test_shorter_sequences_are_expected_to_take_less_time() -> None:
    """Both have batches of the same number of tokens; the same FLOPs but for attention."""
    whole, growing = [
        planned(budget=Budget(steps=100), model={"size": "nano"}, training={"sequence_growth": growth})
        for growth in (1, 4)
    ]
    config = growing.model
    attention = 6 * config.layers * config.context * config.heads * config.head_dim
    tokens = 100 * growing.training.batch_size * config.context
    share = 7 / 8 * (0.6 / 4 + 0.25 / 2 + 0.15) + 1 / 8
    saved = (1 - share) * attention * tokens / (MATMUL_EFFICIENCY["cpu"] * MATMUL_RATE)
    assert whole.seconds - growing.seconds == pytest.approx(saved, rel=1e-3)
