"""Training runs on disk. Reference for a resumed run: the uninterrupted run, to the bit. test_ranks.py has restarts."""

import copy
import dataclasses
import errno
import itertools
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import tinylm
from tests.kernels.test_cpu import two_cores
from tests.shell import snapshot, story
from tests.training.conftest import Begin
from tests.training.run_sessions import SHAPE, TOKENIZER, Killed, RunSession, adapter_for, config_of, contents
from tests.variants import every_variant, randomised
from tinylm.adapters.bottleneck import SUBLAYERS
from tinylm.config.model import ModelConfig
from tinylm.config.run import AdapterConfig, RunConfig
from tinylm.config.settings import TrainSettings
from tinylm.config.training import Budget
from tinylm.errors import TinyLMError, UsageError
from tinylm.evaluation.loop import evaluate_loss
from tinylm.kernels import cpu
from tinylm.machine.device import DTYPES, autocast, weights_dtype
from tinylm.machine.measure import LoadMeter
from tinylm.models.load_adapter import add_adapter
from tinylm.models.open import open_model
from tinylm.objectives.loss import next_token
from tinylm.planning.memory import MemoryPlan, TrainingMemory
from tinylm.planning.recipes import MEMORY_ERROR, MEMORY_SHARE
from tinylm.run_directory.directory import LastSave, RunDirectory
from tinylm.run_directory.loading import load_model, read_config, read_weights
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.system.ranks import Ranks
from tinylm.text.batches import evaluation_batches
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.training import pipeline as restart
from tinylm.training.events import Evaluated, Event, Logged, Notice, Started, Stepped
from tinylm.training.pipeline import train_or_resume
from tinylm.training.run import TrainingRun, disable_dropout, set_weights_dtype
from tinylm.training.session import Session
from tinylm.training.trainer import StopTraining
from tinylm.training.training_request import TrainingRequest
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import build_model


