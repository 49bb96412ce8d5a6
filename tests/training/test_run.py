"""Training runs on disk. Reference for a resumed run: the uninterrupted run, bit for bit."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.test_openmp_spin import two_cores
from tests.training.run_sessions import SHAPE, TOKENIZER, Killed, RunSession, adapter_for, config_of, contents
from tinylm.adapters.bottleneck import SUBLAYERS
from tinylm.adapters.load import add_adapter
from tinylm.device import DTYPES
from tinylm.errors import UsageError
from tinylm.evaluation.loop import evaluate_loss
from tinylm.kernels import thread_placement
from tinylm.machine_load import LoadMeter
from tinylm.model.build import build_model
from tinylm.model.stack import Transformer
from tinylm.objectives.loss import next_token
from tinylm.run_config import AdapterConfig
from tinylm.run_directory.directory import LastSave, RunDirectory
from tinylm.run_directory.loading import load_model, read_config, read_weights
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.text.batches import evaluation_batches
from tinylm.text.token_files import TokenFolder
from tinylm.training.events import Evaluated, Logged, Notice, Stepped
from tinylm.training.run import TrainingRun, set_weights_dtype
from tinylm.training.trainer import StopTraining
from tinylm.training_config import Budget


@pytest.fixture(scope="module")
def adapter(tokens: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> AdapterConfig:
    return adapter_for(tmp_path_factory.mktemp("base") / "base", tokens)


@pytest.fixture(scope="module")
def deep_adapter(tokens: TokenFolder, tmp_path_factory: pytest.TempPathFactory) -> AdapterConfig:
    return adapter_for(tmp_path_factory.mktemp("base") / "base", tokens, layers=2)


LONG = {"budget": Budget(steps=200), "eval_every": 20, "save_every": 50, "log_every": 9}


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any]
    until: int
    end: type[BaseException] = StopTraining
    adapter: str | None = None
    kind: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)


GROWING = "growing sequences and multi-token prediction, killed"
CASES = {
    "adamw, stopped at 100 of 200 while evaluating": Case(LONG, 100),
    "adamw, killed at 130 of 200 after saving at 100": Case(LONG, 130, Killed),
    "adam, stopped between all intervals": Case({"optimizer": "adam", "weight_decay": 0.1}, 31),
    "muon": Case({"optimizer": "muon"}, 31, shape={"experts": 2}),
    "normuon, killed": Case({"optimizer": "normuon", "momentum": 0.8}, 40, Killed),
    "epochs": Case({"budget": Budget(epochs=1.5)}, 20),
    "inverse-sqrt, killed in the first steps": Case({"schedule": "inverse-sqrt"}, 5, Killed),
    "experts": Case({}, 31, shape={"experts": 4}),
    "local, relative": Case({}, 31, shape={"local_window": 3, "local_layers": (0,), "position": "relative"}),
    "encoder": Case({}, 31, shape={"architecture": "encoder"}),
    "encoder, killed": Case({}, 40, Killed, shape={"architecture": "encoder"}),
    "pairs": Case({"label_smoothing": 0.1}, 31, shape={"architecture": "encoder-decoder", "encoder_layers": 1}),
    "pairs, R-Drop, killed": Case(
        {"r_drop": 1.0}, 40, Killed, shape={"architecture": "encoder-decoder", "encoder_layers": 1}
    ),
    "patience": Case({"patience": 2, "lr": 0.5, "budget": Budget(steps=300)}, 20),
    "averaged": Case({"average": 0.1}, 31),
    GROWING: Case({"sequence_growth": 4, "mtp_weight": 0.5}, 40, Killed),
    "averaged, killed": Case({"average": 0.1}, 40, Killed),
    "merged experts": Case({}, 31, shape={"experts": 3, "expert_mode": "merge"}),
    "adapter": Case({}, 31, adapter="adapter"),
    "adapter with one B": Case({}, 31, adapter="deep_adapter", kind={"share_b": True}, shape={"layers": 2}),
    "bottlenecks": Case({}, 31, adapter="adapter", kind={"kind": "bottleneck", "targets": SUBLAYERS}),
    "adapter, killed": Case({"optimizer": "adam"}, 40, Killed, adapter="adapter"),
}


# One case of each part of a run's state; the others are slow.
OFTEN = ("muon", "encoder, killed", "pairs", "patience", "averaged, killed", "adapter", "epochs", GROWING)
each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name.replace(" ", "-"), marks=[] if name in OFTEN else pytest.mark.slow)
        for name, case in CASES.items()
    ],
)


@each_case
def test_a_resumed_run_equals_an_uninterrupted_run(
    case: Case, tokens: TokenFolder, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Weights, optimizer, state, best weights and metrics are equal, with dropout and gradient accumulation."""
    adapter = dataclasses.replace(request.getfixturevalue(case.adapter), **case.kind) if case.adapter else None
    config = config_of(adapter, dataclasses.replace(SHAPE, **case.shape), **case.settings)
    straight = RunSession(tmp_path / "straight", tokens)
    outcome = straight.begin(config)

    first = RunSession(tmp_path / "resumed", tokens, case.until, case.end)
    if case.end is Killed:
        with pytest.raises(Killed):
            first.begin(config)
        with (tmp_path / "resumed" / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 31, "val_l')
    else:
        assert first.begin(config).stopped_by == "signal"
    saved = RunDirectory(tmp_path / "resumed").load_last(config).state["step"]
    assert saved <= case.until < outcome.state.step
    assert (saved == case.until) == (case.end is StopTraining)

    second = RunSession(tmp_path / "resumed", tokens)
    again = second.resume()
    assert (again.stopped_by, again.state.step) == (outcome.stopped_by, outcome.state.step)
    assert contents(tmp_path / "resumed") == contents(tmp_path / "straight")
    steps = [event.step for event in second.events if isinstance(event, Stepped)]
    assert steps == list(range(saved + 1, outcome.state.step + 1))


@each_case
def test_a_run_with_checkpointed_activations_equals_one_without(
    case: Case, tokens: TokenFolder, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, if both are evaluated in batches of the same size."""
    monkeypatch.setattr("tinylm.training.trainer.evaluation_rows", lambda micro_batch, checkpointed: micro_batch)
    adapter = dataclasses.replace(request.getfixturevalue(case.adapter), **case.kind) if case.adapter else None
    settings = {**case.settings, "budget": Budget(steps=8), "eval_every": 4, "log_every": 1, "log_gradients": True}
    found = []
    for checkpointed in (False, True):
        config = config_of(
            adapter, dataclasses.replace(SHAPE, **case.shape), **settings, checkpoint_activations=checkpointed
        )
        RunSession(tmp_path / str(checkpointed), tokens).begin(config)
        found.append(
            {name: value for name, value in contents(tmp_path / str(checkpointed)).items() if name != "config"}
        )
    assert found[0] == found[1]


def test_a_stop_interrupts_an_evaluation(tokens: TokenFolder, tmp_path: Path) -> None:
    session = RunSession(tmp_path / "run", tokens, until=24)
    state = session.begin(config_of()).state
    assert (state.step, state.last_eval_step) == (24, 12)


def test_a_run_interrupted_many_times_equals_an_uninterrupted_run(tokens: TokenFolder, tmp_path: Path) -> None:
    RunSession(tmp_path / "straight", tokens).begin(config_of())
    RunSession(tmp_path / "resumed", tokens, 3).begin(config_of())
    for until in (4, 12, 29, 30):
        assert RunSession(tmp_path / "resumed", tokens, until).resume().state.step == until
    RunSession(tmp_path / "resumed", tokens).resume()
    assert contents(tmp_path / "resumed") == contents(tmp_path / "straight")


@two_cores
def test_weights_do_not_depend_on_where_threads_run_beside_busy_processes(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(SHAPE, width=64, heads=4, ffn_width=256, context=64)
    config = config_of(None, model, batch_size=16, micro_batch=16, budget=Budget(steps=24))
    config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, threads=2))
    moves: list[set[int]] = []
    move_threads = thread_placement._move_threads

    def moved(old: set[int], new: set[int]) -> None:
        moves.append(new)
        move_threads(old, new)

    try:
        RunSession(tmp_path / "alone", tokens).begin(config)
        monkeypatch.setattr(thread_placement, "_move_threads", moved)
        monkeypatch.setattr(thread_placement, "INTERVAL", 0.0)
        monkeypatch.setattr(thread_placement, "HOLD", 1)
        monkeypatch.setattr(LoadMeter, "read", lambda meter: 1.0)
        RunSession(tmp_path / "beside", tokens).begin(config)
    finally:
        torch.set_num_threads(1)
    assert len(moves) > 5
    assert contents(tmp_path / "beside") == contents(tmp_path / "alone")


def test_seeds_and_dropout_change_the_weights(tokens: TokenFolder, tmp_path: Path) -> None:
    """Otherwise, the comparisons above could not fail."""
    runs = {
        "one": config_of(budget=Budget(steps=3)),
        "two": config_of(budget=Budget(steps=3), seed=4),
        "three": dataclasses.replace(config_of(budget=Budget(steps=3)), model=dataclasses.replace(SHAPE, dropout=0.0)),
    }
    for name, config in runs.items():
        RunSession(tmp_path / name, tokens).begin(config)
    weights = [contents(tmp_path / name)["weights"] for name in runs]
    assert weights[0] != weights[1] != weights[2] != weights[0]


def test_a_finished_run_continues_with_a_larger_budget_that_is_recorded(tokens: TokenFolder, tmp_path: Path) -> None:
    RunSession(tmp_path / "run", tokens).begin(config_of(budget=Budget(steps=10)))
    outcome = RunSession(tmp_path / "run", tokens).resume(budget=Budget(steps=25), eval_every=5)
    assert (outcome.stopped_by, outcome.state.step) == ("steps", 25)
    training = read_config(tmp_path / "run").training
    assert training is not None
    assert (training.budget, training.eval_every) == (Budget(steps=25), 5)


@pytest.mark.parametrize("average", [0.0, 0.1])
def test_the_validation_loss_is_that_of_the_saved_best_weights(
    tokens: TokenFolder, tmp_path: Path, average: float
) -> None:
    RunSession(tmp_path / "run", tokens).begin(config_of(budget=Budget(steps=180), average=average))
    model, _, _, weights = load_model(tmp_path / "run")
    loss = evaluate_loss(model, next_token, evaluation_batches(tokens.val, 8, 1)).loss
    assert weights.val_loss == pytest.approx(loss, rel=1e-5)
    losses = [r["val_loss"] for r in read_metrics(tmp_path / "run") if "val_loss" in r]
    assert weights.val_loss == min(losses) < 0.9 * losses[0]


def test_validation_is_limited_to_eval_tokens(tokens: TokenFolder, tmp_path: Path) -> None:
    RunSession(tmp_path / "run", tokens).begin(config_of(budget=Budget(steps=1), eval_tokens=20))
    model = load_model(tmp_path / "run")[0]
    few = evaluate_loss(model, next_token, evaluation_batches(tokens.val, 8, 1, max_tokens=20))
    assert few.tokens < len(tokens.val) - 1
    assert read_weights(tmp_path / "run", read_config(tmp_path / "run")).val_loss == pytest.approx(few.loss, rel=1e-5)


def test_metrics_equal_the_reported_events(tokens: TokenFolder, tmp_path: Path) -> None:
    session = RunSession(tmp_path / "run", tokens)
    session.begin(config_of())
    records = read_metrics(tmp_path / "run")
    logged = [event for event in session.events if isinstance(event, Logged)]
    assert [r["step"] for r in records if "loss" in r] == [event.step for event in logged] == list(range(7, 61, 7))
    assert [r["loss"] for r in records if "loss" in r] == [event.loss for event in logged]
    assert [r["step"] for r in records if "val_loss" in r] == [0, 12, 24, 36, 48, 60]
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    assert all(r.keys() in (keys, {"step", "val_loss", "seconds"}) for r in records)


def test_gradient_norms_of_layers_are_logged_with_log_gradients(tokens: TokenFolder, tmp_path: Path) -> None:
    """The sum of their squares is the square of the total norm before clipping."""
    RunSession(tmp_path / "run", tokens).begin(config_of(log_gradients=True, grad_clip=0.0, budget=Budget(steps=14)))
    records = [record for record in read_metrics(tmp_path / "run") if "loss" in record]
    assert len(records) == 2
    for record in records:
        assert set(record["gradient_norms"]) == {"embedding", "layers.0", "norm"}
        total = sum(norm**2 for norm in record["gradient_norms"].values()) ** 0.5
        assert total == pytest.approx(record["grad_norm"], rel=1e-5)


def test_only_the_adapter_is_trained_and_saved(tokens: TokenFolder, tmp_path: Path, adapter: AdapterConfig) -> None:
    def base() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in Path(adapter.base).iterdir() if file.is_file()}

    before = base()
    RunSession(tmp_path / "run", tokens).begin(config_of(adapter))
    save = RunDirectory(tmp_path / "run").load_last(read_config(tmp_path / "run"))
    assert base() == before
    weights = save.read_weights()
    assert len(weights) == 2 * 3
    assert all(".lora_A." in name or ".lora_B." in name for name in weights)
    assert any(tensor.any() for name, tensor in weights.items() if ".lora_B." in name)


def test_out_of_memory_in_validation_evaluates_the_same_text_in_smaller_batches(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunSession(tmp_path / "plain", tokens).begin(config_of())
    forward, rows = Transformer.run_layers, []

    def small_memory(model: Transformer, x: torch.Tensor, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            rows.append(len(x))
            if len(x) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, x, *inputs, **named)

    monkeypatch.setattr(Transformer, "run_layers", small_memory)
    RunSession(tmp_path / "small", tokens).begin(config_of())
    assert max(rows) > 3
    plain, small = (
        [record["val_loss"] for record in read_metrics(tmp_path / name) if "val_loss" in record]
        for name in ("plain", "small")
    )
    assert small == pytest.approx(plain, rel=1e-6)


def test_out_of_memory_in_the_test_of_compiled_layers_reduces_its_batch(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []

    def compile(module: torch.nn.Module) -> None:
        def call(x: torch.Tensor, *args: Any) -> Any:
            rows.append(len(x))
            if len(rows) < 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return module._call_impl(x, *args)

        module._compiled_call_impl = call

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    config = config_of(budget=Budget(steps=1), micro_batch=5)
    assert config.runtime is not None
    wanted = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, compile=True))
    session = RunSession(tmp_path / "run", tokens)
    session.begin(wanted)
    assert rows[:3] == [5, 3, 2]
    assert not [event for event in session.events if isinstance(event, Notice)]
    runtime = read_config(tmp_path / "run").runtime
    assert runtime is not None
    assert runtime.compile


def test_compiled_layers_are_tested_with_micro_batches_of_every_size(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, torch would compile in the middle of the run, where a failure stops it."""
    shapes: list[torch.Size] = []

    def compile(module: torch.nn.Module) -> None:
        def call(x: torch.Tensor, *args: Any) -> Any:
            if torch.is_grad_enabled():  # not in evaluations
                shapes.append(x.shape[:2])
            return module._call_impl(x, *args)

        module._compiled_call_impl = call

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    shape = dataclasses.replace(SHAPE, context=16)
    config = config_of(model=shape, budget=Budget(steps=20), sequence_growth=4)  # 5 windows in micro-batches of 2
    assert config.runtime is not None
    wanted = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, compile=True))
    RunSession(tmp_path / "run", tokens).begin(wanted)
    tested, trained = shapes[:6], shapes[6:]
    assert tested == [(2, 16), (1, 16), (4, 8), (2, 8), (8, 4), (4, 4)]
    assert set(trained) == set(tested)


