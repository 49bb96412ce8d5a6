"""Batches of conversations, compared with batches built by hand, and packed rows with single conversations."""

import numpy as np
import pytest
import torch

from tests.text.corpora import require_errors
from tests.variants import randomised, small
from tinylm.jobs.chat.corpus import ChatTokens
from tinylm.objectives.loss import next_token
from tinylm.text.batches import Batch
from tinylm.text.scored_tokens import ScoredRows, pack, scored_evaluation_batches
from tinylm.transformer.build import build_model


def chat_tokens(*conversations: list[tuple[int, bool]]) -> ChatTokens:
    """Conversations from lists of ids and scored flags."""
    codes = [4 * i + 2 * scored + (place == 0) for given in conversations for place, (i, scored) in enumerate(given)]
    return ChatTokens(np.array(codes, dtype=np.uint16))


def random_tokens(number: int = 60, longest: int = 30, vocab_size: int = 11) -> ChatTokens:
    rng = np.random.default_rng(3)
    drawn = (rng.integers(1, vocab_size, rng.integers(2, longest)) for _ in range(number))
    return chat_tokens(*([(int(i), bool(rng.random() < 0.4)) for i in ids] for ids in drawn))


A = [(1, False), (2, False), (3, True), (4, True)]
B = [(5, False), (6, True)]
C = [(7, False), (8, False), (9, True)]


def test_packed_rows_hold_several_conversations_and_single_ones_are_padded() -> None:
    rows = ScoredRows(chat_tokens(A, B, C), context=4, packed=True)
    assert rows.width == 4 and [row.tolist() for row in rows.rows] == [[0, 1], [2]]
    batch = rows.batch([0, 1])
    assert batch.ids.tolist() == [[1, 2, 3, 5], [7, 8, 0, 0]]
    assert batch.mask is not None and batch.segments is not None
    assert batch.targets[batch.mask].tolist() == [3, 4, 6, 9]
    assert batch.mask.int().tolist() == [[0, 1, 1, 1], [0, 1, 0, 0]]
    assert batch.segments.tolist() == [[1, 1, 1, 2], [1, 1, 0, 0]]
    assert (batch.n_targets, batch.n_tokens, rows.n_tokens) == (4, 6, 6)
    batch = ScoredRows(chat_tokens(A, B, C), context=8, packed=False).batch([1, 2])
    assert batch.ids.tolist() == [[5, 0], [7, 8]]
    assert batch.mask is not None and batch.lengths is not None and batch.segments is None
    assert (batch.targets[batch.mask].tolist(), batch.lengths.tolist()) == ([6, 9], [1, 2])
    assert (batch.n_targets, batch.n_tokens, [len(part) for part in batch.split(1)]) == (2, 3, [1, 1])


def test_a_long_conversation_is_cut_and_without_a_usable_answer_it_is_left_out_or_an_error() -> None:
    """The number belongs to a conversation with an answer, not to a shorter one without."""
    late = [(1, False)] * 5 + [(2, True)]
    cut = ScoredRows(chat_tokens(A, late), context=2, packed=True)
    batch = cut.batch([0])
    assert len(cut) == 1 and batch.ids.tolist() == [[1, 2]]
    assert batch.mask is not None and batch.targets[batch.mask].tolist() == [3]
    tokens = chat_tokens(A, late, [(1, False), (2, False)])
    assert tokens.describe_left_out(2, "training") == [
        "1 of 3 training conversations are left out: nothing in them is scored.",
        "2 of 3 training conversations are cut to the context of 2 tokens (the longest has 5); 1 of them lose all "
        "answers and are left out.",
    ]
    assert chat_tokens(A, B).describe_left_out(3, "training") == []
    tokens.require_examples(2, "training")
    unscored = [(1, False), (2, False)]
    answered = [(i, False) for i in range(5)], [(i, False) for i in range(4)]
    rows = [
        ((unscored, [(3, True)]), 8, "Nothing is scored in the training conversations"),
        ((unscored, *([*question, (7, True)] for question in answered)), 3, "scored token comes after 4 others"),
        ((A, late), 1, "No training conversation .* within the context of 1"),
    ]
    require_errors(lambda given, context: chat_tokens(*given).require_examples(context, "training"), rows)


def test_packing_puts_every_item_into_one_row_that_it_fits_and_needs_few_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    indices = np.arange(0, 2000, 2)
    rows = pack(indices, lengths, 128)
    assert sorted(np.concatenate(rows).tolist()) == indices.tolist()
    assert all(lengths[row].sum() <= 128 for row in rows)
    assert len(rows) <= 11 / 9 * np.ceil(lengths[indices].sum() / 128) + 1  # the bound of best fit decreasing


@pytest.mark.parametrize("packed", [True, False])
def test_each_epoch_has_every_conversation_once_in_another_order(packed: bool) -> None:
    tokens = random_tokens()
    rows = ScoredRows(tokens, 20, packed)
    batches = rows.training_batches(4, seed=1)
    count = batches.batches_per_epoch
    assert count == -(-len(rows) // 4)
    first, second = ([batches.batch(epoch * count + n) for n in range(count)] for epoch in range(2))
    expected = sum(int(tokens.tokens(i)[1][1:21].sum()) for (i,) in tokens.examples(20))
    assert sum(batch.n_targets for batch in first) == sum(batch.n_targets for batch in second) == expected
    assert sum(len(batch) for batch in first) == len(rows)
    assert [batch.ids.tolist() for batch in first] != [batch.ids.tolist() for batch in second]
    again = rows.training_batches(4, seed=1)
    for number in (count + 1, 0, 2):
        assert torch.equal(again.batch(number).ids, batches.batch(number).ids)
    assert not torch.equal(rows.training_batches(4, seed=2).batch(0).targets, first[0].targets)


VARIANTS = {
    "rope, norms after rows": {"norm_placement": "post"},
    "relative positions, experts": {"position": "relative", "relative_clip": 4, "experts": 3},
    "sinusoidal positions, merged experts": {"position": "sinusoidal", "experts": 3, "expert_mode": "merge"},
    "learned positions, a sliding window": {"position": "learned", "local_window": 3, "local_layers": (0,)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_rows_have_the_loss_and_the_gradient_of_single_conversations(name: str) -> None:
    tokens = random_tokens()
    model = randomised(build_model(small(context=24, vocab_size=11, **VARIANTS[name]))).eval()

    def loss_and_gradient(batches: list[Batch]) -> tuple[float, int, torch.Tensor]:
        model.zero_grad()
        losses = [next_token(model, batch) for batch in batches]
        torch.stack([loss.total for loss in losses]).sum().backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return sum(loss.total.item() for loss in losses), sum(loss.n_targets for loss in losses), torch.cat(gradients)

    one_by_one = [batch for i in tokens.examples(24) for batch in [ScoredRows(tokens, 24, False, i[None]).batch([0])]]
    expected = loss_and_gradient(one_by_one)
    for packed in (True, False):
        found = loss_and_gradient(list(scored_evaluation_batches(tokens, 24, 5, packed)))
        assert found[1] == expected[1]
        assert found[0] / found[1] == pytest.approx(expected[0] / expected[1], abs=1e-5)
        torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5 * float(expected[2].abs().max()))


def test_an_evaluation_of_a_part_has_about_as_many_scored_tokens_as_are_wanted() -> None:
    tokens = random_tokens(400)
    wanted = tokens.n_scored // 5
    for packed in (True, False):
        found = sum(batch.n_targets for batch in scored_evaluation_batches(tokens, 30, 8, packed, wanted))
        assert 0.8 * wanted < found < 1.2 * wanted
