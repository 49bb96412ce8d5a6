"""How layers compute in training: compiled, with activations computed again, or as CUDA graphs.

Most of a step of a small model on a GPU is the time in which Python launches operations. A CUDA graph launches those of
a pass at once, and computes the same.
"""

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tinylm.errors import TinyLMError, first_line, is_out_of_memory
from tinylm.kernels.graphs import discard_compiled, restored_after_failure
from tinylm.kernels.process import prepare_compiler
from tinylm.machine.device import autocast, empty_cache
from tinylm.objectives.loss import LanguageModel, Objective
from tinylm.text.batches import Batch
from tinylm.training.events import Event, Notice
from tinylm.transformer.architectures import Output, Transformer
from tinylm.transformer.blocks import PreNormBlock
from tinylm.transformer.layers import CrossEntropy


def compile_layers(
    model: Transformer,
    batches: Sequence[Batch],
    objective: Objective,
    dtype: str,
    report: Callable[[Event], None],
    whole: bool = False,
) -> bool:
    """Compile each block in place, with CUDA also the loss, and test them with a forward and a backward pass on each of
    `batches`. With `whole`, compile the model instead of its blocks, and if that fails, its blocks.

    All blocks share their code. The compiler makes new code for the second length of sequences and the second number of
    targets that it sees, which then serves others too. A whole model takes longer to compile in proportion to its
    layers, and has code for one shape only. It is faster, since the end of a block and the beginning of the next one
    are one kernel.

    Returns False if compiling or a test fails; the model is then as before, and `report` receives a Notice with the
    reason. If a test runs out of memory, it is repeated with half of its batch, down to one sequence. Gradients are
    cleared, and random number generators do not advance.
    """
    try:
        prepare_compiler()
    except TinyLMError as error:
        report(Notice(f"{error} Continuing without torch.compile."))
        return False
    if whole:
        model.compile(dynamic=False)
    for module in () if whole else model.modules():
        if isinstance(module, PreNormBlock):
            module.compile()
    if model.device.type == "cuda":  # on a CPU, it is slower for small vocabularies (decision 041)
        model.cross_entropy.compile()
    try:
        for batch in batches:
            _test(model, batch, objective, dtype)
    except Exception as error:  # torch.compile and the C++ compiler raise many types of exceptions
        discard_compiled(model.modules())
        if whole:
            report(Notice(f"torch.compile of the whole model failed ({first_line(error)}); compiling its blocks."))
            return compile_layers(model, batches, objective, dtype, report)
        report(Notice(f"torch.compile failed ({first_line(error)}); continuing without it."))
        return False
    return True


