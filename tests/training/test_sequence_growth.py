"""Sequence length warmup: windows that are split into shorter sequences in most steps of a run."""

import pytest
import torch

from tests.machines import MATMUL_RATE, machine
from tests.planning.planned import planned, planned_pairs
from tests.training.trainer_bench import Bench, assert_same, decoder, gradient, random_batch, update_of, with_auxiliary
from tinylm.errors import UsageError
from tinylm.model.decoder import Decoder
from tinylm.objectives.loss import Loss, next_token
from tinylm.planning.recipes import EVALUATION_SHARE, MATMUL_EFFICIENCY
from tinylm.presets import make_model_config
from tinylm.sequence_growth import SEQUENCE_GROWTHS, mean_share, window_parts
from tinylm.text.batches import Batch
from tinylm.training_config import Budget


@pytest.mark.parametrize(
    ("growth", "expected"), [(1, [1, 1, 1, 1, 1, 1]), (2, [2, 2, 1, 1, 1, 1]), (4, [4, 4, 2, 2, 1, 1])]
)
def test_the_number_of_sequences_halves_after_60_and_85_percent(growth: int, expected: list[int]) -> None:
    assert [window_parts(0, progress, growth) for progress in (0.0, 0.599, 0.6, 0.849, 0.85, 1.0)] == expected


def test_every_eighth_step_has_whole_windows() -> None:
    assert [window_parts(step, 0.0, 4) for step in range(16)] == [4, 4, 4, 4, 4, 4, 4, 1] * 2


@pytest.mark.parametrize("growth", SEQUENCE_GROWTHS)
def test_the_mean_length_is_that_of_a_long_run(growth: int) -> None:
    steps = 8000
    lengths = [1 / window_parts(step, step / steps, growth) for step in range(steps)]
    assert mean_share(growth) == pytest.approx(sum(lengths) / steps)


def test_a_window_is_split_into_consecutive_sequences_with_their_next_tokens() -> None:
    text = torch.arange(25)
    batch = Batch(torch.stack([text[0:12], text[12:24]]), torch.stack([text[1:13], text[13:25]]))
    parts = batch.split_windows(4)
    assert parts.ids.tolist() == [list(range(start, start + 3)) for start in range(0, 24, 3)]
    assert torch.equal(parts.targets, parts.ids + 1)
    assert parts.n_targets == batch.n_targets


def test_a_batch_without_rows_stays_empty() -> None:
    """A rank has none if there are more ranks than windows."""
    assert random_batch(0).every(6, 6).split_windows(2).ids.shape == (0, 3)


def split_by_hand(batch: Batch) -> Batch:
    """The halves of each row: (B, 6) -> (2 B, 3)."""
    ids, targets = (
        torch.stack([row[half] for row in rows for half in (slice(0, 3), slice(3, 6))])
        for rows in (batch.ids, batch.targets)
    )
    return Batch(ids, targets)


@pytest.mark.parametrize("micro_batch", [6, 4, 1])
def test_the_gradient_is_that_of_the_shorter_sequences(micro_batch: int) -> None:
    """Reference: the gradient of the halves, in one pass without accumulation."""
    bench = Bench(sequence_growth=2, micro_batch=micro_batch)
    expected = gradient(bench.model, split_by_hand(random_batch(0)))
    assert_same(update_of(bench), expected)
    assert not torch.allclose(expected["embedding.weight"], gradient(decoder(), random_batch(0))["embedding.weight"])


def test_auxiliary_losses_are_means_over_the_shorter_sequences() -> None:
    bench = Bench(sequence_growth=2, micro_batch=4, objective=with_auxiliary)
    expected = gradient(bench.model, split_by_hand(random_batch(0)), with_auxiliary)
    assert_same(update_of(bench), expected)


@pytest.mark.parametrize("micro_batch", [6, 2])
def test_a_run_ends_with_whole_windows_and_a_micro_batch_keeps_its_number_of_tokens(micro_batch: int) -> None:
    shapes: list[tuple[int, ...]] = []

    def objective(model: Decoder, batch: Batch) -> Loss:
        shapes.append(tuple(batch.ids.shape))
        return next_token(model, batch)

    bench = Bench(
        sequence_growth=2, budget=Budget(steps=15), objective=objective, micro_batch=micro_batch, lr=0.01, min_lr=0.0
    )
    bench.run()
    split, whole = [[shape] * (6 // micro_batch) for shape in ((2 * micro_batch, 3), (micro_batch, 6))]
    assert shapes == 7 * split + whole + split + 6 * whole


def test_the_validation_loss_is_that_of_whole_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    bench = Bench(sequence_growth=2, budget=Budget(steps=3), lr=0.01)

    def record(model: Decoder, batch: Batch) -> Loss:
        lengths.append(batch.ids.shape[1])
        return next_token(model, batch)

    monkeypatch.setattr(bench.trainer.task, "validation_objective", record)
    bench.run()
    assert set(lengths) == {6}


def test_other_data_than_text_and_lengths_that_it_does_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="`sequence_growth` is for plain text"):
        planned_pairs([10], training={"sequence_growth": 2})
    with pytest.raises(UsageError, match="`sequence_growth` is 4; it must divide the length of the sequences, 30"):
        planned(model={"context": 30}, training={"sequence_growth": 4})
    with pytest.raises(UsageError, match="`sequence_growth` is 3; it must be 1, 2 or 4"):
        planned(training={"sequence_growth": 3})
    assert planned(model={"context": 32}, training={"sequence_growth": 4}).training.sequence_growth == 4


def test_sequences_of_new_decoders_on_text_grow() -> None:
    assert planned().training.sequence_growth == 4
    assert planned(training={"sequence_growth": 1}).training.sequence_growth == 1
    gpt2_with_rope = {"preset": "gpt2", "position": "rope"}
    for different in ({"preset": "gpt2"}, gpt2_with_rope, {"position": "learned"}, {"architecture": "encoder"}):
        assert planned(model={"context": 256, **different}).training.sequence_growth == 1
    base = make_model_config(vocab_size=100, preset="modern", size="mini")
    assert planned(base=base).training.sequence_growth == 1
    assert planned_pairs([10]).training.sequence_growth == 1


@pytest.mark.parametrize(("context", "growth"), [(64, 1), (127, 1), (128, 2), (256, 4), (258, 2), (259, 1), (512, 4)])
def test_the_shortest_sequences_have_64_tokens(context: int, growth: int) -> None:
    assert planned(model={"context": context}).training.sequence_growth == growth


def test_sequences_of_compiled_layers_grow() -> None:
    long = planned(on=machine(compiled_is_faster=True), budget=Budget(time=36_000))
    assert (long.runtime.compile, long.training.sequence_growth) == (True, 4)


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
    assert whole.seconds - growing.seconds == pytest.approx(saved * (1 + EVALUATION_SHARE))
