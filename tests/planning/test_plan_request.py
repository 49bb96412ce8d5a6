"""The training sequences of each kind of data, plans for conversations, and the cost of models."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.machines import machine
from tests.planning.planned import data, planned
from tests.variants import VARIANTS, small
from tinylm.config.presets import PRESETS, make_model_config
from tinylm.config.training import MUON_OPTIMIZERS, Budget, TrainingConfig
from tinylm.errors import UsageError
from tinylm.jobs.chat.corpus import ChatTokens
from tinylm.jobs.job import job_on
from tinylm.jobs.labels.corpus import LabelTokens
from tinylm.jobs.labels.job import LabelSizes
from tinylm.jobs.preferences.corpus import PreferenceTokens
from tinylm.jobs.preferences.job import PreferenceSizes
from tinylm.jobs.scored import ScoredSizes
from tinylm.machine.measure import probe_config
from tinylm.planning.memory import training_memory
from tinylm.planning.plan import Plan
from tinylm.planning.plan_request import (
    PlanRequest,
    Rows,
    matrix_parameters,
    muon_flops,
    training_flops,
    training_speed,
)
from tinylm.planning.plan_request import training_step_seconds as step_seconds
from tinylm.text.scored_tokens import FIRST, SCORED
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.optimizer import build_optimizer
from tinylm.transformer.build import build_model, count_parameters

END = 3


def rows_of(kind: str, tokens: list[int], context: int, pack: bool | None = None, pairs: int = 0) -> Rows:
    """The rows of encoded data that are both the training and the validation part."""
    part = np.array(tokens, dtype=np.uint16)
    described = dataclasses.replace(data(len(tokens)), kind=kind, train_pairs=pairs)
    tokenizer = cast(Tokenizer, SimpleNamespace(end_of_text_id=END))
    shape = job_on(kind).sizes(TokenFolder(Path("unused"), part, part), tokenizer)
    assert shape.check_context(described, context, is_new=True) is not None
    return shape.rows(described, context, pack)


def test_every_kind_of_corpus_has_the_rows_and_batches_of_its_data() -> None:
    """Windows continue in the next epoch, pairs make whole batches, and packed conversations share rows."""
    rows = rows_of("text", [1] * 30, 4)
    assert (rows.count, rows.tokens, rows.longest, rows.constant) == (7.5, 4, 4, True)
    assert rows.steps_per_epoch(2) == 3.75
    short, long = [1, 1, END, 1, END], [1, END, 1, 1, 1, 1, END]  # with the end-of-text id, contexts of 3 and 5
    rows = rows_of("pairs", short * 5 + long, 4, pairs=6)
    assert (rows.count, rows.longest, rows.constant) == (5, 8, False)
    assert rows.tokens == (5 * 5 + 7) / 6
    assert [rows.steps_per_epoch(size) for size in (2, 5, 100)] == [3, 1, 1]
    conversation = [4 + FIRST, 4 + SCORED, 4 + SCORED]  # two inputs
    alone, packed = (rows_of("chat", conversation * 10, 6, pack) for pack in (False, True))
    assert (alone.count, alone.tokens, alone.longest, alone.constant) == (10, 2, 2, False)
    assert (packed.count, packed.tokens, packed.longest, packed.constant) == (4, 5, 6, True)
    assert (alone.steps_per_epoch(4), packed.steps_per_epoch(4)) == (3, 1)


def tokens_of(lengths: list[int], scored: int = 2) -> ChatTokens:
    """Conversations of these lengths, of which the last tokens are scored."""
    parts = []
    for length in lengths:
        codes = np.full(length, 4)
        codes[length - scored :] |= SCORED
        codes[0] |= FIRST
        parts.append(codes)
    return ChatTokens(np.concatenate(parts).astype(np.uint16))


def planned_chats(train: list[int], val: tuple[int, ...] = (10,), scored: int = 2, **choices: Any) -> Plan:
    chats = dataclasses.replace(data(sum(train)), kind="chat", documents=len(train))
    shape = ScoredSizes(tokens_of(train, scored), tokens_of(list(val), scored))
    return planned(**{"data": chats, "sizes": shape, **choices})


def test_the_context_of_a_new_model_has_room_for_nearly_all_conversations_and_some_scored_token() -> None:
    plan = planned_chats([301] * 199 + [2000], model={"size": "nano"})
    assert plan.model.context == 608  # twice the usual length, in steps of 32
    assert plan.notices[0].startswith("1 of 200 training conversations are cut to the context of 608 tokens")
    assert planned_chats([20] * 50, model={"size": "small"}).model.context == 512  # that of the size
    assert planned_chats([301] * 50, scored=290, val=(300,), model={"size": "nano", "context": 64}).model.context == 64
    with pytest.raises(UsageError, match="No training conversation has a scored token within the context of 64"):
        planned_chats([301] * 50, model={"size": "nano", "context": 64}, val=(10,))
    with pytest.raises(UsageError, match="Nothing is scored in the training conversations"):
        planned_chats([30] * 50, scored=0)


def test_an_epoch_has_as_many_steps_as_batches_of_rows_of_about_as_many_tokens_packed_or_not() -> None:
    choices: dict[str, Any] = {"model": {"size": "nano", "context": 512}, "budget": Budget(epochs=2)}
    packed = planned_chats([101] * 55, training={"batch_size": 2}, **choices)
    assert packed.steps == 2 * 6  # rows of 512 hold 5 conversations of 100 inputs
    single = planned_chats([101] * 55, training={"batch_size": 2, "pack": False}, **choices)
    assert single.steps == 2 * 28
    assert packed.training.pack and not single.training.pack
    assert packed.training.objective == "chat"
    for choices in ({}, {"pack": False}):
        plan = planned_chats([101] * 5000, model={"size": "nano", "context": 512}, training=choices)
        assert 900 <= plan.training.batch_size * (100 if choices else 500) <= 2100


def test_memory_is_that_of_the_rows() -> None:
    def per_sequence(length: int, pack: bool) -> int:
        chats = dataclasses.replace(data(length * 20), kind="chat", documents=20)
        shape = ScoredSizes(tokens_of([length] * 20), tokens_of([10]))
        request = PlanRequest(objective="chat", data=chats, vocab_size=100, sizes=shape, training={"pack": pack})
        config = planned(model={"size": "nano", "context": 2048}).model
        return training_memory(machine(), request, config, 1000, checkpointed=False).per_sequence

    assert per_sequence(101, False) * 512 == per_sequence(101, True) * 100
    assert per_sequence(1001, False) == per_sequence(1001, True)


def test_conversations_are_packed_where_three_fit_a_row_and_only_packed_rows_are_compiled() -> None:
    model = {"size": "nano", "context": 600}
    assert planned_chats([171] * 50, model=model).training.pack  # three times 170 of 512
    assert not planned_chats([173] * 50, model=model).training.pack
    assert planned_chats([173] * 50, model=model, training={"pack": True}).training.pack
    long = Budget(time=3600)
    for pack in (True, False):
        plan = planned_chats([101] * 5000, budget=long, model={"size": "mini"}, training={"pack": pack})
        assert plan.runtime.compile == pack
    assert planned(budget=long, model={"size": "mini"}).runtime.compile


def test_a_run_on_preferences_without_a_budget_is_brief_since_its_loss_falls_while_the_answers_get_worse() -> None:
    tokens = PreferenceTokens(np.array([4 + FIRST, 4, 8 + SCORED, 4 + FIRST, 4, 12 + SCORED] * 40, dtype=np.uint16))
    pairs = dataclasses.replace(data(240), kind="preferences", documents=80, val_records=40)
    choices: dict[str, Any] = {"data": pairs, "sizes": PreferenceSizes(tokens, tokens), "base": small(context=16)}
    assert planned(**choices).steps == 50
    assert planned(**choices, training={"batch_size": 2}).steps == 50  # an epoch has fewer
    long = PreferenceTokens(np.tile(np.asarray(tokens._codes), 10))
    many = {**choices, "sizes": PreferenceSizes(long, long), "training": {"batch_size": 1, "pack": False}}
    assert planned(**many).steps == 400
    assert planned(**choices, budget=Budget(steps=7)).steps == 7


def test_the_last_weights_of_a_classifier_are_kept_if_few_texts_choose_between_them() -> None:
    def keep(records: int, **training: Any) -> str:
        labelled = dataclasses.replace(data(1000), kind="labels", val_records=records)
        texts = LabelTokens(np.array([4 + FIRST, 4 + SCORED], dtype=np.uint16))
        return PlanRequest(
            objective="classification", data=labelled, vocab_size=100, sizes=LabelSizes(texts, texts), training=training
        ).keep

    assert [keep(99), keep(100), keep(99, patience=3)] == ["last", "best", "best"]


@pytest.mark.parametrize(
    "choices",
    [
        {"preset": "modern", "kv_heads": 1},
        {"preset": "modern", "head_dim": 50, "tie": False},
        {"preset": "gpt2", "size": "tiny"},
        {"preset": "original"},
    ],
)
def test_training_flops_equal_those_that_torch_counts(choices: dict[str, Any]) -> None:
    """In float64 with attention dropout, so that all operations are torch's own, which FlopCounterMode can count."""
    config = make_model_config(vocab_size=77, **{"size": "nano", "context": 32, "attention_dropout": 0.1, **choices})
    model = build_model(config).double().train()
    ids = torch.randint(config.vocab_size, (2, config.context))
    with FlopCounterMode(display=False) as counter:
        model.logits(model.probe(ids).hidden).sum().backward()
    masked = (
        6 * config.layers * config.context * config.heads * config.head_dim
    )  # unfused attention computes the masked scores as well
    assert training_flops(config) + masked == counter.get_total_flops() / ids.numel()


