"""Runs on real folders. Judge of a resumed run: the run that never stopped, bit for bit."""

import dataclasses
import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.variants import small
from tinylm.adapters.adapter import adapter_layers, load_adapter_tensors
from tinylm.adapters.bottleneck import SUBLAYERS
from tinylm.adapters.load import add_adapter, load_base
from tinylm.checkpoint import RunFolder, load_model, read_config, read_weights, restore_model
from tinylm.config import AdapterConfig, Budget, RunConfig, RuntimeConfig, TokenizerConfig, TrainingConfig
from tinylm.errors import UsageError
from tinylm.evaluation import evaluate
from tinylm.model.build import build_model
from tinylm.model.stack import Transformer
from tinylm.objective import next_token
from tinylm.tasks import make_task
from tinylm.text.dataset import TokenFolder, encode_corpus, evaluation_batches
from tinylm.text.tokenizer import train_char
from tinylm.training.session import layer_gradient_norms, train_session
from tinylm.training.trainer import Event, Logged, Notice, Outcome, Stepped, StopTraining

TOKENIZER = train_char("abcdef .").with_mask()
SHAPE = small(
    vocab_size=TOKENIZER.vocab_size,
    context=8,
    layers=1,
    width=8,
    heads=2,
    kv_heads=1,
    ffn_width=8,
    dropout=0.2,
    attention_dropout=0.2,
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """Short documents, which may be taken for pairs, too."""
    rng = random.Random(0)
    words = ["a", "be", "dad", "face", "cab", "fed."]

    def documents(n: int) -> list[str | None]:
        texts = [" ".join(rng.choices(words, k=rng.randint(1, 2))) for _ in range(n)]
        return [piece for text in texts for piece in (text, None)][:-1]

    train, val = documents(300), documents(40)
    folder = tmp_path_factory.mktemp("session") / "tokens"
    return encode_corpus(folder, "key", lambda: iter(train), lambda: iter(val), TOKENIZER, lambda size: None)


def config_of(adapter: AdapterConfig | None = None, **choices: Any) -> RunConfig:
    settings: dict[str, Any] = {
        "budget": Budget(steps=60),
        "batch_size": 5,
        "micro_batch": 2,
        "lr": 0.02,
        "min_lr": 0.001,
        "warmup": 0.1,
        "eval_every": 12,
        "save_every": 15,
        "log_every": 7,
        "seed": 3,
    }
    return RunConfig(
        version="0",
        created="now",
        model=SHAPE,
        tokenizer=TokenizerConfig(kind=TOKENIZER.kind, sha256=TOKENIZER.sha256),
        training=TrainingConfig(**{**settings, **choices}),
        runtime=RuntimeConfig(device="cpu", dtype="fp32", compile=False, threads=1),
        adapter=adapter,
    )


class Killed(BaseException):
    """What leaves a run no time to save."""


@dataclass
class Sitting:
    """Trains a run until it is done, or until `end` is raised at the first check from step `until` on."""

    path: Path
    tokens: TokenFolder
    until: int | None = None
    end: type[BaseException] = StopTraining
    events: list[Event] = field(default_factory=list)
    step: int = 0

    def report(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Stepped):
            self.step = event.step

    def check(self) -> None:
        if self.until is not None and self.step >= self.until:
            raise self.end

    def begin(self, config: RunConfig) -> Outcome:
        run = RunFolder.create(self.path, config, TOKENIZER)
        return self._train(run, config, self._model(config), resume_from=None)

    def resume(self, **changes: Any) -> Outcome:
        """As `tinylm train --resume` does it, in a model that has never been trained."""
        torch.manual_seed(99)
        config = read_config(self.path)
        assert config.training is not None
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, **changes))
        save = RunFolder(self.path).load_last(config)
        if config.adapter is None:
            model = restore_model(config, save.weights, self.path)
        else:
            model = self._model(config)
            load_adapter_tensors(adapter_layers(model), save.weights, self.path)
        self.step = save.state["step"]
        return self._train(RunFolder(self.path), config, model, resume_from=save)

    def _model(self, config: RunConfig) -> Transformer:
        assert config.training is not None
        if config.adapter is None:
            return build_model(config.model, config.training.seed)
        base, _, _ = load_base(self.path, config.adapter, Path(config.adapter.base), "cpu")
        add_adapter(base, config.adapter, config.training.seed)
        return base

    def _train(self, run: RunFolder, config: RunConfig, model: Transformer, **choices: Any) -> Outcome:
        assert config.training is not None
        return train_session(
            run,
            config,
            model,
            make_task(self.tokens, TOKENIZER, config.model, config.training),
            report=self.report,
            check_stop=self.check,
            started=time.monotonic(),
            **choices,
        )


