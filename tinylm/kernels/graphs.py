"""CUDA graphs; compiled modules that run eagerly; and optimizers without the wrappers that import torch's compiler.

torch wraps `add_param_group` and `zero_grad` in `torch._disable_dynamo` and `step` in `_use_grad_for_differentiable`.
Both import `torch._dynamo` (about 1 s) at the first call (decision 018). For `step`, `torch.no_grad` replaces the
wrapper. `inspect.unwrap` returns methods without wrappers unchanged.
"""

import contextlib
import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

Step = Callable[[], None]  # reads and writes tensors that stay in place


@contextlib.contextmanager
def restored_after_failure() -> Iterator[None]:
    """Context manager for a capture. If it raises, the stream and the random number generator can be used again.

    Memory of a failed capture may stay reserved (pytorch/pytorch#190308).
    """
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    spare = generator.clone_state()
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):
            yield
    except BaseException:
        generator.graphsafe_set_state(spare)
        raise


def capture(step: Step) -> Step:
    """A function that does what `step` does. It is called once before, for libraries that initialise themselves.

    Raises RuntimeError if the step cannot be captured, as one that waits for the device, or if memory runs out.
    """
    gc.collect()  # earlier graphs are in reference cycles; freed during a capture, they would make it fail
    graph = torch.cuda.CUDAGraph()
    with restored_after_failure():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            step()
    return graph.replay


def force_eager() -> AbstractContextManager[object]:
    """Context manager in which compiled modules run eagerly.

    It does nothing if `torch._dynamo` has not been imported, because then no module is compiled; importing it would
    take a second.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def discard_compiled(modules: Iterable[nn.Module]) -> None:
    """Undo `Module.compile` of these modules; torch has no public function for it.

    If this version of torch has no `Module._compiled_call_impl`, all compiled code of this process runs eagerly.
    """
    torch.compiler.reset()
    if not hasattr(nn.Module, "_compiled_call_impl"):
        torch.compiler.set_stance("force_eager")
        return
    for module in modules:
        module._compiled_call_impl = None


class Optimizer(torch.optim.Optimizer):
    """`torch.optim.Optimizer` without the wrappers of `add_param_group` and `zero_grad`."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class Adam(Optimizer, torch.optim.Adam):
    """`torch.optim.Adam` without the wrapper of `step`."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Adam.step))


class AdamW(Optimizer, torch.optim.AdamW):
    """`torch.optim.AdamW` without the wrapper of `step`."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