def test_matrix_parameters_and_parameters_by_part_are_those_of_a_built_model() -> None:
    """Also of Gemma 3, with its head dimension and local layers; of experts, those of each token."""
    dense = [make_model_config(vocab_size=77, preset=preset, size="nano") for preset in PRESETS]
    for config in (*dense, dict(VARIANTS)["gemma 3"]):
        matrices = [p for n, p in build_model(config).named_parameters() if p.dim() == 2 and "position" not in n]
        assert matrix_parameters(config) == sum(matrix.numel() for matrix in matrices)
    for config in (*dense, small(experts=3), small(architecture="encoder-decoder", encoder_layers=1)):
        parts = count_parameters(config)
        assert parts["total"] == sum(parameter.numel() for parameter in build_model(config).parameters())
        assert parts["total"] == sum(number for name, number in parts.items() if name != "total")
    dense, routed = small(ffn_width=48), small(ffn_width=48, experts=4, experts_per_token=1)
    router = routed.layers * routed.width * routed.experts
    assert matrix_parameters(routed) == matrix_parameters(dense) + router


@pytest.mark.parametrize(
    "shape", [{}, {"experts": 3}, {"position": "relative"}, {"architecture": "encoder-decoder", "encoder_layers": 1}]
)
def test_the_flops_of_muon_equal_those_that_torch_counts(shape: dict[str, Any]) -> None:
    config = small(layers=2, width=32, ffn_width=48, heads=4, **shape)
    model = build_model(config)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    training = TrainingConfig(
        budget=Budget(steps=1), batch_size=1, micro_batch=1, lr=0.1, min_lr=0.0, warmup=0.0, optimizer="muon"
    )
    optimizer = build_optimizer(model, training, "fp32")
    with FlopCounterMode(display=False) as counter:
        optimizer.step()
    assert muon_flops(config) == counter.get_total_flops()


