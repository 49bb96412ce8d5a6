"""`Batch`, for all objectives; windows of a text, with masked tokens or without, and examples in random order.

Also the thread that makes the next batch while a GPU computes a step.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.token_files import Tokens


@dataclass(frozen=True)
class Batch:
    """A batch of sequences. All tensors but `mask` and `soft` are int64.

    ids: (B, T), the input of the decoder or encoder.
    targets: (B, T), the id to predict at each position.
    mask: (B, T), bool, True for targets that count in the loss; `None` if all do.
    source, source_lengths: (B, S) and (B,), the sources of pairs and their lengths without padding.
    segments: (B, T), if several texts share a row: the number of each token's text, from 1; 0 for padding.
    lengths: (B,), if rows are padded to the right: the number of tokens of each row without padding.
    soft_ids, soft: (B, T, K), ids that may follow at each position, and their probabilities by a teacher, in fp32.
    """

    ids: Tensor
    targets: Tensor
    mask: Tensor | None = None
    source: Tensor | None = None
    source_lengths: Tensor | None = None
    segments: Tensor | None = None
    lengths: Tensor | None = None
    soft_ids: Tensor | None = None
    soft: Tensor | None = None

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def n_targets(self) -> int:
        """Number of targets that count in the loss."""
        return self.targets.numel() if self.mask is None else int(self.mask.sum())

    @property
    def targets_per_text(self) -> np.ndarray:
        """Number of targets that count in the loss, per row, (B,), or per text where texts share a row, (N,)."""
        if self.mask is None:
            return np.full(len(self), self.targets.shape[1])
        if self.segments is None:
            return self.mask.sum(dim=1).numpy()
        rows = zip(self.mask, self.segments, strict=True)
        return np.concatenate([np.bincount(row[mask], minlength=int(row.max()) + 1)[1:] for mask, row in rows])

    @property
    def n_tokens(self) -> int:
        """Number of tokens, without padding but with the sources."""
        if self.segments is not None:
            return int((self.segments > 0).sum())
        if self.lengths is not None:
            return int(self.lengths.sum())
        if self.source_lengths is None:
            return self.ids.numel()
        return self.n_targets + int(self.source_lengths.sum())

    def split(self, rows: int) -> Iterator["Batch"]:
        """Yield micro-batches of at most `rows` sequences."""
        for start in range(0, len(self), rows):
            part = slice(start, start + rows)
            # mypy infers no type for a lambda with a default.
            yield self._map(lambda tensor, part=part: tensor[part])  # type: ignore[misc]

    def split_windows(self, parts: int) -> "Batch":
        """Windows of a text as `parts` rows each: all tensors (B, T, ...) -> (B * parts, T / parts, ...)."""
        if parts == 1:
            return self
        length, rest = divmod(self.ids.shape[1], parts)
        assert rest == 0  # by check_sequence_growth
        return self._map(lambda tensor: tensor.reshape(len(self) * parts, length, *tensor.shape[2:]))

    def every(self, step: int, first: int) -> "Batch":
        """The sequences number `first`, `first + step`, and so on, contiguous in memory; may be empty."""
        return self._map(lambda tensor: tensor[first::step].contiguous())

    def to(self, device: torch.device) -> "Batch":
        """The batch with all its tensors on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def pin_memory(self) -> "Batch":
        """The batch in page-locked memory, from which copies to a GPU are asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = [getattr(self, field.name) for field in fields(self)]
        # Fields that cannot be `None` have a tensor here.
        return type(self)(*(None if tensor is None else function(tensor) for tensor in tensors))  # type: ignore[arg-type]


T = TypeVar("T")

FEW_WINDOWS = 100  # fewer go round the text: the tokens outside of windows within it would be a part that is missed


class Windows:
    """Training batches of windows of `context` tokens that do not overlap.

    Each epoch starts at a random offset and has every window once, in random order. A text of few windows is a ring,
    which `end_id` closes: windows begin everywhere and have every token, and the text follows its end-of-text token.
    Batch number n depends only on the seed and n, so a resumed run continues with the same batches. The order takes
    four bytes per window (decision 027). Raises TinyLMError for fewer than `context` + 1 tokens.

    tokens: the text, or that ring, which goes on behind its end by `context` tokens
    """

    def __init__(self, tokens: Tokens, context: int, batch_size: int, seed: int, end_id: int) -> None:
        if len(tokens) <= context:
            raise TinyLMError(
                f"{len(tokens)} tokens are too few for a window of {context} and the token after it; give more text."
            )
        self.tokens = tokens
        self._context = context
        self._batch_size = batch_size
        self._seed = seed
        windows = (len(tokens) - 1) // context
        self._ring = len(tokens) + 1 if windows < FEW_WINDOWS else None  # its length
        if self._ring is None:
            self.windows_per_epoch = windows - 1  # one fewer than would fit, to leave room for the offset
        else:
            self.windows_per_epoch = math.ceil(self._ring / context)  # of which two may overlap
            self.tokens = np.resize(np.append(tokens[: len(tokens)].astype(np.int64), end_id), self._ring + context)
        self._epoch = functools.lru_cache(maxsize=1)(self._epoch_order)

    def batch(self, number: int) -> Batch:
        """Batch number `number`: ids and targets of (batch_size, context)."""
        return windows_at(self.tokens, self.starts(number), self._context)

    def starts(self, number: int) -> np.ndarray:
        """The positions in `tokens` of the windows of batch number `number`, (batch_size,)."""
        first, stop = number * self._batch_size, (number + 1) * self._batch_size
        starts = []
        while first < stop:  # a batch may contain the end of an epoch, or several epochs
            epoch, position = divmod(first, self.windows_per_epoch)
            count = min(stop - first, self.windows_per_epoch - position)
            offset, order = self._epoch(epoch)
            starts.append(offset + order[position : position + count].astype(np.int64) * self._context)
            first += count
        rows = np.concatenate(starts)
        return rows if self._ring is None else rows % self._ring

    def _epoch_order(self, epoch: int) -> tuple[int, np.ndarray]:
        """The index of the first token of an epoch, and the order of its windows, (windows_per_epoch,)."""
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        offset = int(rng.integers(0, self._context + 1 if self._ring is None else self._ring))
        order = np.arange(self.windows_per_epoch, dtype=np.min_scalar_type(self.windows_per_epoch))
        rng.shuffle(order)
        return offset, order


def evaluation_batches(
    tokens: Tokens, context: int, batch_size: int, stride: int | None = None, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield batches of windows in which every token of `tokens` (N,) but the first counts in the loss exactly once.

    Windows of `context` tokens, the last ones shorter, start every `stride` tokens. `stride` is at most `context`, and
    by default `context`, so that windows do not overlap. The mask excludes targets that an earlier window scores. With
    `max_tokens`, yields a fixed selection of evenly spaced windows with about that many scored targets in total.
    """
    stride = stride or context
    n_targets = len(tokens) - 1
    starts: Sequence[int] | np.ndarray = range(0, max(n_targets - (context - stride), 1), stride)
    if max_tokens is not None and max_tokens < n_targets:
        starts = stride * np.linspace(0, len(starts) - 1, max(1, max_tokens // stride)).astype(int)
    full = bisect.bisect_right(starts, n_targets - context)  # number of full windows
    groups = (np.array(starts[first : min(first + batch_size, full)]) for first in range(0, full, batch_size))
    for rows in itertools.chain(groups, (np.array([start]) for start in starts[full:])):
        batch = windows_at(tokens, rows, min(context, n_targets - int(rows[0])))
        if stride < context:  # the previous window scores the first targets, unless there is none
            mask = torch.ones(batch.targets.shape, dtype=torch.bool)
            mask[torch.from_numpy(rows > 0), : context - stride] = False
            batch = replace(batch, mask=mask)
        yield batch


def windows_at(tokens: Tokens, starts: np.ndarray, context: int) -> Batch:
    """A batch of windows, (B, context), at the positions `starts`, (B,), with the next tokens as targets."""
    rows = np.stack([tokens[start : start + context + 1] for start in starts]).astype(np.int64)  # (B, T + 1)
    ids = torch.from_numpy(rows)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


MERGE_ROUNDS = 3  # of `undo_merges`: a token is replaced by up to eight parts


def undo_merges(batch: Batch, merges: Tensor, rate: float) -> Batch:
    """Replace tokens of a text, at random, by the two tokens that BPE merged into them, and these parts again.

    This is BPE-dropout (Provilkov et al. 2020) on encoded text. Each row has a probability of its own, uniform from 0
    to 2 * rate. Rows keep their length: at their ends, tokens that no longer fit are left out.

    merges: (V, 2), as `Tokenizer.merges`
    """
    ids = torch.cat([batch.ids, batch.targets[:, -1:]], dim=1)  # (B, T + 1)
    rows, length = ids.shape
    probability = 2 * rate * torch.rand(rows, 1, device=ids.device)
    is_candidate = torch.ones_like(ids, dtype=torch.bool)  # a part that the last round has made, or at first any token
    for _ in range(MERGE_ROUNDS):
        left, right = merges[ids].unbind(-1)  # (B, T + 1)
        drawn = torch.rand(rows, length, device=ids.device) < probability
        undone = drawn & is_candidate & (left >= 0)
        last = torch.cumsum(1 + undone.long(), dim=1) - 1  # where a token or its right part goes
        first = last - undone.long()
        longer = ids.new_zeros(rows, 2 * length)
        longer.scatter_(1, first, torch.where(undone, left, ids)).scatter_(1, last, torch.where(undone, right, ids))
        made = torch.zeros_like(longer, dtype=torch.bool)
        made.scatter_(1, first, undone).scatter_(1, last, undone)
        ids, is_candidate = longer[:, :length], made[:, :length]
    return replace(batch, ids=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous())


POOL_BATCHES = 50  # batches whose examples are sorted by length together


class ShuffledBatches:
    """Training batches in which each epoch has every example once. Batch number n depends only on the seed and n.

    examples: (M,), indices of examples. make_batch: makes a batch of the examples with given indices.
    sort_keys: (K, N), lengths by the index of an example, the last row being the primary key (np.lexsort). For batches
        with little padding, the examples are sorted by them within pools of POOL_BATCHES batches, and the batches are
        shuffled. With `None`, examples of any lengths share a batch.
    """

    def __init__(
        self,
        examples: np.ndarray,
        make_batch: Callable[[np.ndarray], Batch],
        batch_size: int,
        seed: int,
        sort_keys: np.ndarray | None,
    ) -> None:
        self._examples = examples
        self._make_batch = make_batch
        self._batch_size = batch_size
        self._seed = seed
        self._sort_keys = sort_keys
        self.batches_per_epoch = -(-len(examples) // batch_size)
        self._epoch = functools.lru_cache(maxsize=1)(self._shuffled)

    def batch(self, number: int) -> Batch:
        """Batch number `number`: at most `batch_size` examples."""
        epoch, position = divmod(number, self.batches_per_epoch)
        return self._make_batch(self._epoch(epoch)[position])

    def _shuffled(self, epoch: int) -> list[np.ndarray]:
        """The examples of each batch of an epoch."""
        rng = np.random.Generator(np.random.PCG64([self._seed, epoch]))
        order = rng.permutation(self._examples)
        if self._sort_keys is None:
            return _split(order, self._batch_size)
        batches: list[np.ndarray] = []
        for pool in _split(order, POOL_BATCHES * self._batch_size):
            batches += _split(pool[np.lexsort(self._sort_keys[:, pool])], self._batch_size)
        return [batches[i] for i in rng.permutation(len(batches))]


def _split(examples: np.ndarray, size: int) -> list[np.ndarray]:
    return [examples[start : start + size] for start in range(0, len(examples), size)]


def prefetch(
    batch: Callable[[int], Batch], device: torch.device, ranks: Ranks = ONE_RANK
) -> Callable[[int], tuple[Batch, Batch]]:
    """A function that returns the batch with a given number, and the part of it that this rank computes.

    For a CUDA device, the part is in pinned memory, and a thread makes the next batch while a step is computed. An
    error of batch n is raised by the call for n.
    """

    def load(number: int) -> tuple[Batch, Batch]:
        whole = batch(number)
        part = ranks.part(whole)
        return whole, part.pin_memory() if device.type == "cuda" else part

    return load_ahead(load) if device.type == "cuda" else load


def load_ahead(load: Callable[[int], T]) -> Callable[[int], T]:
    """A function that returns `load(number)`, and calls `load(number + 1)` in a thread for the next call."""
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches")
    loaded: dict[int, Future[T]] = {}

    def call(number: int) -> T:
        nonlocal loaded
        loaded = {n: loaded.get(n) or thread.submit(load, n) for n in (number, number + 1)}
        return loaded[number].result()

    return call
