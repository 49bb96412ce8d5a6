"""Training and generation on a GPU. Reference: the same on the CPU in fp32, or by another path on the same device.

make test-gpu
TINYLM_TEST_DEVICE=cpu pytest -m gpu tests/test_gpu.py    # runs the code of these tests without a GPU
"""

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tinylm
from tests.shell import story
from tests.training.trainer_bench import SETTINGS, Bench
from tests.variants import randomised, small
from tinylm.config.training import Budget, TrainingConfig
from tinylm.generation.engine import Engine
from tinylm.generation.generation_config import GenerationConfig, SamplingConfig
from tinylm.generation.graph_engine import GraphEngine
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.torch_engine import Sampler, TorchEngine, generate
from tinylm.kernels.graphs import Step, capture
from tinylm.machine.device import autocast, choose_device, describe_device, free_memory
from tinylm.objectives.loss import Loss, next_token
from tinylm.text.batches import Batch, prefetch
from tinylm.text.tokenizer import train_char
from tinylm.training import run as run_module
from tinylm.training.events import Evaluated, Event, Logged, Notice
from tinylm.training.execution import GraphedModel, capture_graphs, checkpoint_activations, compile_layers
from tinylm.training.optimizer import build_optimizer
from tinylm.training.parallel import full, shard_model
from tinylm.training.result import TrainingResult
from tinylm.training.state import capture_rng, restore_rng
from tinylm.training.trainer import Trainer
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model

# In the other tests, warnings are errors; those of torch about GPUs differ between GPUs.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CONFIG = small(width=64, ffn_width=128, context=32)
HALF = ("bf16", "fp16")
BOUNDS = {"fp32": 2e-3, "bf16": 5e-2, "fp16": 5e-2}  # relative


@pytest.fixture
def device() -> str:
    """Raises UsageError without a GPU, so that the tests cannot pass without one."""
    return choose_device(os.environ.get("TINYLM_TEST_DEVICE", "cuda")).value


def test_a_gpu_has_a_name_and_free_memory(device: str) -> None:
    if device == "cuda":
        assert describe_device(device) == f"cuda ({torch.cuda.get_device_name()})"
        free, total = free_memory(device), torch.cuda.get_device_properties().total_memory
        assert free is not None and 0 < free <= total


@pytest.fixture
def one_rank(device: str) -> Iterator[None]:
    """A process group of one rank."""
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def batch_of(number: int, rows: int = 6) -> Batch:
    tokens = torch.randint(13, (rows, CONFIG.context + 1), generator=torch.Generator().manual_seed(number))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def bench_on(device: str, dtype: str = "fp32", optimizer: str = "adamw", **choices: object) -> Bench:
    """A trainer of a small model for five steps on the same batch."""
    chosen = {**SETTINGS, "lr": 1e-2, "budget": Budget(steps=5)}
    config = TrainingConfig(**chosen, optimizer=optimizer)
    return Bench(
        model=randomised(build_model(CONFIG)).to(device),
        batches=lambda number: batch_of(0),
        dtype=dtype,
        optimizer=lambda model: build_optimizer(model, config, dtype),
        **{"lr": chosen["lr"], "budget": chosen["budget"], **choices},
    )


def graphed(model: Decoder, dtype: str = "fp32", parts: tuple[int, ...] = (1,)) -> GraphedModel:
    """The model in training mode with CUDA graphs; on a CPU without."""
    model.train()
    if model.device.type == "cpu":
        return GraphedModel(model, {})
    events: list[Event] = []
    found = capture_graphs(model, [batch_of(1).split_windows(number) for number in parts], dtype, events.append)
    assert isinstance(found, GraphedModel), events
    return found


def losses(bench: Bench) -> list[float]:
    bench.run()
    return [event.loss for event in bench.reported(Logged)]