@pytest.fixture(scope="module")
def adapter(tokens: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> AdapterConfig:
    return adapter_for(tmp_path_factory.mktemp("base") / "base", tokens, layers=2)


@dataclass(frozen=True)
class Case:
    """A run that is stopped or killed at a step. adapter: the kind of adapter, if one is trained."""

    settings: dict[str, Any]
    until: int
    end: type[BaseException] = StopTraining
    adapter: dict[str, Any] | None = None
    shape: dict[str, Any] = field(default_factory=dict)


PAIRS = {"architecture": "encoder-decoder", "encoder_layers": 1}
CASES = {  # each kind of state, objective and adapter at least once
    "adamw, stopped while evaluating": Case({"patience": 2, "lr": 0.5, "budget": Budget(steps=300)}, 24),
    "muon, merged experts": Case({"optimizer": "muon"}, 31, shape={"experts": 3, "expert_mode": "merge"}),
    "normuon, averaged, killed": Case({"optimizer": "normuon", "momentum": 0.8, "average": 0.1}, 40, Killed),
    "encoder of an epoch and a half, killed": Case(
        {"budget": Budget(epochs=1.5)}, 40, Killed, shape={"architecture": "encoder"}
    ),
    "pairs": Case({"label_smoothing": 0.1}, 31, shape=PAIRS),
    "growing sequences and multi-token prediction, killed": Case({"sequence_growth": 4, "mtp_weight": 0.5}, 40, Killed),
    "adapter with one B, killed": Case({"optimizer": "adam"}, 40, Killed, {"share_b": True}, {"layers": 2}),
    "averaged, stopped before the first evaluation": Case({"average": 0.2, "momentum": 0.8, "optimizer": "normuon"}, 5),
    "the last weights are kept": Case({"keep": "last"}, 31),
    "bottlenecks": Case({"schedule": "inverse-sqrt"}, 5, StopTraining, {"kind": "bottleneck", "targets": SUBLAYERS}),
}
TWO_PASSES = ("muon, merged experts", "pairs", "adapter with one B, killed")


def case_config(case: Case, adapter: AdapterConfig, **settings: Any) -> RunConfig:
    chosen = None if case.adapter is None else dataclasses.replace(adapter, **case.adapter)
    return config_of(chosen, dataclasses.replace(SHAPE, **case.shape), **{**case.settings, **settings})


def last_save(path: Path) -> LastSave:
    return RunDirectory(path).load_last(read_config(path))


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_equals_an_uninterrupted_run(
    name: str, tokens: TokenFolder, tmp_path: Path, adapter: AdapterConfig
) -> None:
    """Weights, optimizer, state, best weights and metrics are equal, with dropout and gradient accumulation."""
    case = CASES[name]
    config = case_config(case, adapter)
    stopped_by, state = RunSession(tmp_path / "straight", tokens).begin(config)

    first = RunSession(tmp_path / "resumed", tokens, case.until, case.end)
    if case.end is Killed:
        with pytest.raises(Killed):
            first.begin(config)
        with (tmp_path / "resumed" / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 31, "val_l')
    else:
        assert first.begin(config)[0] == "signal"
    saved = last_save(tmp_path / "resumed").state["step"]
    assert read_weights(tmp_path / "resumed", config).step > 0
    assert saved <= case.until < state.step
    assert (saved == case.until) == (case.end is StopTraining)

    second = RunSession(tmp_path / "resumed", tokens)
    again_stopped_by, again = second.resume()
    assert (again_stopped_by, again.step) == (stopped_by, state.step)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "straight")
    assert [event.step for event in second.reported(Stepped)] == list(range(saved + 1, state.step + 1))


def test_a_resumed_run_with_bpe_dropout_equals_an_uninterrupted_run(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    merges = np.full((TOKENIZER.vocab_size, 2), -1)
    merges[3:] = 1, 2  # as if these characters were merged tokens
    monkeypatch.setattr(Tokenizer, "merges", lambda tokenizer: merges)
    config = config_of(budget=Budget(steps=8), eval_every=3, save_every=4, bpe_dropout=0.4)
    RunSession(tmp_path / "straight", tokens).begin(config)
    RunSession(tmp_path / "plain", tokens).begin(config_of(budget=Budget(steps=8), eval_every=3, save_every=4))
    RunSession(tmp_path / "resumed", tokens, until=4).begin(config)
    RunSession(tmp_path / "resumed", tokens).resume()
    assert contents(tmp_path / "resumed") == contents(tmp_path / "straight")
    assert contents(tmp_path / "straight")["weights"] != contents(tmp_path / "plain")["weights"]


@pytest.mark.parametrize("name", TWO_PASSES)
def test_a_run_with_checkpointed_activations_equals_one_without(
    name: str, begin: Begin, adapter: AdapterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, if both are evaluated in batches of the same size."""
    monkeypatch.setattr("tinylm.training.validation.evaluation_rows", lambda micro_batch, checkpointed: micro_batch)
    settings = {"budget": Budget(steps=8), "eval_every": 4, "log_every": 1}
    found = []
    for checkpointed in (False, True):
        config = case_config(CASES[name], adapter, **settings, checkpoint_activations=checkpointed)
        found.append({**contents(begin(str(checkpointed), config).path), "config": None})
    assert found[0] == found[1]


@two_cores
def test_weights_do_not_depend_on_where_threads_run_beside_busy_processes(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(SHAPE, width=64, heads=4, ffn_width=256, context=64)
    config = config_of(None, model, {"threads": 2}, batch_size=16, micro_batch=16, budget=Budget(steps=24))
    cores: list[int] = []  # that the threads may use at each step

    def watched(meter: LoadMeter) -> float:
        cores.append(len(os.sched_getaffinity(0)))
        return 1.0

    try:
        alone = begin("alone", config)
        monkeypatch.setattr(cpu, "INTERVAL", 0.0)
        monkeypatch.setattr(cpu, "HOLD", 1)
        monkeypatch.setattr(LoadMeter, "read", watched)
        beside = begin("beside", config)
    finally:
        torch.set_num_threads(1)
    assert sum(one != other for one, other in itertools.pairwise(cores)) > 5
    assert contents(beside.path) == contents(alone.path)


def test_seeds_and_dropout_change_the_weights(begin: Begin) -> None:
    """Otherwise, the comparisons above could not fail."""
    settings: tuple[dict[str, Any], ...] = ({}, {"seed": 4}, {"model": dataclasses.replace(SHAPE, dropout=0.0)})
    runs = [begin(str(n), budget=Budget(steps=3), **chosen) for n, chosen in enumerate(settings)]
    weights = [contents(run.path)["weights"] for run in runs]
    assert weights[0] != weights[1] != weights[2] != weights[0]


def test_the_validation_loss_is_that_of_the_saved_best_weights_on_at_most_eval_tokens(begin: Begin) -> None:
    averaged = begin("averaged", budget=Budget(steps=180), average=0.1)
    few = begin("few", budget=Budget(steps=1), eval_tokens=20)
    for run, limit in ((averaged, None), (few, 20)):
        model, _, _, weights = load_model(run.path)
        found = evaluate_loss(model, next_token, evaluation_batches(run.tokens.val, 8, 1, max_tokens=limit))
        assert weights.val_loss == pytest.approx(found.loss, rel=1e-5)
        assert (found.tokens < len(run.tokens.val) - 1) == (limit is not None)
    losses = [record["val_loss"] for record in read_metrics(averaged.path) if "val_loss" in record]
    assert min(losses) < 0.9 * losses[0]


def test_metrics_equal_the_reported_events(begin: Begin) -> None:
    session = begin()
    records, logged = read_metrics(session.path), session.reported(Logged)
    assert [r["step"] for r in records if "loss" in r] == [event.step for event in logged] == list(range(7, 61, 7))
    assert [r["loss"] for r in records if "loss" in r] == [event.loss for event in logged]
    assert [r["step"] for r in records if "val_loss" in r] == [0, 12, 24, 36, 48, 60]
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    evaluated = {"step", "val_loss", "seconds"}
    assert records[0].keys() == {*evaluated, "val_tokens"}  # before the first step
    assert all(r.keys() in (keys, evaluated) for r in records[1:])


def test_only_the_adapter_is_trained_and_saved(begin: Begin, adapter: AdapterConfig) -> None:
    before = snapshot(Path(adapter.base))
    run = begin(adapter=adapter, model=dataclasses.replace(SHAPE, layers=2))
    assert snapshot(Path(adapter.base)) == before
    weights = last_save(run.path).read_weights()
    assert len(weights) == 2 * 2 * 3
    assert all(".lora_A." in name or ".lora_B." in name for name in weights)
    assert any(tensor.any() for name, tensor in weights.items() if ".lora_B." in name)


Check = Callable[[torch.Tensor], None]


@pytest.fixture
def before_compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Check], list[Any]]:
    """Replaces torch.compile: a compiled layer calls the given function with its input, and then the layer. The result
    has the compiled layers.
    """

    def replace(check: Check) -> list[Any]:
        layers = []

        def compile(module: torch.nn.Module) -> None:
            layers.append(module)
            module._compiled_call_impl = lambda x, *args: (check(x), module._call_impl(x, *args))[1]

        monkeypatch.setattr(torch.nn.Module, "compile", compile)
        return layers

    return replace


COMPILED = {"compile": True}


def test_out_of_memory_in_the_test_of_compiled_layers_reduces_its_batch(
    begin: Begin, before_compiled: Callable[[Check], list[Any]]
) -> None:
    rows: list[int] = []

    def check(x: torch.Tensor) -> None:
        rows.append(len(x))
        if len(rows) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    before_compiled(check)
    session = begin(runtime=COMPILED, budget=Budget(steps=1), micro_batch=5)
    assert (rows[:3], session.reported(Notice)) == ([5, 3, 2], [])
    assert read_config(session.path).runtime.compile


def test_compiled_layers_are_tested_with_micro_batches_of_every_size(
    begin: Begin, before_compiled: Callable[[Check], list[Any]]
) -> None:
    """Otherwise, torch would compile in the middle of the run, where a failure stops it."""
    shapes: list[torch.Size] = []
    # Evaluations, which have no gradients, do not count.
    before_compiled(lambda x: shapes.append(x.shape[:2]) if torch.is_grad_enabled() else None)
    shape = dataclasses.replace(SHAPE, context=16)  # 5 windows in micro-batches of 2
    begin(model=shape, runtime=COMPILED, budget=Budget(steps=20), sequence_growth=4)
    tested, trained = shapes[:6], shapes[6:]
    assert tested == [(2, 16), (1, 16), (4, 8), (2, 8), (8, 4), (4, 4)]
    assert set(trained) == set(tested)


def test_the_layers_of_encoder_and_decoder_are_compiled(
    begin: Begin, before_compiled: Callable[[Check], list[Any]]
) -> None:
    compiled = before_compiled(lambda x: None)
    shape = dataclasses.replace(SHAPE, architecture="encoder-decoder", encoder_layers=2)
    begin(model=shape, runtime=COMPILED, budget=Budget(steps=1))
    assert sorted(layer.cross_attention is not None for layer in compiled) == [False, False, True]


@pytest.mark.parametrize("fails", [True, False])
def test_compiling_changes_no_weight_and_its_failure_is_a_notice(
    fails: bool, begin: Begin, before_compiled: Callable[[Check], list[Any]]
) -> None:
    """The test of the compiled layers leaves no gradients, and does not advance the random number generators."""
    expected = contents(begin("plain", budget=Budget(steps=20)).path)
    calls: list[bool] = []

    def check(x: torch.Tensor) -> None:
        calls.append(torch.is_grad_enabled())
        if fails:
            torch.rand(3)
            raise RuntimeError("no compiler was found\nand much more")

    before_compiled(check)
    wanted = config_of(budget=Budget(steps=20), runtime=COMPILED)
    session = begin("run", wanted)
    notices = [event.message for event in session.reported(Notice)]
    assert notices == ["torch.compile failed (no compiler was found); continuing without it."] * fails
    assert sum(calls) == (1 if fails else 2 + 20 * 3)  # a test pass of each size, and every micro-batch
    assert contents(session.path) == (expected if fails else {**expected, "config": wanted})


def test_an_adapter_in_bf16_learns_as_in_fp32_with_frozen_matrices_in_bf16(tokens: TokenFolder, tmp_path: Path) -> None:
    """Losses differ by the rounding of 8 significant bits; the adapter, its gradients and its saves are fp32."""
    adapter, losses = dataclasses.replace(adapter_for(tmp_path / "base", tokens), dropout=0.0), {}
    for dtype in ("fp32", "bf16"):
        session = RunSession(tmp_path / dtype, tokens)
        models: list[Transformer] = []
        build = session._model
        session._model = lambda config, build=build, models=models: models.append(build(config)) or models[0]
        session.begin(config_of(adapter, runtime={"dtype": dtype}, lr=0.08))
        for name, parameter in models[0].named_parameters():
            frozen_matrix = not parameter.requires_grad and parameter.dim() > 1 and name != "embedding.weight"
            assert parameter.requires_grad == (".lora_" in name)
            assert parameter.dtype == (DTYPES[dtype] if frozen_matrix else torch.float32), name
        assert {tensor.dtype for tensor in last_save(session.path).read_weights().values()} == {torch.float32}
        losses[dtype] = [event.val_loss for event in session.reported(Evaluated)]
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.003)
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.01
    assert losses["bf16"] != losses["fp32"]


@every_variant
def test_a_frozen_model_in_bf16_computes_to_the_bit_what_fp32_weights_do_under_autocast(config: ModelConfig) -> None:
    """Also a tied output layer, and learned and relative positions."""
    model = randomised(build_model(config)).eval()
    frozen = copy.deepcopy(model).requires_grad_(False)
    set_weights_dtype(frozen, torch.bfloat16)
    assert weights_dtype(frozen) == torch.bfloat16
    ids = torch.randint(config.vocab_size, (2, config.context))
    with autocast("cpu", "bf16"):
        one, other = (network.probe(ids).hidden for network in (model, frozen))
        assert torch.equal(one, other)
        assert torch.equal(model.logits(one), frozen.logits(other))


def test_dropout_of_the_model_is_turned_off_and_that_of_an_adapter_is_not(adapter: AdapterConfig) -> None:
    model = build_model(dataclasses.replace(SHAPE, dropout=0.3, attention_dropout=0.2))
    layers = add_adapter(model, dataclasses.replace(adapter, dropout=0.5))
    disable_dropout(model)
    rates = [module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)]
    assert sorted(set(rates)) == [0.0, 0.5] and rates.count(0.5) == len(layers)


def test_no_frozen_parameter_in_bf16_keeps_the_memory_it_was_loaded_in(adapter: AdapterConfig) -> None:
    """Memory may be a mapped file, which a single norm would keep."""
    model = load_model(Path(adapter.base)).network
    add_adapter(model, adapter)
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    set_weights_dtype(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        shared = parameter.untyped_storage().data_ptr() == before[name].untyped_storage().data_ptr()
        assert shared == parameter.requires_grad, name
        torch.testing.assert_close(parameter.detach().float(), before[name], rtol=2**-8, atol=0)


def test_a_run_with_dropout_on_an_apple_gpu_cannot_resume_with_checkpointed_activations(
    tokens: TokenFolder, tmp_path: Path
) -> None:
    session = RunSession(tmp_path / "run", tokens, until=3)
    session.begin(config_of())
    RunDirectory(session.path).write_config(config_of(runtime={"device": "mps"}))
    before = snapshot(session.path)
    with pytest.raises(UsageError, match="cannot be combined with dropout on Apple GPUs"):
        session.resume(checkpoint_activations=True)
    assert snapshot(session.path) == before


def test_the_best_loss_of_a_save_is_that_of_trained_weights(tokens: TokenFolder, tmp_path: Path) -> None:
    """An older save may have that of step 0, or no step."""
    for best, found in (({"best_step": 2}, (2, 1.5)), ({"best_step": 0}, None), ({}, (0, 1.5))):
        save = LastSave((), (), {"step": 3, "best_loss": 1.5, **best})
        run = TrainingRun(RunDirectory(tmp_path), config_of(), build_model(SHAPE), TOKENIZER, tokens, save)
        assert run.best == found


def test_the_micro_batch_is_that_of_the_save_unless_it_cannot_fit() -> None:
    memory = TrainingMemory(state=1000, gradients=400, per_sequence=100)

    def resumed(notices: list[str], free: int | None) -> int:
        shared: Any = {"parallel": "ddp", "checkpointing": False, "memory": memory, "checkpointed": memory}
        return MemoryPlan(**shared, batch_size=64, free=free).resumed_micro_batch(64, notices)

    assert resumed([], None) == 64
    for share, kept in ((1.0, True), (1.01 - MEMORY_ERROR, True), (0.99 - MEMORY_ERROR, False)):
        notices: list[str] = []
        free = int(share * memory.needed(64, 64))
        found = resumed(notices, free)
        assert ((found == 64), len(notices)) == (kept, 0 if kept else 1)
        assert kept or memory.needed(found, 64) <= MEMORY_SHARE * free < memory.needed(found + 1, 64)


def test_a_save_that_cannot_be_recovered_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr(restart, "recover_last", refuse)
    request = TrainingRequest(settings=TrainSettings(), files=tmp_path / "text.txt", out=tmp_path / "run")
    with pytest.raises(TinyLMError, match=r"Cannot continue .*run after a restart: Read-only file system\."):
        train_or_resume(request, Session(ranks=Ranks(job="a", restarts=1)))


def test_the_weights_of_a_base_as_they_were_read_are_freed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, those of a base that is converted to 16 bits would be in memory twice."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(story(3000))
    settings: dict[str, Any] = {"steps": 2, "batch_size": 2, "device": "cpu"}
    tinylm.train("text.txt", out="base", layers=1, heads=2, width=16, context=16, **settings)
    read: list[weakref.ref[Any]] = []

    def opened(path: Path) -> Any:
        model = open_model(path)
        read.append(weakref.ref(model.weights))
        return model

    monkeypatch.setattr("tinylm.training.start.open_model", opened)
    alive: list[bool] = []

    def listen(event: Event) -> None:
        if isinstance(event, Started):
            alive.append(read[-1]() is not None)

    tinylm.finetune_lora("text.txt", model="base", out="lora", dtype="bf16", callbacks=[listen], **settings)
    tinylm.train("text.txt", init_from="base", out="further", callbacks=[listen], **settings)
    assert alive == [False, False]
