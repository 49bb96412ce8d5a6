"""CUDA graphs: the operations of a function, recorded once and then launched at once."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

Step = Callable[[], None]  # reads and writes tensors that stay in place


def can_capture(device: torch.device) -> bool:
    """Whether graphs of this device can be captured."""
    return device.type == "cuda"


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
