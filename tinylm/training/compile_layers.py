"""torch.compile for the layers of a model before it is trained."""

from collections.abc import Callable

import torch

from tinylm.device import autocast, empty_cache
from tinylm.errors import TinyLMError, is_out_of_memory
from tinylm.kernels.compiler_cache import prepare_compiler
from tinylm.kernels.force_eager import discard_compiled
from tinylm.model.block import PreNormBlock
from tinylm.model.stack import Transformer
from tinylm.objectives.loss import Objective
from tinylm.text.batches import Batch
from tinylm.training.events import Event, Notice


def compile_layers(
    model: Transformer, batch: Batch, objective: Objective, dtype: str, report: Callable[[Event], None]
) -> bool:
    """Compile each block in place, and test the model with a forward and a backward pass on `batch`.

    Returns False if compiling or the test fails; the blocks are then as before, and `report` receives a Notice with the
    reason. If the test runs out of memory, it is repeated with half of the batch, down to one sequence. Gradients are
    cleared, and random number generators do not advance.
    """
    blocks = [module for module in model.modules() if isinstance(module, PreNormBlock)]
    device = model.device
    try:
        prepare_compiler()
    except TinyLMError as error:
        report(Notice(f"{error} Continuing without torch.compile."))
        return False
    for block in blocks:
        block.compile()
    while True:
        try:
            with torch.random.fork_rng(), autocast(device.type, dtype):
                objective(model, batch.to(device)).total.backward()
            return True
        except Exception as error:  # torch.compile and the C++ compiler raise many types of exceptions
            if not is_out_of_memory(error) or len(batch) == 1:
                discard_compiled(blocks)
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                report(Notice(f"torch.compile failed ({reason[:120]}); continuing without it."))
                return False
        finally:
            model.zero_grad(set_to_none=True)
        empty_cache(device)
        batch = next(batch.split(-(-len(batch) // 2)))