def test_a_step_takes_the_time_of_its_tokens_and_of_the_optimizer() -> None:
    config, on = make_model_config(vocab_size=77, preset="modern", size="small"), machine(matmul_rate=1e12)
    by_adamw = step_seconds(on, config, 4096, "adamw")
    assert by_adamw == 4096 / training_speed(on, config)
    for optimizer in MUON_OPTIMIZERS:
        difference = step_seconds(on, config, 4096, optimizer) - by_adamw
        assert difference == pytest.approx(muon_flops(config) / 1e12 / 0.75)


@pytest.mark.parametrize(
    ("layers", "width", "vocab_size", "tokens_per_second"),
    [
        (4, 128, 1024, 14_525),
        (4, 192, 1024, 10_764),
        (4, 256, 1024, 8352),
        (2, 256, 1024, 16_797),
        (4, 384, 1024, 5779),
        (4, 256, 4096, 8150),
        (4, 256, 65, 9981),
    ],
)
def test_the_speeds_of_a_processor_with_matrix_units_are_planned_within_a_factor(
    layers: int, width: int, vocab_size: int, tokens_per_second: int
) -> None:
    """Those of decision 053, of layers that are not compiled; compiled ones are 1.35 times as fast."""
    config = make_model_config(
        vocab_size=vocab_size, preset="modern", size="tiny", layers=layers, width=width, heads=4, context=512
    )
    on = machine(matmul_rate=2.615e12, layer_seconds=2.566e-5, threads=2)
    planned = 2048 / step_seconds(on, config, 2048, "muon", 512)
    assert 1.0 < planned / tokens_per_second < 1.6


def test_the_speed_of_the_measured_decoder_is_the_measured_one_and_the_layers_of_both_stacks_count() -> None:
    """With a time per layer and little of it for matrix products, or all of it."""
    config, tokens, threads = probe_config(), 1000, 2
    fast = machine(matmul_rate=1e15, layer_seconds=4e-5, threads=threads)
    assert tokens / training_speed(fast, config) == pytest.approx(tokens * 2 * 4e-5 / threads)
    products = training_flops(config) / (0.75 * 1e10)
    slow = machine(matmul_rate=1e10, layer_seconds=threads * products / 2, threads=threads)
    assert tokens / training_speed(slow, config) == pytest.approx(tokens * 1.1 * products)
    few, many = (small(architecture="encoder-decoder", encoder_layers=number, layers=2) for number in (2, 12))
    assert training_speed(machine(), few) > 1.5 * training_speed(machine(), many)
