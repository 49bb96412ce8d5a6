"""The planned schedule: that of the recipe unless the user chose, with evaluations that take little time."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.machines import machine
from tests.planning.planned import adapter, data, planned, planned_pairs, request_of
from tests.shell import ROOT
from tests.variants import small
from tinylm.config.model import INITIALISATIONS
from tinylm.config.presets import PRESETS, SIZES, make_model_config
from tinylm.config.run import ADAPTER_KINDS
from tinylm.config.training import Budget, TrainingConfig
from tinylm.errors import UsageError
from tinylm.jobs.scored import ScoredSizes
from tinylm.planning import recipes
from tinylm.planning.hyperparameters import (
    choose_learning_rate,
    choose_weight_decay,
    evaluation_speed,
    join_seconds,
)
from tinylm.planning.plan import Plan
from tinylm.planning.plan_request import PlanRequest, Sizes, matrix_parameters
from tinylm.training.optimizer import learning_rate


def test_steps_are_those_of_the_budget() -> None:
    assert planned(budget=Budget(steps=7)).steps == 7
    two_epochs = planned(10_000, model={"context": 50}, training={"batch_size": 8}, budget=Budget(epochs=2))
    assert two_epochs.steps == 50  # 20,000 tokens at 400 per step
    slow, fast = (
        planned(budget=Budget(time=60), model={"size": "nano"}, on=machine(matmul_rate=rate)) for rate in (1e9, 1e12)
    )
    assert 1 <= slow.steps < fast.steps
    assert planned(budget=Budget(time=1e-9)).steps == 1


def test_every_decision_that_the_table_of_recipes_names_is_in_docs() -> None:
    group = r"[Dd]ecisions? ((?:\d{3}(?:, | and )?(?:\([^)]*\) and )?)+)"
    table = Path(recipes.__file__).read_text(encoding="utf-8")
    named = {number for numbers in re.findall(group, table) for number in re.findall(r"\d{3}", numbers)}
    existing = {file.name[:3] for file in (ROOT / "docs" / "decisions").glob("*.md")}
    assert len(named) >= 5 and named <= existing


def test_every_preset_initialisation_and_adapter_has_a_recipe_whose_settings_can_be_chosen() -> None:
    assert set(recipes.RECIPES) == {*PRESETS, *INITIALISATIONS, *ADAPTER_KINDS}
    for recipe in recipes.RECIPES.values():
        assert set(recipe.settings) <= {field.name for field in dataclasses.fields(TrainingConfig)}
        assert 0 <= recipe.settings["warmup"] <= 1
        assert recipe.lr > 0 and recipe.lr_exponent > 0
    for preset in PRESETS:
        training = planned(model={"preset": preset}).training
        for name, value in recipes.RECIPES[preset].settings.items():
            assert getattr(training, name) == value
    chosen = {"lr": 5e-4, "min_lr": 1e-5, "weight_decay": 0.3, "grad_clip": 0.5, "optimizer": "adam", "seed": 9}
    training = planned(training=chosen).training
    assert {name: getattr(training, name) for name in chosen} == chosen


def test_modern_models_are_trained_by_muon_and_only_targets_of_pairs_are_smoothed() -> None:
    assert planned_pairs([10]).training.optimizer == "muon"
    for modern in ({}, {"model": {"experts": 4}}, {"base": small()}):
        assert planned(**modern).training.optimizer == "muon"
    for other in ({"model": {"preset": "gpt2"}}, {"base": small(), "adapter": adapter()}):
        assert planned(**other).training.optimizer == "adamw"
    assert planned_pairs([10], training={"optimizer": "adamw"}).training.optimizer == "adamw"
    for others in ({"adapter": adapter()}, {"model": {"architecture": "encoder-decoder", "preset": "original"}}):
        assert planned_pairs([10], **others).training.optimizer != "muon"
    assert planned().training.label_smoothing == 0
    assert planned_pairs([10]).training.label_smoothing == 0.1
    assert planned_pairs([10], training={"label_smoothing": 0.0}).training.label_smoothing == 0


def test_the_original_is_trained_as_published() -> None:
    """Vaswani et al. 2017, section 5.3: Adam with 0.9, 0.98 and 1e-9; D^-0.5 min(s^-0.5, s w^-1.5), scaled."""
    width, steps, warmup = 64, 1000, 100
    budget = Budget(steps=steps)
    training = planned(model={"preset": "original", "size": "micro", "width": width}, budget=budget).training
    assert (training.optimizer, training.beta1, training.beta2, training.weight_decay) == ("adam", 0.9, 0.98, 0.0)
    assert training.epsilon == 1e-9
    published = [width**-0.5 * min(s**-0.5, s * warmup**-1.5) for s in range(1, steps + 1)]
    rates = [learning_rate(s / steps, training) for s in range(1, steps + 1)]
    assert [rate / rates[-1] for rate in rates] == pytest.approx([rate / published[-1] for rate in published])


@given(name=st.sampled_from(sorted(recipes.RECIPES)), width=st.integers(1, 4096), factor=st.integers(1, 16))
def test_the_learning_rate_is_measured_at_one_width_and_falls_with_it(name: str, width: int, factor: int) -> None:
    """nanoGPT trains its character model of width 384 at 0.001."""
    assert choose_learning_rate("gpt2", 384) == 1e-3
    recipe = recipes.RECIPES[name]
    assert choose_learning_rate(name, recipes.LR_BASE_WIDTH) == recipe.lr
    wide, narrow = choose_learning_rate(name, factor * width), choose_learning_rate(name, width)
    assert wide / narrow == pytest.approx(factor**-recipe.lr_exponent, rel=0.1)  # rounded to two digits


def test_an_adapter_is_trained_at_the_rate_that_was_measured_for_its_rank_and_scale() -> None:
    """The table of decision 022, at a width of 128; at most twice the rate that was measured there."""
    rates: list[tuple[dict[str, Any], float]] = [
        ({}, 0.01),
        ({"rank": 32, "alpha": 64.0}, 0.005),
        ({"rank": 2, "alpha": 4.0}, 0.02),
        ({"alpha": 64.0}, 0.005),
        ({"rank": 16, "rank_stabilised": True}, 0.005),
        ({"rank": 1, "alpha": 1e-9}, 0.02),
        ({"kind": "bottleneck", "rank": 64}, 0.02),
    ]
    base = small(vocab_size=100, width=128, heads=4)
    for choices, lr in rates:
        narrow, found, wide = (
            planned(base=dataclasses.replace(base, width=width), adapter=adapter(**choices)).training.lr
            for width in (8, 128, 512)
        )
        assert found == pytest.approx(lr), choices
        assert wide <= lr <= narrow <= 0.04, choices


def test_the_learning_rate_ends_at_a_tenth_unless_the_recipe_or_the_user_sets_its_end() -> None:
    gpt2 = planned(model={"preset": "gpt2"}).training
    assert gpt2.min_lr == pytest.approx(gpt2.lr / 10)
    assert planned(model={"preset": "gpt2"}, training={"lr": 0.5}).training.min_lr == pytest.approx(0.05)
    assert planned(model={"preset": "gpt2"}, training={"min_lr": 0.0}).training.min_lr == 0
    assert planned(model={"preset": "modern"}).training.min_lr == 0
    assert planned(adapter=adapter(), base=small(vocab_size=100)).training.weight_decay == 0


def test_warmup_steps_become_a_share_of_the_run() -> None:
    for steps, share in ((0, 0.0), (5, 0.05), (100, 1.0)):
        plan = planned(training={"warmup_steps": steps}, budget=Budget(steps=100))
        assert plan.training.warmup == pytest.approx(share)
    plan = planned(training={"warmup_steps": 10**9}, budget=Budget(time=60))  # the number of steps is an estimate
    assert plan.training.warmup == 1
    assert plan.notices == (f"The time is enough for about {plan.steps} steps: all of them are warmup.",)


def test_weight_decay_of_modern_models_is_proportional_to_epochs_up_to_a_limit_unless_it_is_chosen() -> None:
    """Decision 014: 0.12 per epoch, at most 1 + 0.1 times the parameters per token, and at most 3."""
    assert (choose_weight_decay(5, 0), choose_weight_decay(1000, 0)) == (pytest.approx(5 * 0.12), 1)
    assert (choose_weight_decay(1000, 10), choose_weight_decay(1000, 1000)) == (2, 3)
    assert choose_weight_decay(0, 1000) == recipes.MIN_WEIGHT_DECAY
    few, many = Budget(epochs=0.5), Budget(epochs=50)
    decays = [planned(budget=budget, model={"size": "small"}).training.weight_decay for budget in (few, many)]
    assert decays[0] == recipes.MIN_WEIGHT_DECAY < decays[1]
    for budget in (few, many):
        assert planned(budget=budget, model={"preset": "gpt2"}).training.weight_decay == 0.1
        assert planned(budget=budget, training={"weight_decay": 0.3}).training.weight_decay == 0.3


def test_only_new_modern_decoders_of_text_with_a_small_vocabulary_predict_the_token_after_the_next() -> None:
    assert planned(vocab_size=recipes.MTP_MAX_VOCABULARY).training.mtp_weight == 0.5
    assert planned(vocab_size=recipes.MTP_MAX_VOCABULARY + 1).training.mtp_weight == 0
    for chosen in (0.0, 0.25):
        assert planned(training={"mtp_weight": chosen}).training.mtp_weight == chosen
    assert planned(model={"preset": "gpt2"}).training.mtp_weight == 0
    assert planned(model={"architecture": "encoder"}).training.mtp_weight == 0
    assert planned(base=small(vocab_size=100)).training.mtp_weight == 0
    assert planned_pairs([10]).training.mtp_weight == 0
    message = "`mtp_weight` is for decoders of plain text, not for"
    with pytest.raises(UsageError, match=message):
        planned(model={"architecture": "encoder"}, training={"mtp_weight": 0.5})
    with pytest.raises(UsageError, match=message):
        planned_pairs([10], training={"mtp_weight": 0.5})


def test_bpe_dropout_is_for_new_decoders_that_see_a_text_of_bpe_tokens_often() -> None:
    often: dict[str, Any] = {"tokenizer_kind": "bpe", "budget": Budget(epochs=recipes.BPE_DROPOUT_MIN_EPOCHS)}
    assert planned(**often, training={"generations": 1}).training.bpe_dropout == recipes.BPE_DROPOUT > 0
    assert planned(**often, training={"bpe_dropout": 0.0}).training.bpe_dropout == 0
    seldom = {**often, "budget": Budget(epochs=recipes.BPE_DROPOUT_MIN_EPOCHS - 1)}
    assert planned(**seldom).training.bpe_dropout == 0
    assert planned(**seldom, training={"bpe_dropout": 0.1}).training.bpe_dropout == 0.1
    for choices in ({"model": {"preset": "gpt2"}}, {"model": {"architecture": "encoder"}}, {"base": small()}):
        assert planned(**often, **choices).training.bpe_dropout == 0
    assert planned(budget=often["budget"]).training.bpe_dropout == 0
    with pytest.raises(UsageError, match="`bpe_dropout` is for a BPE tokenizer, and this one is of kind char"):
        planned(training={"bpe_dropout": 0.1})
    with pytest.raises(UsageError, match="`bpe_dropout` is for decoders of plain text, not for encoders"):
        planned(**often, model={"architecture": "encoder"}, training={"bpe_dropout": 0.1})


def test_weights_are_averaged_and_count_as_memory_where_a_new_modern_decoder_sees_its_text_six_times() -> None:
    """Decision 006: with a mean age of 5 % of the steps, and a learning rate that ends at a seventh of its peak."""
    often = Budget(epochs=6)
    for compatible in ({}, {"lr": 0.02}, {"optimizer": "normuon"}):
        training = planned(budget=often, training=compatible).training
        assert (training.average, training.min_lr) == (0.05, pytest.approx(training.lr / 7, rel=0.05))
    few = planned(budget=Budget(epochs=5.9)).training
    assert (few.average, few.min_lr) == (0, 0)
    choices: list[dict[str, Any]] = [{"average": 0.0}, {"min_lr": 0.0}, {"schedule": "cosine"}, {"optimizer": "adamw"}]
    for choice in choices:
        assert planned(budget=often, training=choice).training.average == 0
    assert planned(budget=often, training={"average": 0.2}).training.min_lr == 0
    for model in ({"preset": "gpt2"}, {"architecture": "encoder"}):
        assert planned(budget=often, model=model).training.average == 0
    assert planned(budget=often, base=small(vocab_size=100)).training.average == 0
    assert planned_pairs([10] * 100, budget=often).training.average == 0
    plain, averaged = (planned(budget=Budget(epochs=6), training=chosen) for chosen in ({"average": 0.0}, {}))
    assert averaged.memory - plain.memory == 4 * plain.parameters


def test_there_are_a_dozen_evaluations_or_the_chosen_number_and_they_take_little_time() -> None:
    training = planned(budget=Budget(steps=2000)).training
    assert (training.eval_every, training.log_every) == (167, 20)
    assert training.save_every <= training.eval_every
    chosen = planned(budget=Budget(steps=2000), training={"eval_every": 7, "save_every": 3}).training
    assert (chosen.eval_every, chosen.save_every) == (7, 3)
    slow = planned(model={"size": "base"}, budget=Budget(steps=10_000), on=machine(matmul_rate=5e11))
    assert 1 < slow.training.save_every < slow.training.eval_every
    assert slow.training.save_every * slow.seconds / slow.steps < 70  # about a minute between two saves
    for size in SIZES:
        assert 2048 <= planned(model={"size": size}).training.eval_tokens <= 1_000_000


@pytest.mark.parametrize("eval_every", [None, 1, 30, 100_000])
@pytest.mark.parametrize("seconds", [10, 45, 600])
@pytest.mark.parametrize("size", ["nano", "small", "medium"])
def test_evaluations_take_at_most_a_tenth_of_a_time_budget_or_have_the_smallest_samples(
    size: str, seconds: int, eval_every: int | None
) -> None:
    """A forward pass takes at least 2 FLOPs per weight and token."""
    text = dataclasses.replace(data(5_000_000), val_tokens=2_000_000)
    chosen = {} if eval_every is None else {"eval_every": eval_every}
    plan = planned(data=text, budget=Budget(time=seconds), model={"size": size}, training=chosen)
    training = plan.training
    assert training.eval_every == (eval_every or training.eval_every)
    evaluated = math.ceil(plan.steps / training.eval_every) * training.eval_tokens
    assert evaluated * 2 * matrix_parameters(plan.model) / machine().matmul_rate < 0.1 * seconds or (
        training.eval_tokens == 2048
    )
    assert plan.evaluation_seconds <= 0.1 * seconds or training.eval_tokens == 2048


def test_evaluations_count_the_time_of_tokens_that_are_not_scored() -> None:
    """Texts of 200 tokens with one label each: 2,048 tokens would be 2,048 texts."""
    labels = SimpleNamespace(n_scored=5000, lengths=np.full(5000, 200))
    shape = ScoredSizes(cast(Any, labels), cast(Any, labels))
    assert shape.validation_size(data(1), 100) == (5000, 500_000)
    assert Sizes().validation_size(data(1), 100) == (1000, 1000)
    on, config = machine(), small()
    text, label = (
        PlanRequest(objective=objective, data=data(1000), vocab_size=100, sizes=sizes)
        for objective, sizes in (("next-token", Sizes()), ("classification", shape))
    )
    ratio = evaluation_speed(on, text, config) / evaluation_speed(on, label, config)
    assert ratio == pytest.approx(min(200, config.context))


def test_evaluations_of_a_slow_base_take_a_tenth_of_the_time() -> None:
    """A forward pass takes at least 2 FLOPs per weight and token."""
    sizes: dict[str, Any] = {"layers": 30, "heads": 9, "kv_heads": 3, "width": 576, "context": 512, "tie": True}
    base = make_model_config(vocab_size=49_152, preset="modern", size="small", **sizes)
    text = dataclasses.replace(data(2_000_000), val_tokens=200_000)
    on, weights = machine(), 120_000_000
    for budget in (Budget(time=300), Budget(time=3600), Budget(steps=1000)):
        plan = planned(base=base, adapter=adapter(), budget=budget, data=text, on=on, vocab_size=49_152)
        seconds = plan.training.eval_tokens * 2 * weights / on.matmul_rate
        evaluations = plan.steps / plan.training.eval_every
        assert plan.training.eval_tokens >= 2048 and 0.01 < evaluations * seconds / plan.seconds < 0.2
        assert seconds < max(15, plan.seconds / 40)
    one_step = planned(base=base, adapter=adapter(), budget=Budget(steps=1), data=text, on=on, vocab_size=49_152)
    assert one_step.training.eval_tokens == 2048
    few = dataclasses.replace(text, val_tokens=1000)  # these take little time, so that they are not rarer
    plan = planned(base=base, adapter=adapter(), budget=Budget(time=300), data=few, vocab_size=49_152)
    assert plan.evaluation_seconds < 30 and plan.steps / plan.training.eval_every >= 4


def test_a_new_modern_decoder_has_as_many_generations_as_its_passes_allow() -> None:
    def number(epochs: float, tokens: int = 100_000, **choices: Any) -> int:
        fields = {"model": {"size": "nano"}, "budget": Budget(epochs=epochs), **choices}
        return planned(tokens, **fields).training.generations

    assert [number(epochs) for epochs in (1, 11, 13, 19, 1000)] == [1, 1, 2, 3, recipes.MAX_GENERATIONS]
    assert number(1000, model={"size": "nano", "preset": "gpt2"}) == 1
    assert number(1000, model={"size": "nano", "architecture": "encoder"}, objective="masked-token") == 1
    assert number(1000, ranks=2) == 1
    for epochs, ranks, has_notice in ((1000, 2, True), (1000, 1, False), (5, 2, False)):
        notices = planned(100_000, model={"size": "nano"}, budget=Budget(epochs=epochs), ranks=ranks).notices
        words = f"In one process, this run would have {recipes.MAX_GENERATIONS} generations; in several, it has one."
        assert (words in notices) == has_notice
    assert number(4, training={"generations": 4}) == 4
    assert number(1000, training={"generations": 1}) == 1


def test_each_generation_is_planned_as_a_run_of_its_length_and_takes_the_time_of_two_evaluations() -> None:
    """Weight decay, dropout and warmup; the time only where the number of steps is chosen."""
    fields: dict[str, Any] = {"model": {"size": "nano"}, "budget": Budget(steps=12_000)}
    three = planned(1_000_000, training={"generations": 3, "warmup_steps": 80}, **fields)
    alone = planned(1_000_000, training={"warmup_steps": 80}, **{**fields, "budget": Budget(steps=4000)})
    assert alone.training.generations == 1
    assert three.training.weight_decay == alone.training.weight_decay > recipes.MIN_WEIGHT_DECAY
    assert three.model == alone.model
    assert three.training.warmup == alone.training.warmup == 0.02
    without = planned(1_000_000, training={"generations": 1}, **fields)
    config, speed = three.model, evaluation_speed(machine(), request_of(1_000_000), three.model)
    assert config.width == without.model.width
    assert three.seconds - without.seconds == pytest.approx(2 * 2 * 1_000_000 / speed, rel=1e-6)


def test_as_many_generations_are_joined_as_help_unless_a_size_is_chosen() -> None:
    def plan(epochs: float = 1000, tokens: int = 30_000, **choices: Any) -> Plan:
        return planned(tokens, **{"budget": Budget(epochs=epochs), **choices})

    several, alone = plan(), plan(training={"join": 1})
    assert several.training.join == recipes.JOINED
    assert several.model.width == recipes.JOINED * alone.model.width
    assert several.model.layers == alone.model.layers
    assert several.parameters == alone.parameters
    assert plan(2.4 * recipes.GENERATION_EPOCHS, 100_000).training.join == 2
    assert plan(1.5 * recipes.GENERATION_EPOCHS, 100_000).training.join == 1
    for chosen in ({"size": "nano"}, {"width": 96}, {"layers": 2}, {"norm": "layernorm"}, {"position": "learned"}):
        assert plan(model=chosen).training.join == 1
    two = plan(model={"size": "nano"}, training={"join": 2, "generations": 2})
    assert (two.model.width, two.model.heads) == (2 * SIZES["nano"]["width"], 2 * SIZES["nano"]["heads"])
    with pytest.raises(UsageError, match="`join` is for models of `preset` modern"):
        plan(model={"preset": "gpt2"}, training={"join": 2, "generations": 2})
    with pytest.raises(UsageError, match="`join` is 2; it must be at most `generations`"):
        plan(training={"join": 2, "generations": 1})


def test_fewer_generations_are_joined_where_the_model_would_be_large_or_joining_takes_long() -> None:
    def join(limits: dict[str, float], **choices: Any) -> int:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in limits.items():
                patch.setattr(recipes, name, value)
            return planned(30_000, **{"budget": Budget(epochs=1000), **choices}).training.join

    parameters = planned(30_000, budget=Budget(epochs=1000)).parameters
    for number in (1, 2, 3):
        assert join({"MAX_JOINED_PARAMETERS": number**2 * parameters}) == number
        assert join({"MAX_JOINED_PARAMETERS": number**2 * parameters - 1}) == max(1, number - 1)
    alone = planned(30_000, budget=Budget(epochs=1000), training={"join": 1, "generations": 1})
    three = join_seconds(machine(), request_of(30_000), alone.model, 3)
    assert join({"MAX_JOIN_SHARE": 1.2 * three / alone.seconds}) == 3
    assert join({"MAX_JOIN_SHARE": 0.7 * three / alone.seconds}) == 2
    assert join({"MAX_JOIN_SHARE": 0.0}) == 1


def test_generations_of_a_budget_of_time_have_enough_passes_after_the_time_between_them() -> None:
    plans = [planned(100_000, budget=Budget(time=seconds)) for seconds in (60, 120, 300, 600, 1800)]
    several = [plan for plan in plans if plan.training.generations > 1]
    assert len(several) >= 2
    for plan in several:
        assert plan.epochs / plan.training.generations >= recipes.GENERATION_EPOCHS
        assert plan.training.average > 0


def test_generations_that_a_run_cannot_have_are_errors_and_a_weight_without_a_teacher_is_a_notice() -> None:
    def two(**choices: Any) -> Plan:
        settings = {"generations": 2, **choices.pop("training", {})}
        return planned(**{"budget": Budget(epochs=8), **choices, "training": settings})

    with pytest.raises(UsageError, match="`generations` is for new models"):
        two(base=make_model_config(vocab_size=100, preset="modern", size="nano"))
    with pytest.raises(UsageError, match="`generations` is for a run in one process"):
        two(ranks=2)
    with pytest.raises(UsageError, match=r"`generations=2`, each has 0\.75 passes over the text"):
        two(budget=Budget(epochs=1.5))
    few = dataclasses.replace(machine(), free_memory=600_000_000)
    with pytest.raises(UsageError, match=r"`generations` needs 0.3 GB for the predictions of a teacher"):
        two(on=few)
    with pytest.raises(UsageError, match="`label_smoothing` has no effect beside the predictions of a teacher"):
        two(training={"label_smoothing": 0.1})
    assert planned(on=few, budget=Budget(epochs=80)).training.generations == 1
    for smoothing in (0.0, 0.1):
        settings = planned(budget=Budget(epochs=80), training={"label_smoothing": smoothing}).training
        assert (settings.generations > 1, settings.label_smoothing) == (not smoothing, smoothing)
    assert not two().notices
    notices = planned(training={"teacher_weight": 0.2}).notices
    assert any("`teacher_weight` has no effect" in notice for notice in notices)