def everything(path: Path) -> dict[str, Any]:
    """All that a run leaves, without the times."""
    config = read_config(path)
    save, best = RunFolder(path).load_last(config), read_weights(path, config)
    timed = ("seconds", "setup_seconds", "stepping_seconds", "evaluation_seconds", "save_seconds", "tokens_per_second")
    metrics = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return {
        "weights": {name: tensor.numpy().tobytes() for name, tensor in save.weights.items()},
        "optimizer": {name: tensor.numpy().tobytes() for name, tensor in save.optimizer.items()},
        "state": {name: value for name, value in save.state.items() if name not in timed},
        "best": ({name: tensor.numpy().tobytes() for name, tensor in best.tensors.items()}, best.step, best.val_loss),
        "metrics": [{name: value for name, value in record.items() if name not in timed} for record in metrics],
        "config": config,
    }


def adapter_for(path: Path, tokens: TokenFolder, **shape: Any) -> AdapterConfig:
    """A LoRA for a base that is trained for it."""
    config = config_of(budget=Budget(steps=2))
    Sitting(path, tokens).begin(dataclasses.replace(config, model=dataclasses.replace(SHAPE, **shape)))
    digest = load_model(path)[3].digest
    return AdapterConfig(
        base=str(path), base_digest=digest, rank=2, alpha=4.0, dropout=0.2, targets=("q_proj", "v_proj", "down_proj")
    )


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


