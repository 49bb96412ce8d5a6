"""Generation on a GPU: everything from the last token of each row to its next one is one CUDA graph.

Python launches graphs, up to AHEAD tokens before the token that it shows, and nothing but ids leaves the device.
Shapes: see `tinylm.transformer`.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from tinylm.adapters.adapter import adapter_layers
from tinylm.config.model import ModelConfig
from tinylm.errors import first_line
from tinylm.generation.engine import Engine, Token, window, window_start
from tinylm.generation.generation_config import DEFAULT_TEMPERATURE, GenerationConfig, SamplingConfig
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.torch_engine import Sampler, left_padded, require_finite
from tinylm.kernels.graphs import Step
from tinylm.reporter import LogReporter, Reporter
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.attention import KVCache, StaticCache

AHEAD = 4
MIN_TOKENS = 16  # not measured: a capture runs the step once and records it once
MAX_ROWS = 256  # a captured step keeps the caches of its rows
MIN_SLOTS = 256


def has_fixed_shapes(model: ModelConfig) -> bool:
    """Whether graphs of a model are possible.

    Experts have tensors whose sizes depend on the tokens, and relative positions are offsets from the last slot of a
    cache.
    """
    return model.architecture == "decoder" and model.experts == 1 and model.position != "relative"


@dataclass(eq=False)
class GraphEngine(Engine):
    """The engine of the requests that it `suits`, and models with `has_fixed_shapes`.

    The last captured step is kept, and serves the next request of the same kind.

    capture: see `tinylm.kernels.graphs.capture`
    """

    model: Decoder
    tokenizer: Tokenizer
    capture: Callable[[Step], Step]
    reporter: Reporter = field(default_factory=LogReporter)

    def __post_init__(self) -> None:
        self._last: _Captured | None = None
        self._has_failed = False  # a capture, which takes memory that is not freed

    def suits(self, config: GenerationConfig) -> bool:
        """Whether a graph is possible, and worth the capture. Log-probabilities and JSON need the logits on the CPU."""
        needs_logits = bool(config.logprobs) or config.json_schema is not None
        is_worth_it = config.max_tokens >= MIN_TOKENS and config.num_samples <= MAX_ROWS
        return is_worth_it and config.cache and not needs_logits and not self._has_failed

    def generate(
        self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, first_stream: int
    ) -> Generator[Token]:
        texts, context, left = [list(prompt.start) for prompt in prompts], self.model.context, config.max_tokens
        captured = self._take_captured(texts, config)
        step = captured.step
        step.sampler.start(config.seed, first_stream)
        try:
            while left:
                # The first token of a window, from all its tokens
                windows = [window(text, context, self.tokenizer.start_id) for text in texts]
                step.sampler.see(windows)
                step.prefill(*left_padded(windows))

                # The others, up to the one before which a window advances
                count = _tokens_in_window(texts, context, left)
                for ids in captured.tokens(count):
                    for text, token in zip(texts, ids, strict=True):
                        text.append(token)
                    yield from map(Token, range(len(ids)), ids)
                left -= count
        finally:
            self._last = None if self._has_failed else captured

    def _take_captured(self, texts: Sequence[Sequence[int]], config: GenerationConfig) -> "_Captured":
        """The last captured step if it serves these texts, else a new one.

        Until it is given back, a request at the same time captures one of its own.
        """
        needed = min(self.model.context, max(map(len, texts)) + config.max_tokens)
        slots = MIN_SLOTS
        while slots < needed:
            slots *= 2
        sampling = config.sampling(DEFAULT_TEMPERATURE)
        scales = tuple(layer.adapter_scale for layer in adapter_layers(self.model).values())  # constants of a graph
        kind = len(texts), slots, sampling, scales
        last, self._last = self._last, None
        if last is not None and last.kind == kind:
            return last
        del last  # frees its caches
        with torch.inference_mode(False):  # otherwise, its tensors could be changed in this mode only
            sampler = Sampler(sampling, len(texts), self.tokenizer.vocab_size, self.model.device)
            step = DecodingStep(self.model, sampler, len(texts), slots)
        try:
            return _Captured(kind, step, self.capture(step))
        except RuntimeError as error:  # of CUDA, or because memory runs out
            self.reporter.note(f"Capturing a CUDA graph failed ({first_line(error)}); continuing without it.")
            self._has_failed = True
            return _Captured(kind, step, step)


class _Captured(NamedTuple):
    """A captured step. kind: number of rows, number of slots, the sampling, and the scales of adapters."""

    kind: tuple[int, int, SamplingConfig, tuple[float, ...]]
    step: "DecodingStep"
    launch: Step

    def tokens(self, count: int) -> Iterator[list[int]]:
        """The ids of each row that the step has now, and those after each of the `count` - 1 next steps."""
        copies = deque([_copy_to_host(self.step.ids)])
        for _ in range(count - 1):
            self.step.sampler.prepare()
            self.launch()
            copies.append(_copy_to_host(self.step.ids))
            if len(copies) > AHEAD:
                yield copies.popleft()()
        while copies:
            yield copies.popleft()()


class DecodingStep:
    """One token: the model, its caches and the sampler, on tensors that stay in place.

    ids: (B, 1), the last token of each row. slot: (1,), of that token in the caches. starts: (B, 1), left padding.
    """

    def __init__(self, model: Decoder, sampler: Sampler, rows: int, slots: int) -> None:
        weight = model.embedding.weight
        self.model, self.sampler = model, sampler
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=weight.device)
        self.slot = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.starts = torch.zeros(rows, 1, dtype=torch.long, device=weight.device)
        self._filled = [
            KVCache(rows, model.n_kv_heads, slots, model.head_dim, weight.device, weight.dtype) for _ in model.windows
        ]
        for cache in self._filled:  # the product of a masked weight, 0, with an uninitialised value may be NaN
            cache.keys.zero_()
            cache.values.zero_()
        self._caches = [StaticCache(cache, self.slot) for cache in self._filled]
        self._slots = torch.arange(slots, device=weight.device)  # (S,)

    @torch.no_grad()
    def __call__(self) -> None:
        """Replace the last token of each row by the next one."""
        model, slots = self.model, self._slots
        positions = self.slot - self.starts  # (B, 1)
        allowed = (slots >= self.starts) & (slots <= self.slot)  # (B, S)
        masks = {
            window: (allowed if window is None else allowed & (slots > self.slot - window))[:, None, None]
            for window in set(model.windows)
        }  # (B, 1, 1, S) each
        x = model.embed(self.ids)  # (B, 1, D)
        hidden = model.run_layers(x, positions, [masks[window] for window in model.windows], self._caches).hidden
        self.ids.copy_(self.sampler.sample(model.logits(hidden[:, -1])))
        self.slot += 1

    def prefill(self, ids: Tensor, padding: Tensor | None) -> None:
        """Fill the caches with the tokens that `left_padded` returns, and choose the first token after them.

        Raises TinyLMError for logits that are not finite.
        """
        device = self.ids.device
        starts = None if padding is None else padding.to(device)
        for cache in self._filled:
            cache.offset, cache.starts = 0, starts
        logits = self.model.last_logits(ids, self._filled)
        require_finite(logits[:, : self.sampler.vocab_size])
        self.sampler.prepare()
        with torch.no_grad():
            self.ids.copy_(self.sampler.sample(logits.expand(len(self.ids), -1)))
        self.slot.fill_(ids.shape[1])
        self.starts.copy_(torch.zeros_like(self.starts) if starts is None else starts[:, None])


def _tokens_in_window(texts: Sequence[Sequence[int]], context: int, limit: int) -> int:
    """The number of tokens, from 1 to `limit`, that each text can get before the window of one advances."""
    starts = [window_start(len(text), context) for text in texts]

    def advances(tokens: int) -> bool:
        return any(
            window_start(len(text) + tokens, context) != start for text, start in zip(texts, starts, strict=True)
        )

    return next((tokens for tokens in range(1, limit) if advances(tokens)), limit)


def _copy_to_host(ids: Tensor) -> Callable[[], list[int]]:
    """Begin to copy the ids (B, 1). The result waits for the copy, and returns them."""
    if ids.device.type == "cpu":
        return ids.flatten().clone().tolist
    copied = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    copied.copy_(ids, non_blocking=True)
    event = torch.cuda.current_stream().record_event()

    def read() -> list[int]:
        event.synchronize()
        return copied.flatten().tolist()

    return read
