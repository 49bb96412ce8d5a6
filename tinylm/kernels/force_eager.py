"""Running compiled modules eagerly."""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn


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