def loss_and_gradients(model: Decoder, device: str, dtype: str) -> list[Tensor]:
    """The mean loss, and the gradient of each parameter, on the CPU."""
    batch = batch_of(0).to(torch.device(device))
    with autocast(device, dtype):
        loss = next_token(model, batch).total / batch.n_targets
    loss.backward()
    gradients = [full(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad(set_to_none=True)
    return [tensor.detach().cpu() for tensor in (loss, *gradients)]


def assert_close(found: list[Tensor], expected: list[Tensor], bound: float) -> None:
    """Compare by norms: ||found - expected|| / ||expected|| of each tensor."""
    assert len(found) == len(expected)
    assert {tensor.dtype for tensor in found} == {torch.float32}
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= bound * other.norm()


@pytest.mark.parametrize(("dtype", "optimizer"), [("fp32", "muon"), ("bf16", "muon"), ("fp16", "adamw")])
def test_the_losses_of_training_are_those_of_the_cpu(dtype: str, optimizer: str, device: str) -> None:
    expected = losses(bench_on("cpu", optimizer=optimizer))
    assert expected[0] - expected[-1] > 0.2  # the updates have an effect
    assert losses(bench_on(device, dtype, optimizer)) == pytest.approx(expected, rel=BOUNDS[dtype])


def test_a_run_has_the_losses_of_one_on_the_cpu(device: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(story(20_000))
    model = {"tokenizer": "char", "layers": 2, "heads": 2, "width": 32, "context": 32}
    training = {"steps": 6, "eval_every": 3, "batch_size": 8, "lr": 1e-2, "optimizer": "adamw", "dtype": "fp32"}

    def found(name: str, device: str) -> list[float]:
        events: list[Event] = []
        tinylm.train(
            tmp_path / "text.txt", tmp_path / name, device=device, callbacks=[events.append], **model, **training
        )
        return [event.val_loss for event in events if isinstance(event, Evaluated)]

    expected = found("cpu", "cpu")
    assert len(expected) == 3 and expected[0] - expected[-1] > 0.1
    assert found("device", device) == pytest.approx(expected, rel=0.02)  # evaluated in bf16 on GPUs
    texts = tinylm.load(tmp_path / "device").generate("the old man", max_tokens=50, num_samples=8, seed=0)
    assert any(texts)  # after so few steps, one text in sixty is empty: its first token ends it


def test_prefetched_batches_are_pinned_and_arrive_unchanged(device: str) -> None:
    """Copies that do not wait, of batches that are made meanwhile."""
    target = torch.device(device)
    batch = prefetch(lambda number: batch_of(number, rows=512), target)
    arrived = []
    for number in range(20):
        _, made = batch(number)
        assert made.ids.is_pinned() == made.targets.is_pinned() == (device == "cuda")
        arrived.append(made.to(target))
    for number, found in enumerate(arrived):
        expected = batch_of(number, rows=512)
        assert found.ids.device.type == device
        assert torch.equal(found.ids.cpu(), expected.ids)
        assert torch.equal(found.targets.cpu(), expected.targets)


@pytest.mark.parametrize(("dtype", "tie"), [("fp32", True), ("bf16", True), ("fp16", False)])
def test_graphs_train_as_the_cpu_does(dtype: str, tie: bool, device: str) -> None:
    config = small(width=64, ffn_width=128, context=32, tie=tie)
    choices: dict[str, Any] = {"batches": batch_of, "sequence_growth": 2, "lr": 1e-2, "budget": Budget(steps=12)}
    choices["optimizer"] = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = losses(Bench(model=randomised(build_model(config)), **choices))
    model = randomised(build_model(config)).to(device)
    bench = Bench(model=model, dtype=dtype, graphed=graphed(model, dtype, parts=(1, 2)), **choices)
    if device == "cuda":
        model.embed = None  # the model itself is not called
    assert losses(bench) == pytest.approx(expected, rel=BOUNDS[dtype])


def test_a_graph_draws_the_dropout_masks_of_the_model(device: str) -> None:
    """Capturing does not advance the random number generator."""
    model = build_model(small(width=64, ffn_width=128, context=32, dropout=0.5)).to(device)
    ids = batch_of(0).ids.to(device)
    rng = capture_rng()
    with_graph = graphed(model)
    found = [with_graph(ids).hidden.clone() for _ in range(2)]
    restore_rng(rng)
    for hidden in found:
        torch.testing.assert_close(model(ids).hidden, hidden)
    assert (found[0] - found[1]).norm() > 0.5 * found[0].norm()


def test_a_model_that_cannot_be_captured_has_no_graphs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        pytest.skip("captures need a GPU")
    model = build_model(small(width=64, ffn_width=128, context=32, dropout=0.5)).to(device).train()
    events: list[Event] = []
    embed = model.embed
    with monkeypatch.context() as patch:
        patch.setattr(model, "embed", lambda ids: embed(ids) * ids.sum().item())  # waits for the GPU
        assert capture_graphs(model, [batch_of(1)], "fp32", events.append) is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert [event.message.split(" (")[0] for event in events] == ["Capturing CUDA graphs failed"]
    ids = batch_of(0).ids.to(device)
    rng = capture_rng()
    with torch.no_grad():  # a gradient's graph that begins on this stream and is alive makes a capture fail
        one, other = model(ids).hidden, model(ids).hidden
        restore_rng(rng)
        assert not torch.equal(one, other)
        assert torch.equal(model(ids).hidden, one)
    assert isinstance(graphed(model), GraphedModel)


def test_a_step_does_not_wait_for_the_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step allocates memory, and the last one is followed by a log line."""
    step = Trainer._step
    watched: list[int] = []

    def step_without_waiting(trainer: Trainer, progress: float) -> None:
        if not 2 <= trainer.state.step < 5:
            step(trainer, progress)
            return
        watched.append(trainer.state.step)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            step(trainer, progress)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "_step", step_without_waiting)
    for choices in ({}, {"average": 0.25}, {"has_graphs": True}):
        choices = {"budget": Budget(steps=6), "log_every": 6, **choices}
        has_graphs = choices.pop("has_graphs", False)
        bench = bench_on(device, "bf16", "muon", **choices)
        if has_graphs:
            bench.trainer.graphed = graphed(bench.model, "bf16")
        watched.clear()
        (loss,) = losses(bench)
        assert watched == [2, 3, 4]
        assert 0 < loss < 5


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[GraphedModel | None]:
    """What each run has captured."""
    found: list[GraphedModel | None] = []

    def capture_and_keep(*parts: Any) -> GraphedModel | None:
        found.append(capture_graphs(*parts))
        return found[-1]

    monkeypatch.setattr(run_module, "capture_graphs", capture_and_keep)
    return found


def test_lora_trains_as_on_the_cpu_and_with_graphs(
    device: str, tmp_path: Path, captured: list[GraphedModel | None]
) -> None:
    (tmp_path / "text.txt").write_text(story(20_000))
    model: dict[str, Any] = {"tokenizer": "char", "layers": 2, "heads": 2, "width": 32, "context": 32, "device": "cpu"}
    base = tinylm.train(tmp_path / "text.txt", tmp_path / "base", steps=2, batch_size=8, lr=1e-2, **model).run
    settings: dict[str, Any] = {"steps": 6, "batch_size": 8, "lr": 1e-2, "log_every": 1, "seed": 0, "dtype": "fp32"}

    def found(name: str, device: str) -> list[float]:
        run = tinylm.finetune_lora(tmp_path / "text.txt", base, out=tmp_path / name, device=device, **settings)
        return run.history.training["loss"]

    expected = found("cpu", "cpu")
    assert expected[0] - expected[-1] > 0.01
    assert found("device", device) == pytest.approx(expected, rel=BOUNDS["fp32"])
    assert [graphs is not None for graphs in captured] == [True] * (1 if device == "cuda" else 0)


def test_a_resumed_run_goes_on_exactly(device: str, tmp_path: Path, captured: list[GraphedModel | None]) -> None:
    (tmp_path / "text.txt").write_text(story(20_000))
    model = {"tokenizer": "char", "layers": 2, "heads": 2, "width": 32, "context": 32, "dropout": 0.3}
    training = {"batch_size": 8, "lr": 1e-2, "schedule": "constant", "warmup_steps": 0, "mtp_weight": 0}
    training |= {"sequence_growth": 1, "average": 0.0, "weight_decay": 0.1}
    intervals = {"eval_every": 3, "save_every": 3, "log_every": 1}
    settings: dict[str, Any] = {**model, **training, **intervals}

    def run(name: str, steps: int) -> TrainingResult:
        return tinylm.train(tmp_path / "text.txt", tmp_path / name, steps=steps, device=device, **settings)

    expected = run("whole", 6).history
    run("parts", 3)
    found = tinylm.train(resume=tmp_path / "parts", steps=6).history
    for name in ("step", "loss", "grad_norm"):
        assert found.training[name] == expected.training[name]
    assert found.validation["val_loss"] == expected.validation["val_loss"]
    assert [graphs is not None for graphs in captured] == [True] * (3 if device == "cuda" else 0)


@pytest.mark.timeout(900)  # the C++ compiler of a busy machine takes minutes
@pytest.mark.parametrize(
    ("dtype", "checkpointed", "whole"), [("fp32", True, False), ("bf16", False, False), ("bf16", False, True)]
)
def test_compiled_models_have_the_gradients_of_the_cpu(
    dtype: str, checkpointed: bool, whole: bool, device: str
) -> None:
    model = randomised(build_model(CONFIG)).train()
    expected = loss_and_gradients(copy.deepcopy(model), "cpu", "fp32")
    if checkpointed:
        checkpoint_activations(model)
    model.to(device)
    events: list[Event] = []
    assert compile_layers(model, [batch_of(1)], next_token, dtype, events.append, whole), events
    assert_close(loss_and_gradients(model, device, dtype), expected, BOUNDS[dtype])


def test_generation_with_the_cache_gives_the_tokens_of_generation_without(device: str) -> None:
    model = randomised(build_model(CONFIG)).to(device)
    prompts = [[3], [1, 2, 3, 4, 5, 6, 7], [index % 13 for index in range(41)]]

    def generated(model: Decoder, use_cache: bool) -> list[list[int]]:
        sampler = Sampler(SamplingConfig(temperature=0.0), len(prompts), CONFIG.vocab_size)
        return [ids for ids, _ in generate(model, prompts, sampler, 50, use_cache)]

    found = generated(model, use_cache=True)
    assert found == generated(model, use_cache=False)
    assert found == generated(model.cpu(), use_cache=True)
    assert len({token for tokens in found for token in tokens}) > 3


PROMPTS = [EncodedPrompt("", ids, ids) for ids in ([3], [1, 2, 3, 4, 5, 6, 7], [index % 12 for index in range(41)])]


@pytest.mark.parametrize("preset", ["modern", "gpt2", "gemma"])
def test_graphs_generate_the_tokens_of_the_plain_path(preset: str, device: str) -> None:
    """Beyond the context of 32, with grouped heads, learned positions and sliding windows."""
    shape: dict[str, Any] = {"width": 64, "ffn_width": 128, "context": 32}
    others: dict[str, Any] = {"modern": {}, "gpt2": {"kv_heads": 4}, "gemma": {"local_window": 5, "local_layers": (0,)}}
    model = randomised(build_model(small("gpt2" if preset == "gpt2" else "modern", **shape, **others[preset])))
    tokenizer = train_char("abcdefghijkl")
    graphs: list[Step] = []

    def captured(step: Step) -> Step:
        graphs.append(capture(step) if device == "cuda" else step)
        return graphs[-1]

    def tokens(engine: Engine, settings: dict[str, Any]) -> list[tuple[int, int | None]]:
        config = GenerationConfig(max_tokens=80, seed=5, **settings)
        return [(token.row, token.id) for token in engine.generate(PROMPTS, config, 0)]

    model.to(device)
    engine = GraphEngine(model, tokenizer, captured)
    for settings in ({"temperature": 0.0}, {"top_k": 5, "repeat_penalty": 1.3}, {"top_p": 0.7}, {"min_p": 0.1}):
        found = tokens(engine, settings)
        assert found == tokens(TorchEngine(model, tokenizer), settings)
        assert len(set(found)) > 8
    assert len(graphs) == 4


def test_a_model_whose_step_cannot_be_captured_generates_without_a_graph(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "text.txt").write_text(story(20_000))
    sizes: dict[str, Any] = {"tokenizer": "char", "layers": 1, "heads": 2, "width": 32, "context": 32, "steps": 2}
    run = tinylm.train(tmp_path / "text.txt", tmp_path / "run", device=device, **sizes).run
    model = tinylm.load(run, device=device)
    choices: dict[str, Any] = {"max_tokens": 60, "seed": 1, "engine": "torch"}
    expected = model.generate("the", **choices)
    model = tinylm.load(run, device=device)  # without the graph of that request
    network = model.engine.torch_network
    embed = network.embed
    monkeypatch.setattr(network, "embed", lambda ids: embed(ids) * (1 + 0 * ids.sum().item()))  # waits for the GPU
    assert model.generate("the", **choices) == expected
    assert caplog.text.count("Capturing a CUDA graph failed") == (device == "cuda")
    assert torch.rand(1, device=device).item() < 1  # the generator can be used


@pytest.mark.parametrize("dtype", HALF)
def test_sharded_blocks_are_gathered_in_the_number_format_on_gpus_and_their_gradients_are_fp32(
    dtype: str, device: str, one_rank: None
) -> None:
    """The residual stream between the blocks is fp32 in any case."""
    model = randomised(build_model(CONFIG)).train()
    expected = loss_and_gradients(copy.deepcopy(model), "cpu", "fp32")
    shard_model(model, device, dtype)
    gathered: set[torch.dtype] = set()
    residual: set[torch.dtype] = set()
    for block in model.layers:
        block.attention.register_forward_pre_hook(
            lambda part, inputs: gathered.update(parameter.dtype for parameter in part.parameters())
        )
        block.register_forward_pre_hook(lambda part, inputs: residual.add(inputs[0].dtype))
    assert_close(loss_and_gradients(model, device, dtype), expected, BOUNDS[dtype])
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert gathered == {half if device == "cuda" else torch.float32}
    assert residual == {torch.float32}


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_losses(device: str) -> None:
    """More memory than any device has is requested for more than two rows."""

    def objective(model: Decoder, batch: Batch) -> Loss:
        if len(batch) > 2:
            torch.empty(2**60, dtype=torch.uint8, device=device)
        return next_token(model, batch)

    bench = bench_on(device, objective=objective, micro_batch=6)
    assert losses(bench) == pytest.approx(losses(bench_on("cpu")), rel=BOUNDS["fp32"])
    assert bench.state.micro_batch == 2
    rows = [event.message.split(";")[0] for event in bench.reported(Notice)]
    assert rows == [f"Out of memory: the micro-batch is now {rows}" for rows in (3, 2)]