def test_the_layers_of_encoder_and_decoder_are_compiled(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: compiled.append(layer))
    shape = dataclasses.replace(SHAPE, architecture="encoder-decoder", encoder_layers=2)
    config = config_of(model=shape, budget=Budget(steps=1))
    assert config.runtime is not None
    wanted = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, compile=True))
    RunSession(tmp_path / "run", tokens).begin(wanted)
    assert [layer.cross_attention is not None for layer in compiled].count(True) == 1
    assert len(compiled) == 2 + 1


@pytest.mark.parametrize("fails", [True, False])
def test_compiling_changes_no_weight_and_its_failure_is_a_notice(
    fails: bool, tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of the compiled layers leaves no gradients, and does not advance the random number generators."""
    config = config_of(budget=Budget(steps=20))
    RunSession(tmp_path / "plain", tokens).begin(config)
    calls = []

    def compile(module: torch.nn.Module) -> None:
        def call(*args: Any) -> Any:
            calls.append(torch.is_grad_enabled())
            if fails:
                torch.rand(3)
                raise RuntimeError("no compiler was found\nand much more")
            return module._call_impl(*args)

        module._compiled_call_impl = call

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    assert config.runtime is not None
    wanted = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, compile=True))
    session = RunSession(tmp_path / "run", tokens)
    session.begin(wanted)
    notices = [event.message for event in session.events if isinstance(event, Notice)]
    found, expected = contents(tmp_path / "run"), contents(tmp_path / "plain")
    if fails:
        assert notices == ["torch.compile failed (no compiler was found); continuing without it."]
        assert len(calls) == 1
        assert found == expected
    else:
        assert notices == []
        assert sum(calls) == 2 + 20 * 3  # a test pass of each size, and every micro-batch
        assert found == {**expected, "config": wanted}


def test_an_adapter_in_bf16_learns_as_in_fp32_with_frozen_matrices_in_bf16(
    tokens: TokenFolder, tmp_path: Path, adapter: AdapterConfig
) -> None:
    """Losses differ by the rounding of 8 significant bits; the adapter, its gradients and its saves are fp32."""
    config = config_of(dataclasses.replace(adapter, dropout=0.0), lr=0.08)
    assert config.runtime is not None
    losses = {}
    for dtype in ("fp32", "bf16"):
        session = RunSession(tmp_path / dtype, tokens)
        models: list[Transformer] = []
        build = session._model
        session._model = lambda config, build=build, models=models: models.append(build(config)) or models[0]
        session.begin(dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, dtype=dtype)))
        for name, parameter in models[0].named_parameters():
            frozen_matrix = not parameter.requires_grad and parameter.dim() > 1
            assert parameter.requires_grad == (".lora_" in name)
            expected = DTYPES[dtype] if frozen_matrix else torch.float32
            assert parameter.dtype == expected, name
        saved = RunDirectory(tmp_path / dtype).load_last(read_config(tmp_path / dtype)).read_weights()
        assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
        losses[dtype] = [event.val_loss for event in session.events if isinstance(event, Evaluated)]
    assert losses["bf16"] == pytest.approx(losses["fp32"], abs=0.003)
    assert losses["fp32"][-1] < losses["fp32"][0] - 0.01
    assert losses["bf16"] != losses["fp32"]


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
    config = config_of()
    session.begin(config)
    files = {path: path.read_bytes() for path in session.path.rglob("*") if path.is_file()}
    assert config.runtime is not None
    config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, device="mps"))
    RunDirectory(session.path).write_config(config)
    files[session.path / "config.json"] = (session.path / "config.json").read_bytes()
    with pytest.raises(UsageError, match="cannot be combined with dropout on Apple GPUs"):
        session.resume(checkpoint_activations=True)
    assert files == {path: path.read_bytes() for path in session.path.rglob("*") if path.is_file()}


def test_a_save_without_the_step_of_its_best_loss_counts_from_step_0(tokens: TokenFolder, tmp_path: Path) -> None:
    save = LastSave((), (), {"step": 3, "best_loss": 1.5})
    run = TrainingRun(RunDirectory(tmp_path), config_of(), build_model(SHAPE), TOKENIZER, tokens, save)
    assert run.best == (0, 1.5)
