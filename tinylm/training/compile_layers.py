"""torch.compile for the layers and the loss of a model before it is trained."""

from collections.abc import Callable, Iterable

import torch

from tinylm.errors import TinyLMError, first_line, is_out_of_memory
from tinylm.kernels.compiler_cache import prepare_compiler
from tinylm.kernels.force_eager import discard_compiled
from tinylm.machine.device import autocast, empty_cache
from tinylm.objectives.loss import Objective
from tinylm.text.batches import Batch
from tinylm.training.events import Event, Notice
from tinylm.transformer.block import PreNormBlock
from tinylm.transformer.stack import Transformer


def compile_layers(
    model: Transformer, batches: Iterable[Batch], objective: Objective, dtype: str, report: Callable[[Event], None]
) -> bool:
    """Compile each block in place, with CUDA also the loss, and test them with a forward and a backward pass on each of
    `batches`.

    The compiler makes new code for the second length of sequences and the second number of targets that it sees, which
    then serves others too.

    Returns False if compiling or a test fails; the model is then as before, and `report` receives a Notice with the
    reason. If a test runs out of memory, it is repeated with half of its batch, down to one sequence. Gradients are
    cleared, and random number generators do not advance.
    """
    try:
        prepare_compiler()
    except TinyLMError as error:
        report(Notice(f"{error} Continuing without torch.compile."))
        return False
    for module in model.modules():
        if isinstance(module, PreNormBlock):
            module.compile()
    if model.device.type == "cuda":  # on a CPU, it is slower for small vocabularies (decision 041)
        model.cross_entropy.compile()
    try:
        for batch in batches:
            _test(model, batch, objective, dtype)
    except Exception as error:  # torch.compile and the C++ compiler raise many types of exceptions
        discard_compiled(model.modules())
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
