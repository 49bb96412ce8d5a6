"""Models side by side: reference for the logits of the joined model is the mean of those of its members."""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.run_sessions import SHAPE, TOKENIZER, Killed, RunSession, config_of, contents
from tests.training.trainer_bench import Bench, FakeTime
from tests.variants import randomised, small
from tinylm.config.model import ModelConfig
from tinylm.config.training import Budget
from tinylm.errors import TinyLMError, UsageError
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, summarise
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.text.token_files import TokenFolder
from tinylm.training.events import Evaluated, Event, Joining, Notice
from tinylm.training.generations import Generations
from tinylm.training.join import fit_norms, join_models, join_weights
from tinylm.training.trainer import StopTraining
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model, count_parameters


def member(config: ModelConfig, seed: int) -> Decoder:
    model = randomised(build_model(config, seed), seed).double().eval()
    assert isinstance(model, Decoder)
    return model


def joined_of(config: ModelConfig, members: list[Decoder], number: int) -> Decoder:
    model = build_model(config.side_by_side(number)).double().eval()
    model.load_state_dict(join_weights([dict(model.state_dict()) for model in members], number))
    assert isinstance(model, Decoder)
    return model


def logits(model: Decoder, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.logits(model(ids).hidden)


KINDS: dict[str, Any] = {
    "kv_heads": st.sampled_from([1, 2, 4]),
    "ffn_width": st.sampled_from([8, 12]),
    "layers": st.integers(1, 3),
    "tie": st.booleans(),
    "bias": st.booleans(),
    "qk_norm": st.booleans(),
    "activation": st.sampled_from(["swiglu", "gelu"]),
    "parallel_residual": st.booleans(),
}
CONFIGS = st.fixed_dictionaries(KINDS).map(lambda kinds: small(width=16, heads=4, context=12, **kinds))


class NormOfMembers(nn.Module):
    """The norm of each member of a joined vector by itself, with its own gain: what the joined norm stands for."""

    def __init__(self, norms: list[nn.Module], factor: float) -> None:
        super().__init__()
        self.norms, self.factor = norms, factor

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(len(self.norms), dim=-1)
        return self.factor * torch.cat([norm(chunk) for norm, chunk in zip(self.norms, chunks, strict=True)], dim=-1)


class HeadNormOfMembers(nn.Module):
    """The same for the heads (B, H, T, W) of queries or keys."""

    def __init__(self, norms: list[nn.Module]) -> None:
        super().__init__()
        self.norms = norms

    def forward(self, x: Tensor) -> Tensor:
        dimension = next(d for d in range(1, x.dim() - 1) if x.shape[d] != IDS.shape[1])
        chunks = x.chunk(len(self.norms), dim=dimension)
        return torch.cat([norm(chunk) for norm, chunk in zip(self.norms, chunks, strict=True)], dim=dimension)


IDS = torch.arange(11)[None] % 7


@given(CONFIGS, st.integers(2, 3))
@settings(max_examples=30, deadline=None)
def test_but_for_its_norms_a_joined_model_has_the_mean_of_the_logits_of_its_members(
    config: ModelConfig, number: int
) -> None:
    members = [member(config, seed) for seed in range(number)]
    model = joined_of(config, members, number)
    for name, _ in list(model.named_modules()):
        if name.endswith("norm"):
            norms = [one.get_submodule(name) for one in members]
            parent, _, last = name.rpartition(".")
            if last in ("q_norm", "k_norm"):
                replaced: nn.Module = HeadNormOfMembers(norms) if config.qk_norm else nn.Identity()
            else:
                replaced = NormOfMembers(norms, 1 / number if name == "norm" else 1.0)
            setattr(model.get_submodule(parent), last, replaced)
    expected = sum(logits(one, IDS) for one in members) / number
    torch.testing.assert_close(logits(model, IDS), expected, rtol=1e-9, atol=1e-9)


@given(CONFIGS, st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_a_model_beside_itself_or_beside_nothing_predicts_the_same(config: ModelConfig, number: int) -> None:
    """All members have the same norm, or the other ones are zero."""
    model = member(config, 0)
    expected = logits(model, IDS)
    beside_itself = joined_of(config, [model] * number, number)
    torch.testing.assert_close(logits(beside_itself, IDS), expected, rtol=1e-5, atol=1e-5)
    beside_nothing = joined_of(config, [model], number)
    torch.testing.assert_close(logits(beside_nothing, IDS), expected, rtol=1e-4, atol=1e-4)


def test_norms_are_fitted_to_the_mean_distribution_of_the_members() -> None:
    config = small(width=16, heads=4, context=32, layers=2)
    members = [member(config, seed).float() for seed in range(3)]
    members[1].embedding.weight.data *= 4  # another root mean square
    model = joined_of(config, members, 3).float()
    rng = torch.Generator().manual_seed(0)
    batches = [torch.randint(config.vocab_size, (2, 32), generator=rng) for _ in range(21)]

    def divergence() -> float:
        mean = torch.stack([logits(one, batches[-1]).softmax(-1) for one in members]).mean(0).double()
        return float((mean * (mean.log() - logits(model, batches[-1]).double().log_softmax(-1))).sum(-1).mean())

    before, weights = divergence(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit_norms(model, members, batches[:-1], "fp32", lambda: None)
    assert divergence() < 0.6 * before
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]) == (not name.endswith("norm.weight")), name
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_fitting_is_reproducible_and_stops_when_asked_to() -> None:
    config = small(width=16, heads=4, context=32)
    members = [member(config, seed).float() for seed in range(2)]
    batches = [IDS] * 3

    def join(check: Callable[[], None]) -> dict[str, Tensor]:
        return join_models(members, config.side_by_side(2), 2, batches, "fp32", check).state_dict()

    torch.manual_seed(1)
    first = join(lambda: None)
    torch.manual_seed(2)
    for name, tensor in join(lambda: None).items():
        assert torch.equal(tensor, first[name])

    def stop() -> None:
        raise StopTraining

    with pytest.raises(StopTraining):
        join(stop)


def test_the_sizes_of_a_joined_model_are_sums_and_other_kinds_of_layers_are_an_error() -> None:
    config = small(width=16, heads=4, kv_heads=2, ffn_width=24)
    joined = config.side_by_side(3)
    assert (joined.width, joined.heads, joined.kv_heads, joined.ffn_width) == (48, 12, 6, 72)
    assert joined.head_dim == config.head_dim
    assert joined.member(3) == config
    with pytest.raises(UsageError, match="is not 5 side by side"):
        joined.member(5)
    for other in (
        {"norm": "layernorm"},
        {"norm_placement": "post"},
        {"position": "learned"},
        {"experts": 2},
        {"residual": False},
        {"scale_embedding": True},
        {"norm_gain": False},
    ):
        with pytest.raises(UsageError, match="`join` is for models of `preset` modern"):
            small(**other).side_by_side(2)


# Runs


JOINED: dict[str, Any] = {"generations": 3, "join": 2, "average": 0.1, "optimizer": "muon"}


def run_of(**choices: Any) -> Any:
    return config_of(model=SHAPE.side_by_side(choices.get("join", 1)), **choices)


def test_a_run_ends_with_the_last_generations_side_by_side(tokens: TokenFolder, tmp_path: Path) -> None:
    session = RunSession(tmp_path / "run", tokens)
    _, state = session.begin(run_of(**JOINED, keep="last"))
    assert [event.count for event in session.reported(Joining)] == [2]
    last = session.reported(Evaluated)[-1]
    assert (last.joined, last.step) == (2, 60)
    assert (state.joined_step, state.joined_loss) == (60, last.val_loss)
    loaded = load_model(tmp_path / "run")
    assert loaded.config.model == SHAPE.side_by_side(2)
    assert loaded.weights.val_loss == last.val_loss
    run = RunDirectory(tmp_path / "run")
    expected = join_weights([run.read_generation(index, loaded.config) for index in (1, 2)], 2)
    for name, tensor in loaded.network.state_dict().items():
        assert torch.equal(tensor, expected[name]) == (not name.endswith("norm.weight")), name


@pytest.mark.parametrize(
    ("losses", "chosen"),
    [
        ([2.0, 1.9, 1.8, 1.85], [1, 2, 3]),  # the three that are best, in their order
        ([1.8, 1.9, 1.95], [0, 1, 2]),
        ([1.0, 1.05, 1.11, 1.09], [0, 1, 3]),
        ([1.0, 1.2, 1.09, 5.0], [0, 2]),  # the others are more than a tenth worse
        ([1.0, 1.2], [0]),
    ],
)
def test_the_generations_of_the_lowest_losses_are_joined_but_none_that_is_much_worse(
    losses: list[float], chosen: list[int], tmp_path: Path
) -> None:
    config = run_of(generations=8, join=3)
    run = RunDirectory.create(tmp_path / "run", config, TOKENIZER)
    run.commit()
    model = build_model(SHAPE)
    for index, loss in enumerate([*losses, 0.5]):  # the last file is of a generation that a resumed run has not begun
        run.save_generation(index, dict(model.state_dict()), config, 1, loss)
    assert Generations(run, config, model, Mock()).best(len(losses) - 1) == chosen


def test_a_single_generation_is_not_joined() -> None:
    bench = Bench(budget=Budget(steps=4), generations=2, join=2)
    bench.state.generation = 1
    generations = bench.trainer.generations = Mock(task=bench.trainer.task, best=lambda last: [0])
    generations.task_of = lambda *arguments: copy.copy(bench.trainer.task)
    bench.run()
    generations.join.assert_not_called()
    assert not bench.reported(Joining)
    assert (bench.state.joined_step, bench.state.joined_loss) == (4, bench.state.val_loss)


@pytest.mark.parametrize(("joined_loss", "is_kept"), [(0.4, True), (0.6, False)])
def test_the_joined_model_is_kept_if_it_is_better_than_all_before(joined_loss: float, is_kept: bool) -> None:
    def validate() -> float:
        return joined_loss if bench.reported(Joining) else 0.5

    bench = Bench(budget=Budget(steps=4), generations=2, join=2, validate=validate)
    bench.state.generation = 1
    bench.trainer.generations = Mock(task=bench.trainer.task, join=lambda *arguments: bench.model)
    bench.trainer.generations.best = lambda last: [0, 1]
    bench.trainer.generations.task_of = lambda *arguments: copy.copy(bench.trainer.task)
    bench.run()
    assert bench.best[-1] == ((4, joined_loss) if is_kept else (4, 0.5))
    assert bench.state.best_loss == min(0.5, joined_loss)
    assert bench.saved[-2:] == [4, 4]  # before and after


@pytest.mark.parametrize("error", [MemoryError(), TinyLMError("generation-1 is damaged.")])
def test_if_generations_cannot_be_joined_the_best_one_is_kept(error: Exception) -> None:
    bench = Bench(budget=Budget(steps=4), generations=2, join=2)
    bench.state.generation = 1
    bench.trainer.generations = Mock(task=bench.trainer.task, join=Mock(side_effect=error), best=lambda last: [0, 1])
    bench.trainer.generations.task_of = lambda *arguments: copy.copy(bench.trainer.task)
    assert bench.run() == "steps"
    reason = "out of memory." if isinstance(error, MemoryError) else error
    assert [event.message for event in bench.reported(Notice)] == [
        f"The generations are not joined, and the best one is kept: {reason}"
    ]
    assert bench.state.joined_step == 0


def test_until_generations_are_joined_the_model_for_inference_is_the_best_one_alone(
    tokens: TokenFolder, tmp_path: Path
) -> None:
    RunSession(tmp_path / "run", tokens, until=30).begin(run_of(**JOINED))
    config = read_config(tmp_path / "run")
    loaded = load_model(tmp_path / "run")
    assert loaded.config.model == SHAPE
    losses = {r["val_loss"]: r["step"] for r in read_metrics(tmp_path / "run") if "val_loss" in r and r["step"]}
    index = 0 if losses[min(losses)] <= 20 else 1
    best = RunDirectory(tmp_path / "run").read_generation(index, config)
    assert best.keys() == loaded.weights.tensors.keys()
    assert all(torch.equal(tensor, best[name]) for name, tensor in loaded.weights.tensors.items())
    assert summarise(tmp_path / "run")["parameters"] == count_parameters(SHAPE)["total"]


@pytest.mark.parametrize("end", [StopTraining, Killed])
@pytest.mark.parametrize("calls", [1, 7, 1000])
def test_a_run_that_ends_while_it_joins_generations_joins_them_when_it_is_resumed(
    calls: int, end: type[BaseException], tokens: TokenFolder, tmp_path: Path
) -> None:
    RunSession(tmp_path / "straight", tokens).begin(run_of(**JOINED))
    first = RunSession(tmp_path / "resumed", tokens)
    after = 0

    def check() -> None:
        nonlocal after
        if first.reported(Joining):
            after += 1
            if after >= calls:
                raise end

    def report(event: Event) -> None:
        first.events.append(event)
        if isinstance(event, Evaluated) and event.joined and calls == 1000:  # after the joined model was saved
            raise end

    first.check, first.report = check, report  # type: ignore[method-assign]
    if end is Killed:
        with pytest.raises(Killed):
            first.begin(run_of(**JOINED))
    else:
        assert first.begin(run_of(**JOINED))[0] == "signal"
    assert RunSession(tmp_path / "resumed", tokens).resume()[0] == "steps"
    assert contents(tmp_path / "resumed") == contents(tmp_path / "straight")


def test_a_finished_run_is_not_joined_again_and_a_longer_one_joins_its_last_generations(
    tokens: TokenFolder, tmp_path: Path
) -> None:
    RunSession(tmp_path / "run", tokens).begin(run_of(**JOINED))
    before = contents(tmp_path / "run")
    again = RunSession(tmp_path / "run", tokens)
    again.resume()
    assert not again.reported(Joining)
    assert contents(tmp_path / "run") == before
    RunSession(tmp_path / "run", tokens).resume(budget=Budget(steps=80), generations=4)
    joined = [r["step"] for r in read_metrics(tmp_path / "run") if "joined" in r]
    assert joined == [60, 80]


def test_the_last_weights_of_a_joined_run_are_a_model_of_the_size_of_one_generation(
    tokens: TokenFolder, tmp_path: Path
) -> None:
    RunSession(tmp_path / "run", tokens).begin(run_of(**JOINED, keep="last"))
    loaded = load_model(tmp_path / "run" / "last")
    assert loaded.config.model == SHAPE
    save = RunDirectory(tmp_path / "run").load_last(read_config(tmp_path / "run"))
    for name, tensor in save.read_weights().items():
        assert torch.equal(loaded.network.state_dict()[name], tensor)
    assert summarise(tmp_path / "run" / "last")["parameters"] == count_parameters(SHAPE)["total"]
    assert summarise(tmp_path / "run")["parameters"] == count_parameters(SHAPE.side_by_side(2))["total"]


def test_a_generation_whose_time_is_used_up_by_its_predictions_does_not_begin() -> None:
    clock = FakeTime()
    bench = clock.bench(100, 1.0, 0.5, 0.1, generations=2)
    generations = Mock(task=bench.trainer.task)
    generations.task_of = lambda *arguments: (clock.spend(200), copy.copy(generations.task))[1]
    bench.trainer.generations = generations
    assert bench.run() == "time"
    generations.renew_weights.assert_not_called()
    assert bench.state.generation == 0


def test_a_generation_that_had_time_for_no_step_is_not_joined() -> None:
    """Its new weights use up the time that is left; among these lengths of the predictions, that happens."""

    def has_no_step(seconds: float) -> bool:
        clock = FakeTime()
        bench = clock.bench(100, 1.0, 0.5, 0.1, generations=2, join=2)
        validated, asked = set[int](), list[int]()
        generations = bench.trainer.generations = Mock(task=bench.trainer.task)
        generations.task_of = lambda *arguments: (clock.spend(seconds), copy.copy(generations.task))[1]
        generations.renew_weights = lambda number: clock.spend(0.5)
        generations.keep_best = lambda number, step, loss: validated.add(number)
        generations.best = lambda last: asked.append(last) or [0]
        bench.run()
        assert set(asked) <= validated
        return bench.state.generation == 1 and bench.state.step == bench.state.generation_step

    assert sum(map(has_no_step, np.arange(42.0, 46.0, 0.25)))


@pytest.mark.parametrize("forged", [{"joined_step": 61}, {"joined_step": 60, "joined_loss": None}])
def test_a_forged_state_of_joining_is_an_error(forged: dict[str, Any], tokens: TokenFolder, tmp_path: Path) -> None:
    config = run_of(**JOINED)
    RunSession(tmp_path / "run", tokens).begin(config)
    run = RunDirectory(tmp_path / "run")
    save = run.load_last(config)
    run.save_last(save.read_weights(), save.read_optimizer(), {**save.state, **forged}, config)
    with pytest.raises(TinyLMError, match="The saved training state is damaged"):
        RunSession(tmp_path / "run", tokens).resume()


def test_a_forged_join_is_an_error() -> None:
    config = run_of(**JOINED)
    for model in (dataclasses.replace(config.model, width=18, heads=3, kv_heads=1, head_dim=6), SHAPE):
        with pytest.raises(UsageError, match="is not 2 side by side"):
            dataclasses.replace(config, model=model)
    with pytest.raises(UsageError, match="`join` is 4; it must be at most `generations`"):
        run_of(generations=3, join=4)


@pytest.mark.parametrize("seconds", [0.0, 10.0])
def test_the_time_to_join_is_kept_at_the_end_of_a_budget_of_time(seconds: float) -> None:
    """Of 100 s, with steps of 1 s, evaluations of 0.5 s and saves of 0.1 s."""
    clock = FakeTime()
    bench = clock.bench(100, 1.0, 0.5, 0.1, generations=2, join=2)
    generations = Mock(task=bench.trainer.task)
    generations.task_of = lambda *arguments: copy.copy(generations.task)
    generations.join = lambda *arguments: (clock.spend(seconds), bench.model)[1]
    generations.best = lambda last: [0, 1]
    bench.trainer.generations = generations
    assert bench.run() == "time"
    assert bench.state.join_seconds == pytest.approx(0.1 * 100)  # at most; it is estimated from the first evaluation
    assert clock.now - 1000 == pytest.approx(90 + seconds, abs=3)
