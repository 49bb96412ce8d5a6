"""The planned model: the chosen one, or as large as time and text allow, with a context that fits."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.machines import machine
from tests.planning.planned import data, planned, planned_pairs
from tests.variants import small
from tinylm.config.presets import PRESETS, SHORT_CONTEXTS, SIZES, make_model_config
from tinylm.config.training import Budget
from tinylm.errors import UsageError
from tinylm.jobs.pairs.job import PairSizes
from tinylm.planning import recipes
from tinylm.planning.plan import choose_dropout, choose_sizes, training_tokens
from tinylm.planning.plan_request import PlanRequest, matrix_parameters


@given(st.floats(1, 1e5), st.integers(1000, 10**9))
def test_the_size_is_the_largest_that_gets_enough_tokens_per_parameter(seconds: float, tokens: int) -> None:
    request = PlanRequest(objective="next-token", data=data(tokens), vocab_size=66, budget=Budget(time=seconds))
    chosen = choose_sizes(machine(), request)[0]
    configs = {size: make_model_config(vocab_size=66, preset="modern", size=size) for size in SIZES}
    per_parameter = {
        size: training_tokens(machine(), request, config) / matrix_parameters(config)
        for size, config in configs.items()
    }
    larger = list(SIZES)[list(SIZES).index(chosen) + 1 :]
    assert all(per_parameter[size] < recipes.TOKENS_PER_PARAMETER for size in larger)
    assert chosen == "nano" or per_parameter[chosen] >= recipes.TOKENS_PER_PARAMETER


def test_an_automatic_size_fits_in_memory_if_any_does() -> None:
    chosen = []
    for exponent in range(22, 36, 2):
        on = machine(free_memory=1 << exponent, matmul_rate=1e15)
        plan = planned(10**9, on=on)
        assert plan.fits or not planned(10**9, on=on, model={"size": "nano"}).fits
        chosen.append(plan.parameters)
    assert chosen == sorted(chosen) and len(set(chosen)) >= 3


def test_size_and_preset_are_the_chosen_ones_and_continued_training_keeps_the_model() -> None:
    for preset, size in itertools.product(PRESETS, SIZES):
        config = planned(model={"size": size, "preset": preset}).model
        context = SIZES[size]["context"] if preset == "modern" else SHORT_CONTEXTS.get(size, SIZES[size]["context"])
        chosen = {**PRESETS[preset], **SIZES[size], "context": context}
        assert {name: getattr(config, name) for name in chosen} == chosen
    base = small(vocab_size=100, layers=5, dropout=0.3)
    assert planned(base=base, budget=Budget(time=1e5)).model == base


def test_the_planned_size_depends_on_the_other_choices() -> None:
    """64 experts per token cost as much as 64 feed-forward layers, and 64 heads do not divide the smallest width."""
    budget = Budget(time=400)
    dense = planned(10**9, budget=budget).model
    wide = planned(10**9, budget=budget, model={"experts": 64, "experts_per_token": 64}).model
    assert (wide.layers * wide.width) < (dense.layers * dense.width)
    assert planned(budget=Budget(time=1), model={"kv_heads": 8, "heads": 8, "position": "learned"}).model.width % 8 == 0
    many = {"heads": 64, "kv_heads": 64}  # they divide a width of 128, and not one of 96
    assert planned(budget=Budget(time=1), model=many).model.width == 128


def test_a_base_is_trained_on_sequences_that_the_text_fills() -> None:
    for context, tokens, length in ((256, 194, 193), (256, 257, None), (2048, 10_000, 512), (2048, 300, 299)):
        plan = planned(tokens, base=small(vocab_size=100, context=context))
        assert (plan.training.sequence_length, plan.model.context) == (length, context)
        assert any(f"trained on sequences of {length}" in notice for notice in plan.notices) == (length is not None)


def test_a_context_longer_than_the_text_is_shortened_with_a_notice_or_refused() -> None:
    plan = planned(50)
    assert plan.model.context == 49
    assert plan.notices == ("The training text has only 50 tokens: the context is shortened to 49.",)
    assert planned(50, model={"context": 49}).model.context == 49
    with pytest.raises(UsageError, match=r"has 50 tokens, and a context of 50 needs 51; .* `context` of at most 49"):
        planned(50, model={"context": 50})
    base = small(context=64, vocab_size=100)
    assert planned(65, base=base).model == base
    with pytest.raises(UsageError, match="a context of 64 needs 65"):
        planned(64, base=base, training={"sequence_length": 64})


@given(st.integers(2, 1000), st.data())
@settings(deadline=None, max_examples=30)
def test_pairs_up_to_twice_as_long_as_the_others_all_fit_the_context(least: int, drawn: st.DataObject) -> None:
    train, val = (drawn.draw(st.lists(st.integers(least, 2 * least), min_size=1, max_size=50)) for _ in range(2))
    plan = planned_pairs(train, val)
    assert max(train + val) <= plan.model.context <= max(128, max(train + val) + 31)
    assert not any("left out" in notice for notice in plan.notices)


@given(usual=st.integers(3, 400), outliers=st.integers(1, 5), hundreds=st.integers(6, 200))
@settings(deadline=None, max_examples=30)
def test_a_few_long_pairs_are_left_out_and_do_not_change_the_plan(usual: int, outliers: int, hundreds: int) -> None:
    pairs = [usual] * (100 * hundreds - outliers)
    plan = planned_pairs(pairs + [5000] * outliers, [usual, 4000])
    alone = planned_pairs(pairs, [usual, 2 * usual])
    assert plan.model.context <= max(128, 2 * usual + 31)
    notice, val_notice = [notice for notice in plan.notices if "left out" in notice]
    assert notice.startswith(f"{outliers} of {100 * hundreds:,} training pairs are left out: they do not fit")
    assert notice.endswith("and the longest needs 5000.")
    assert val_notice.startswith("1 of 2 validation pairs are left out")
    assert (plan.model, plan.training.micro_batch) == (alone.model, alone.training.micro_batch)


def test_the_context_of_the_user_or_a_base_model_is_kept_and_longer_pairs_do_not_count() -> None:
    chosen = {"architecture": "encoder-decoder", "context": 16}
    train, training = [16] * 40 + [17] * 60, {"batch_size": 10}
    plan = planned_pairs(train, [17, 5, 5], model=chosen, training=training, budget=Budget(epochs=3))
    assert (plan.model.context, plan.steps) == (16, 3 * 4)
    assert [notice.split(":")[0] for notice in plan.notices] == [
        "60 of 100 training pairs are left out",
        "1 of 3 validation pairs are left out",
    ]
    base = small(architecture="encoder-decoder", encoder_layers=1, context=24)
    assert planned_pairs([16, 30], base=base, model={}).model == base


def test_a_modern_decoder_has_an_untied_output_layer_in_a_short_run() -> None:
    largest = recipes.UNTIED_MAX_VOCABULARY
    budgets = {Budget(steps=1): True, Budget(epochs=1): True, Budget(epochs=5): False, Budget(steps=10**6): False}
    for (budget, short), vocab_size in itertools.product(budgets.items(), (66, largest, largest + 1)):
        plan = planned(budget=budget, vocab_size=vocab_size, model={"size": "micro"})
        tokens = plan.steps * plan.training.batch_size * plan.model.context
        assert (tokens <= recipes.UNTIED_MAX_TOKENS) == short
        assert plan.model.tie == (not short or vocab_size > largest)
    assert planned(budget=Budget(steps=1), model={"tie": True}).model.tie
    assert not planned(budget=Budget(steps=10**6), model={"tie": False}).model.tie
    for model in ({"preset": "gpt2"}, {"preset": "original"}, {"architecture": "encoder"}):
        assert planned(budget=Budget(steps=1), model=model).model.tie


def test_new_models_have_dropout_in_proportion_to_epochs_times_parameters_per_token_unless_it_is_chosen() -> None:
    """Decision 014: a 1,500th, at most 0.2. Decision 040, for pairs: a 500th, at most 0.3. Below 0.04 it is 0."""
    assert [choose_dropout(recipes.DROPOUT, 10, per_token) for per_token in (5, 15, 1000)] == [0, 0.1, 0.2]
    assert [choose_dropout(PairSizes.dropout, 10, per_token) for per_token in (1, 5, 1000)] == [0, 0.1, 0.3]
    budget, small_text = Budget(epochs=500), 100_000
    assert planned(small_text, budget=budget, model={"size": "micro"}).model.dropout == recipes.DROPOUT.maximum
    assert planned(budget=Budget(epochs=1), model={"size": "micro"}).model.dropout == 0
    assert planned(small_text, budget=budget, model={"preset": "gpt2"}).model.dropout == 0
    assert planned(small_text, budget=budget, model={"dropout": 0.1}).model.dropout == 0.1
    assert planned(small_text, budget=budget, base=small()).model.dropout == 0
    short = Budget(epochs=0.001)
    many = dataclasses.replace(data(10**8), kind="pairs", train_pairs=10**6)
    for preset in PRESETS:
        shape = {"architecture": "encoder-decoder", "preset": preset}
        assert planned_pairs([10] * 20, model=shape, budget=budget).model.dropout == PairSizes.dropout.maximum
        assert planned_pairs([10] * 20, model=shape, budget=short, data=many).model.dropout == 0
        assert planned_pairs([10] * 20, model={**shape, "dropout": 0.1}, budget=budget).model.dropout == 0.1
    base = small(architecture="encoder-decoder", encoder_layers=1, context=24)
    assert planned_pairs([10] * 20, base=base, model={}, budget=budget).model.dropout == base.dropout