CASES = {
    "adamw, stopped at 100 of 200 while evaluating": Case(LONG, 100),
    "adamw, killed at 130 of 200 after saving at 100": Case(LONG, 130, Killed),
    "adam, stopped between all rhythms": Case({"optimizer": "adam", "weight_decay": 0.1}, 31),
    "muon": Case({"optimizer": "muon"}, 31, shape={"experts": 2}),
    "muon, killed": Case({"optimizer": "muon"}, 40, Killed),
    "epochs": Case({"budget": Budget(epochs=1.5)}, 20),
    "inverse-sqrt, killed in the first steps": Case({"schedule": "inverse-sqrt"}, 5, Killed),
    "experts": Case({}, 31, shape={"experts": 4}),
    "local, relative": Case({}, 31, shape={"local_window": 3, "local_layers": (0,), "position": "relative"}),
    "encoder": Case({}, 31, shape={"architecture": "encoder"}),
    "encoder, killed": Case({}, 40, Killed, shape={"architecture": "encoder"}),
    "pairs": Case({"label_smoothing": 0.1}, 31, shape={"architecture": "encoder-decoder", "encoder_layers": 1}),
    "pairs, killed": Case({}, 40, Killed, shape={"architecture": "encoder-decoder", "encoder_layers": 1}),
    "patience": Case({"patience": 2, "lr": 0.5, "budget": Budget(steps=300)}, 20),
    "averaged": Case({"average": 0.1}, 31),
    "averaged, killed": Case({"average": 0.1}, 40, Killed),
    "merged experts": Case({}, 31, shape={"experts": 3, "expert_mode": "merge"}),
    "adapter": Case({}, 31, adapter="adapter"),
    "adapter with one B": Case({}, 31, adapter="deep_adapter", kind={"share_b": True}, shape={"layers": 2}),
    "bottlenecks": Case({}, 31, adapter="adapter", kind={"kind": "bottleneck", "targets": SUBLAYERS}),
    "adapter, killed": Case({"optimizer": "adam"}, 40, Killed, adapter="adapter"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=[name.replace(" ", "-") for name in CASES])
def test_a_resumed_run_is_the_run_that_never_stopped(
    case: Case, tokens: TokenFolder, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Weights, optimizer, state, best weights and metrics, with dropout and accumulation."""
    adapter = dataclasses.replace(request.getfixturevalue(case.adapter), **case.kind) if case.adapter else None
    config = config_of(adapter, **case.settings)
    config = dataclasses.replace(config, model=dataclasses.replace(SHAPE, **case.shape))
    straight = Sitting(tmp_path / "straight", tokens)
    outcome = straight.begin(config)

    first = Sitting(tmp_path / "resumed", tokens, case.until, case.end)
    if case.end is Killed:
        with pytest.raises(Killed):
            first.begin(config)
        with (tmp_path / "resumed" / "metrics.jsonl").open("a") as metrics:
            metrics.write('{"step": 31, "val_l')
    else:
        assert first.begin(config).stopped_by == "signal"
    saved = RunFolder(tmp_path / "resumed").load_last(config).state["step"]
    assert saved <= case.until < outcome.state.step
    assert (saved == case.until) == (case.end is StopTraining)

    second = Sitting(tmp_path / "resumed", tokens)
    again = second.resume()
    assert (again.stopped_by, again.state.step) == (outcome.stopped_by, outcome.state.step)
    assert everything(tmp_path / "resumed") == everything(tmp_path / "straight")
    steps = [event.step for event in second.events if isinstance(event, Stepped)]
    assert steps == list(range(saved + 1, outcome.state.step + 1))


def test_a_stop_does_not_wait_for_an_evaluation_to_end(tokens: TokenFolder, tmp_path: Path) -> None:
    sitting = Sitting(tmp_path / "run", tokens, until=24)
    state = sitting.begin(config_of()).state
    assert (state.step, state.evaluated) == (24, 12)


def test_a_run_can_be_stopped_many_times(tokens: TokenFolder, tmp_path: Path) -> None:
    Sitting(tmp_path / "straight", tokens).begin(config_of())
    Sitting(tmp_path / "resumed", tokens, 3).begin(config_of())
    for until in (4, 12, 29, 30):
        assert Sitting(tmp_path / "resumed", tokens, until).resume().state.step == until
    Sitting(tmp_path / "resumed", tokens).resume()
    assert everything(tmp_path / "resumed") == everything(tmp_path / "straight")


def test_seeds_and_dropout_do_make_a_difference(tokens: TokenFolder, tmp_path: Path) -> None:
    """So that the tests above could fail."""
    runs = {
        "one": config_of(budget=Budget(steps=3)),
        "two": config_of(budget=Budget(steps=3), seed=4),
        "three": dataclasses.replace(config_of(budget=Budget(steps=3)), model=dataclasses.replace(SHAPE, dropout=0.0)),
    }
    for name, config in runs.items():
        Sitting(tmp_path / name, tokens).begin(config)
    weights = [everything(tmp_path / name)["weights"] for name in runs]
    assert weights[0] != weights[1] != weights[2] != weights[0]


def test_a_finished_run_goes_on_with_a_larger_budget_and_says_so_in_its_config(
    tokens: TokenFolder, tmp_path: Path
) -> None:
    Sitting(tmp_path / "run", tokens).begin(config_of(budget=Budget(steps=10)))
    outcome = Sitting(tmp_path / "run", tokens).resume(budget=Budget(steps=25), eval_every=5)
    assert (outcome.stopped_by, outcome.state.step) == ("steps", 25)
    training = read_config(tmp_path / "run").training
    assert training is not None
    assert (training.budget, training.eval_every) == (Budget(steps=25), 5)


def test_a_run_that_has_used_its_time_says_what_to_give(tokens: TokenFolder, tmp_path: Path) -> None:
    Sitting(tmp_path / "run", tokens).begin(config_of(budget=Budget(time=0.4)))
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(UsageError, match=r"has used its 0\.001 s; give a larger --time"):
        Sitting(tmp_path / "run", tokens).resume(budget=Budget(time=0.001))
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("average", [0.0, 0.1])
def test_the_validation_loss_is_that_of_the_saved_best_weights(
    tokens: TokenFolder, tmp_path: Path, average: float
) -> None:
    Sitting(tmp_path / "run", tokens).begin(config_of(budget=Budget(steps=180), average=average))
    model, _, _, weights = load_model(tmp_path / "run")
    loss = evaluate(model, next_token, evaluation_batches(tokens.val, 8, 1)).loss
    assert weights.val_loss == pytest.approx(loss, rel=1e-5)
    losses = [r["val_loss"] for r in RunFolder(tmp_path / "run").read_metrics() if "val_loss" in r]
    assert weights.val_loss == min(losses) < 0.9 * losses[0]


def test_validation_sees_no_more_tokens_than_it_should(tokens: TokenFolder, tmp_path: Path) -> None:
    Sitting(tmp_path / "run", tokens).begin(config_of(budget=Budget(steps=1), eval_tokens=20))
    model = load_model(tmp_path / "run")[0]
    few = evaluate(model, next_token, evaluation_batches(tokens.val, 8, 1, most=20))
    assert few.tokens < len(tokens.val) - 1
    assert read_weights(tmp_path / "run", read_config(tmp_path / "run")).val_loss == pytest.approx(few.loss, rel=1e-5)


def test_metrics_are_what_was_reported(tokens: TokenFolder, tmp_path: Path) -> None:
    sitting = Sitting(tmp_path / "run", tokens)
    sitting.begin(config_of())
    records = RunFolder(tmp_path / "run").read_metrics()
    logged = [event for event in sitting.events if isinstance(event, Logged)]
    assert [r["step"] for r in records if "loss" in r] == [event.step for event in logged] == list(range(7, 61, 7))
    assert [r["loss"] for r in records if "loss" in r] == [event.loss for event in logged]
    assert [r["step"] for r in records if "val_loss" in r] == [0, 12, 24, 36, 48, 60]
    keys = {"step", "loss", "lr", "grad_norm", "tokens_per_second", "seconds"}
    assert all(r.keys() in (keys, {"step", "val_loss", "seconds"}) for r in records)


def test_the_gradient_of_each_layer_is_logged_when_asked_for(tokens: TokenFolder, tmp_path: Path) -> None:
    """Their squares add up to that of the whole gradient before it is clipped."""
    Sitting(tmp_path / "run", tokens).begin(config_of(log_gradients=True, grad_clip=0.0, budget=Budget(steps=14)))
    records = [record for record in RunFolder(tmp_path / "run").read_metrics() if "loss" in record]
    assert len(records) == 2
    for record in records:
        assert set(record["gradient_norms"]) == {"embedding", "layers.0", "norm"}
        total = sum(norm**2 for norm in record["gradient_norms"].values()) ** 0.5
        assert total == pytest.approx(record["grad_norm"], rel=1e-5)


def test_only_the_adapter_is_trained_and_saved(tokens: TokenFolder, tmp_path: Path, adapter: AdapterConfig) -> None:
    def base() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in Path(adapter.base).iterdir() if file.is_file()}

    before = base()
    Sitting(tmp_path / "run", tokens).begin(config_of(adapter))
    save = RunFolder(tmp_path / "run").load_last(read_config(tmp_path / "run"))
    assert base() == before
    assert len(save.weights) == 2 * 3
    assert all(".lora_A." in name or ".lora_B." in name for name in save.weights)
    assert any(tensor.any() for name, tensor in save.weights.items() if ".lora_B." in name)


def test_the_gradient_norms_of_layers_are_null_where_they_are_no_numbers() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(3))})
    for layer, gradient in zip(model["layers"].children(), (3.0, float("inf"), float("nan")), strict=True):
        layer.weight.grad = torch.full((1, 1), gradient)
        layer.bias.grad = torch.full((1,), 4.0)
    assert layer_gradient_norms(model) == {"layers.0": 5.0, "layers.1": None, "layers.2": None}


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_the_gradient_norms_of_layers_are_those_of_float64_however_large_or_small(scale: float) -> None:
    """Squares of entries of 1e30 overflow fp32, and those of 1e-30 vanish in it."""
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(30, 40) for _ in range(2))})
    rng = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=rng)
    for name, norm in layer_gradient_norms(model).items():
        gradients = [parameter.grad for parameter in model.get_submodule(name).parameters()]
        exact = torch.cat([gradient.double().flatten() for gradient in gradients if gradient is not None]).norm()
        assert norm == pytest.approx(exact.item(), rel=1e-6)


def test_gradient_norms_are_computed_without_float64_which_some_devices_do_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2).bfloat16()])})
    model["layers"][0].weight.grad = torch.full((2, 2), 3.0).bfloat16()
    found: set[torch.dtype] = set()

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            found.update({result.dtype} if isinstance(result, torch.Tensor) else ())
            return result

    with Watch():
        assert layer_gradient_norms(model) == {"layers.0": 6.0}
    assert torch.float64 not in found
    assert torch.float32 in found


def test_gradients_of_zero_have_a_norm_of_zero_and_without_any_there_is_none() -> None:
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    assert layer_gradient_norms(model) == {}
    model["layers"][0].weight.grad = torch.zeros(2, 2)
    assert layer_gradient_norms(model) == {"layers.0": 0.0}


def test_out_of_memory_in_validation_scores_the_same_text_in_smaller_parts(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Sitting(tmp_path / "plain", tokens).begin(config_of())
    forward, rows = Transformer.through_layers, []

    def small_memory(model: Transformer, x: torch.Tensor, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            rows.append(len(x))
            if len(x) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(model, x, *inputs, **named)

    monkeypatch.setattr(Transformer, "through_layers", small_memory)
    Sitting(tmp_path / "small", tokens).begin(config_of())
    assert max(rows) > 3
    plain, small = (
        [record["val_loss"] for record in RunFolder(tmp_path / name).read_metrics() if "val_loss" in record]
        for name in ("plain", "small")
    )
    assert small == pytest.approx(plain, rel=1e-6)


def test_out_of_memory_in_the_trial_of_a_compiled_layer_is_tried_with_fewer_rows(
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
    sitting = Sitting(tmp_path / "run", tokens)
    sitting.begin(wanted)
    assert rows[:3] == [5, 3, 2]
    assert not [event for event in sitting.events if isinstance(event, Notice)]
    runtime = read_config(tmp_path / "run").runtime
    assert runtime is not None
    assert runtime.compile


def test_the_layers_of_both_sides_of_an_encoder_decoder_are_compiled(
    tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer: compiled.append(layer))
    config = config_of(budget=Budget(steps=1))
    assert config.runtime is not None
    shape = dataclasses.replace(SHAPE, architecture="encoder-decoder", encoder_layers=2)
    wanted = dataclasses.replace(config, model=shape, runtime=dataclasses.replace(config.runtime, compile=True))
    Sitting(tmp_path / "run", tokens).begin(wanted)
    assert [layer.cross_attention is not None for layer in compiled].count(True) == 1
    assert len(compiled) == 2 + 1


@pytest.mark.parametrize("fails", [True, False])
def test_compiling_changes_no_weight_and_where_it_fails_costs_a_notice(
    fails: bool, tokens: TokenFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial run leaves neither gradients nor other random numbers behind."""
    config = config_of(budget=Budget(steps=20))
    Sitting(tmp_path / "plain", tokens).begin(config)
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
    sitting = Sitting(tmp_path / "run", tokens)
    sitting.begin(wanted)
    notices = [event.message for event in sitting.events if isinstance(event, Notice)]
    found, expected = everything(tmp_path / "run"), everything(tmp_path / "plain")
    if fails:
        assert notices == ["torch.compile failed (no compiler was found); going on without it."]
        assert len(calls) == 1
        assert found == expected
    else:
        assert notices == []
        assert sum(calls) == 1 + 20 * 3  # the trial, and every micro-batch
        assert found == {**expected, "config": wanted}
