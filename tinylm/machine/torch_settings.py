"""The settings of torch that belong to the program that uses tinylm, and would change what tinylm computes."""

import contextlib
from collections.abc import Generator, Iterator
from typing import TypeVar

import torch

T = TypeVar("T")


@contextlib.contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Context manager and decorator that sets torch's global random number generators back at its end."""
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        if not gpus and torch.cuda.is_initialized():  # since then, by the seed that the program had set
            torch.cuda.manual_seed_all(torch.initial_seed())


@contextlib.contextmanager
def usual_settings() -> Iterator[None]:
    """Context manager and decorator with the settings that torch begins with: fp32 and the CPU by default, gradients,
    and no autocast.

    Afterwards, the settings of the program are as before, also its number of threads.
    """
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    with contextlib.ExitStack() as context:
        context.enter_context(torch.inference_mode(False))
        context.enter_context(torch.enable_grad())
        context.enter_context(_no_autocast())
        if torch.get_default_device().type != "cpu":
            context.enter_context(torch.device("cpu"))
        if dtype != torch.float32:
            context.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Context manager that is outside of all contexts of torch.autocast. Within one, torch keeps 16-bit copies of the
    weights until the outermost one ends, so that a step would be followed by passes with the old weights.
    """
    kinds = [kind for kind in ("cpu", "cuda", "mps") if torch.is_autocast_enabled(kind)]
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


def each_with_usual_settings(items: Generator[T]) -> Generator[T]:
    """The items, each of which is computed with `usual_settings`, while the program has its own between them."""
    with contextlib.closing(items):
        while True:
            with usual_settings():
                try:
                    item = next(items)
                except StopIteration:
                    return
            yield item
