"""Where a run uses CUDA graphs. tests/test_gpu.py captures them; here, capturing is replaced by one that records."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.training.conftest import Begin
from tests.training.run_sessions import SHAPE, adapter_for, config_of
from tests.training.trainer_bench import CONFIG, decoder, trained, watched
from tests.variants import randomised, small
from tinylm.config.training import Budget
from tinylm.objectives.loss import LanguageModel, next_token
from tinylm.system.ranks import Ranks
from tinylm.text.batches import Batch
from tinylm.text.token_files import TokenFolder
from tinylm.training import run as run_module
from tinylm.training.events import Event, Logged, Notice
from tinylm.training.execution import GraphedModel, capture_graphs, compile_layers
from tinylm.training.run import TrainingRun
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.build import build_model


def test_a_graph_serves_its_shape_and_the_model_all_other_inputs() -> None:
    model = randomised(build_model(small()))
    ids = torch.arange(20).view(2, 10) % 13
    replayed: list[torch.Size] = []

    def graph(ids: Tensor) -> Tensor:
        replayed.append(ids.shape)
        return model(ids).hidden

    graphed = GraphedModel(model, {ids.shape: graph})
    segments = torch.ones_like(ids)
    for inputs, expected in (((ids,), 1), ((ids[:1],), 1), ((ids, None, segments), 1), ((ids,), 2)):
        assert torch.equal(graphed(*inputs).hidden, model(*inputs).hidden)
        assert len(replayed) == expected
    batch = Batch(ids, ids.roll(1, 1))
    assert next_token(graphed, batch).total.item() == next_token(model, batch).total.item()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A GPU. state: of its random numbers; that of a failed capture is unusable until replaced. free: the fraction
    of the memory that is free, at each question. graphs: weak references to the captured ones."""
    fake = SimpleNamespace(state="first", free=[0.9, 0.8], graphs=[], pools=set())

    def set_state(state: object) -> None:
        fake.state = state

    def capture(
        module: torch.nn.Module, inputs: tuple[Tensor], *, allow_unused_input: bool, pool: object
    ) -> Callable[[Tensor], Tensor]:
        """Like torch's, the result is part of a reference cycle."""
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert module.training and allow_unused_input
        fake.pools.add(pool)

        def graph(ids: Tensor) -> Tensor:
            assert graph is not None
            return module(ids)

        fake.graphs.append(weakref.ref(graph))
        return graph

    fake.capture = capture
    generator = SimpleNamespace(clone_state=lambda: f"copy of {fake.state}", graphsafe_set_state=set_state)
    functions: dict[str, Any] = {
        "default_generators": (generator,),
        "current_device": lambda: 0,
        "current_stream": lambda: None,
        "stream": contextlib.nullcontext,
        "get_rng_state": lambda: fake.state,
        "set_rng_state": lambda state: set_state(f"set to {state}"),
        "graph_pool_handle": object,
        "make_graphed_callables": capture,
        "mem_get_info": lambda: (1000 * fake.free.pop(0), 1000),
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return fake


def captured_on(model: Decoder) -> tuple[GraphedModel | None, list[Event]]:
    ids = torch.arange(20).view(2, 10) % 13
    events: list[Event] = []
    return capture_graphs(model, [Batch(ids, ids), Batch(ids[:1], ids[:1])], "bf16", events.append), events


def test_graphs_are_captured_in_the_number_format_and_share_their_memory(gpu: SimpleNamespace) -> None:
    """And the random number generator is where it was."""
    model = randomised(build_model(small()))
    graphed, events = captured_on(model)
    assert isinstance(graphed, GraphedModel) and not events
    assert len(gpu.graphs) == 2 and len(gpu.pools) == 1
    assert gpu.state == "set to first"
    ids = torch.ones(2, 10, dtype=torch.long)
    assert torch.equal(graphed(ids).hidden, model(ids).hidden)
    assert all(graph() is not None for graph in gpu.graphs)
    graphed.release_graphs()
    assert all(graph() is None for graph in gpu.graphs)
    assert torch.equal(graphed(ids).hidden, model(ids).hidden)


def test_graphs_that_leave_too_little_memory_are_freed(gpu: SimpleNamespace) -> None:
    for free, captures in (([0.7], 0), ([0.8, 0.7], 2)):
        gpu.free, gpu.graphs = free, []
        assert captured_on(build_model(small())) == (None, [])
        assert [graph() for graph in gpu.graphs] == [None] * captures


def test_after_a_failed_capture_the_generator_gets_another_state(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(module: torch.nn.Module, inputs: tuple[Tensor], **options: Any) -> Any:
        if len(inputs[0]) == 1:
            raise RuntimeError("CUDA error: not permitted\nand much more")
        return gpu.capture(module, inputs, **options)

    monkeypatch.setattr(torch.cuda, "make_graphed_callables", fail)
    notice = Notice("Capturing CUDA graphs failed (CUDA error: not permitted); continuing without them.")
    assert captured_on(build_model(small())) == (None, [notice])
    assert gpu.state == "copy of first"
    assert [graph() for graph in gpu.graphs] == [None]


def test_steps_replay_the_graph_until_memory_runs_out() -> None:
    """Evaluations and saves use the model. After memory ran out, steps do too, in smaller micro-batches."""
    model = decoder()
    replays: list[int] = []
    losses: list[int] = []

    def graph(ids: Tensor) -> Tensor:
        replays.append(len(losses))
        return model(ids).hidden

    def watch(model: LanguageModel, batch: Batch) -> None:
        if torch.is_grad_enabled():  # in a step
            losses.append(len(batch))
            if len(losses) == 5:
                raise torch.OutOfMemoryError("CUDA out of memory.")

    choices: dict[str, Any] = {"budget": Budget(steps=8), "lr": 0.1, "eval_every": 2, "save_every": 3}
    graphed = GraphedModel(model, {torch.Size((6, CONFIG.context)): graph})
    bench, plain = trained(model=model, graphed=graphed, objective=watched(watch), **choices), trained(**choices)
    assert replays == [1, 2, 3, 4]
    assert losses[3:7] == [6, 6, 3, 3]
    expected = [event.loss for event in plain.reported(Logged)]
    assert [event.loss for event in bench.reported(Logged)] == pytest.approx(expected, rel=1e-9)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[list[torch.Size]]:
    """The shapes of each capture."""
    shapes: list[list[torch.Size]] = []

    def capture(model: Decoder, batches: list[Batch], dtype: str, report: Callable[..., None]) -> None:
        shapes.append([batch.ids.shape for batch in batches])

    monkeypatch.setattr(run_module, "capture_graphs", capture)
    return shapes


@pytest.fixture
def captured_on_gpu(monkeypatch: pytest.MonkeyPatch, captured: list[list[torch.Size]]) -> list[list[torch.Size]]:
    """`_capture_graphs` sees a CUDA device; the rest of the run uses the CPU."""
    choose = TrainingRun._capture_graphs

    def on_gpu(run: TrainingRun, micro_batch: int, report: Callable[..., None]) -> Any:
        config = dataclasses.replace(run.config, runtime=dataclasses.replace(run.config.runtime, device="cuda"))
        return choose(dataclasses.replace(run, config=config), micro_batch, report)

    monkeypatch.setattr(TrainingRun, "_capture_graphs", on_gpu)
    return captured


ONCE: dict[str, Any] = {"batch_size": 5, "micro_batch": 5}
LONG = dataclasses.replace(SHAPE, context=16)
CAPTURED = [
    (config_of(**ONCE), [(5, SHAPE.context)]),
    (config_of(**ONCE, model=dataclasses.replace(SHAPE, architecture="encoder")), [(5, SHAPE.context)]),
    (config_of(**ONCE, sequence_growth=2, model=LONG), [(5, 16), (10, 8)]),
    (config_of(batch_size=5, micro_batch=2), None),
    (config_of(**ONCE, checkpoint_activations=True), None),
    (config_of(**ONCE, model=dataclasses.replace(SHAPE, experts=2, experts_per_token=1)), None),
]


def test_a_run_captures_one_graph_for_each_length_where_a_step_has_one_micro_batch(
    tokens: TokenFolder, tmp_path: Path, begin: Begin, captured_on_gpu: list[list[torch.Size]]
) -> None:
    captured = captured_on_gpu
    adapter = config_of(adapter_for(tmp_path / "base", tokens), **ONCE)
    for number, (config, shapes) in enumerate([*CAPTURED, (adapter, [(5, SHAPE.context)])]):
        captured.clear()
        training = dataclasses.replace(config.training, budget=Budget(steps=1))
        begin(str(number), dataclasses.replace(config, training=training))
        assert captured == ([] if shapes is None else [[torch.Size(shape) for shape in shapes]]), number


def test_pairs_conversations_and_several_ranks_capture_nothing(
    captured_on_gpu: list[list[torch.Size]], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = captured_on_gpu
    rows = torch.zeros(5, 8, dtype=torch.long)
    parts: Any = (SimpleNamespace(path=None), config_of(**ONCE), None, None, None, None)
    for ranks, other in ((1, None), (1, "source"), (1, "segments"), (1, "lengths"), (2, None)):
        batch = Batch(rows, rows, **({} if other is None else {other: rows}))
        monkeypatch.setattr(TrainingRun, "_micro_batches", lambda run, batch=batch: [batch])
        TrainingRun(*parts, ranks=cast(Ranks, SimpleNamespace(size=ranks)))._capture_graphs(5, print)
        assert captured == ([[rows.shape]] if ranks == 1 and other is None else [])
        captured.clear()


def test_shallow_models_with_batches_of_one_shape_are_compiled_as_a_whole_on_a_gpu() -> None:
    """Activations that are computed again would have other dropout masks in a model compiled as a whole."""
    deep, experts = (dataclasses.replace(SHAPE, **one) for one in ({"layers": 17}, {"experts": 2}))
    rows = torch.zeros(5, 8, dtype=torch.long)
    one = [Batch(rows, rows)]
    for device, choices, batches, expected in (
        ("cuda", {}, one, True),
        ("cuda", {}, [*one, Batch(rows[:2], rows[:2])], False),
        ("cuda", {}, [Batch(rows, rows, lengths=rows[0])], False),
        ("cuda", {}, [Batch(rows, rows, source=rows)], False),
        ("cpu", {}, one, False),
        ("cuda", {"model": deep}, one, False),
        ("cuda", {"model": experts}, one, False),
        ("cuda", {"checkpoint_activations": True}, one, False),
    ):
        config = config_of(**choices)
        config = dataclasses.replace(config, runtime=dataclasses.replace(config.runtime, device=device))
        run = TrainingRun(*cast(Any, (SimpleNamespace(path=None), config, None, None, None)))
        assert run._is_compiled_as_a_whole(batches) == expected


def test_a_model_that_is_not_compiled_as_a_whole_has_compiled_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = build_model(small()).train(), torch.arange(20).view(2, 10) % 13
    compiled: list[str] = []

    def fail(*inputs: Any) -> Any:
        raise RuntimeError("no compiler\nand more")

    def compile(module: torch.nn.Module, **options: Any) -> None:
        compiled.append(type(module).__name__)
        if module is model:
            module._compiled_call_impl = fail

    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    events: list[Event] = []
    assert compile_layers(model, [Batch(ids, ids)], next_token, "fp32", events.append, whole=True)
    assert compiled == ["Decoder", "PreNormBlock", "PreNormBlock"]
    assert [event.message for event in events] == [
        "torch.compile of the whole model failed (no compiler); compiling its blocks."
    ]


def test_a_run_on_a_cpu_captures_nothing(begin: Begin, captured: list[list[torch.Size]]) -> None:
    begin(**ONCE, budget=Budget(steps=1))
    assert captured == []
