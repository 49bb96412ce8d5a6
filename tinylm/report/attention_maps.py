"""The attention weights of a forward pass, recomputed from the queries and keys that each attention core receives."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from tinylm.transformer.attention import DotProduct, RelativeDotProduct, attention_weights


@contextlib.contextmanager
def recorded_attention(network: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context manager that yields a dict. Each forward pass stores the attention weights of its first sequence there.

    Keys are names of attention modules, such as `layers.0.attention`; values are (H, T, S), in fp32.
    """
    weights: dict[str, Tensor] = {}

    def storing(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def store(core: DotProduct | RelativeDotProduct, inputs: tuple[Any, ...]) -> None:
            q, k, _, mask, causal = inputs
            weights[name] = attention_weights(core.scores(q, k), mask, causal)[0].detach().float().cpu()

        return store

    with contextlib.ExitStack() as stack:
        for name, module in network.named_modules():
            if isinstance(module, DotProduct | RelativeDotProduct):
                handle = module.register_forward_pre_hook(storing(name.removesuffix(".core")))
                stack.callback(handle.remove)
        yield weights