def _test(model: Transformer, batch: Batch, objective: Objective, dtype: str) -> None:
    """A forward and a backward pass on as much of the batch as fits in memory. Raises what they raise."""
    while True:
        try:
            with torch.random.fork_rng(), autocast(model.device.type, dtype):
                objective(model, batch.to(model.device)).total.backward()
            return
        except Exception as error:  # running out of memory has several types, which is_out_of_memory knows
            if not is_out_of_memory(error) or len(batch) == 1:
                raise
        finally:
            model.zero_grad(set_to_none=True)
        empty_cache(model.device)
        batch = next(batch.split(-(-len(batch) // 2)))


def checkpoint_activations(model: nn.Module) -> None:
    """Change each block, in place, to store only its inputs for the backward pass, which computes the block again.

    Losses and gradients do not change: the second pass has the random numbers and the number format of the first. On
    Apple GPUs the random numbers differ (`tinylm.planning.memory.repeats_dropout`).

    `checkpoint` calls the compiled block in both passes. If the call of `checkpoint` were compiled, the second pass
    would draw other dropout masks.
    """
    blocks: list[Any] = [module for module in model.modules() if isinstance(module, PreNormBlock)]
    for block in blocks:
        block.__class__ = _checkpointed(block.__class__)


@functools.cache
def _checkpointed(block: type[nn.Module]) -> type[Any]:
    """A subclass whose calls are checkpointed while gradients are enabled; `forward` and parameters are unchanged."""

    def call(self: nn.Module, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return block.__call__(self, *args)
        return checkpoint(functools.partial(block.__call__, self), *args, use_reentrant=False)

    return type(block.__name__, (block,), {"__call__": call})


# Fraction of the GPU's memory that must be free after the capture. Weights, and the gradients and activations in the
# memory of the graphs, then take at most a quarter of it, and the state of the optimizer and an average of the weights
# at most 1.5 times as much as weights and gradients.
MIN_FREE_MEMORY = 0.75


class GraphedModel(LanguageModel):
    """Replays a captured graph for ids of a captured shape, and calls the model for other inputs.

    graphs: by the shape of the ids (B, T), a function from ids to hidden vectors (B, T, D)
    """

    def __init__(self, model: Transformer, graphs: dict[torch.Size, Callable[[Tensor], Tensor]]) -> None:
        self._model = model
        self._graphs = graphs

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def cross_entropy(self) -> CrossEntropy:
        return self._model.cross_entropy

    @property
    def output_parameters(self) -> Sequence[Tensor]:
        return self._model.output_parameters

    def __call__(self, *inputs: Tensor | None, lengths: Tensor | None = None) -> Output:
        if lengths is not None:
            return self._model(*inputs, lengths=lengths)
        ids, *others = inputs
        graph = None if others or ids is None else self._graphs.get(ids.shape)
        return self._model(*inputs) if graph is None or ids is None else Output(graph(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., D) -> (..., V)"""
        return self._model.logits(hidden)

    def release_graphs(self) -> None:
        """Free the memory of the graphs; from now on, the model is called for all inputs."""
        self._graphs.clear()
        gc.collect()  # a graph is part of reference cycles
        empty_cache(self._model.device)


def capture_graphs(
    model: Transformer, batches: Iterable[Batch], dtype: str, report: Callable[[Event], None]
) -> GraphedModel | None:
    """Capture a graph of a model in training for each shape of the ids of `batches`.

    A step may replay one graph, once: gradients are in the memory of the graph, and its next replay overwrites them.

    dtype: of autocast. The random number generators do not advance.

    Returns `None` if less than MIN_FREE_MEMORY of the GPU would be free, and if capturing fails; `report` then receives
    a Notice.
    """
    gc.collect()  # graphs of an earlier run in this process; freed during a capture, they would make it fail
    empty_cache(model.device)
    if not _enough_memory():
        return None
    state = torch.cuda.get_rng_state()
    pool = torch.cuda.graph_pool_handle()  # shared, since a step uses one graph
    graphs: dict[torch.Size, Callable[[Tensor], Tensor]] = {}
    graphed = GraphedModel(model, graphs)
    try:
        with restored_after_failure():
            for batch in batches:
                ids = batch.ids.to(model.device, copy=True)  # each replay writes to it
                with autocast(model.device.type, dtype):
                    graphs[ids.shape] = torch.cuda.make_graphed_callables(  # type: ignore[assignment]
                        _Hidden(model).train(), (ids,), allow_unused_input=True, pool=pool
                    )
        torch.cuda.set_rng_state(state)
    except Exception as error:  # of CUDA, of torch's compiler, or because memory runs out
        report(Notice(f"Capturing CUDA graphs failed ({first_line(error)}); continuing without them."))
        graphs.clear()
    empty_cache(model.device)
    if not graphs or not _enough_memory():
        graphed.release_graphs()
        return None
    if hasattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch"):
        # Gradients are added on the stream of the capture, which torch synchronises at the end of the backward pass.
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    return graphed


def _enough_memory() -> bool:
    free, total = torch.cuda.mem_get_info()
    return free >= MIN_FREE_MEMORY * total


class _Hidden(nn.Module):
    """The hidden vectors of a model: (B, T) -> (B, T, D)."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).hidden
