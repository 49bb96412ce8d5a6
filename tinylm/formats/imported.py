"""A model that is imported from the format of another tool, or exported to one."""

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tinylm.config.model import ModelConfig
from tinylm.config.run import SpecialTokens


@dataclass(frozen=True)
class ForeignModel:
    """A model that was opened from the format of another tool, or is to be exported to one.

    family: a key of `FAMILIES`, also for a run that was imported; `None` for other runs of tinylm.
    tensors: by tinylm's names, in their own dtypes; those of a file are mapped or converted when they are looked up.
    tokenizer: validated content of a tokenizer.json. It may have fewer ids than the embedding has rows.
    chat_template: Jinja source, not yet checked; `None` without one.
    dtypes: names of the dtypes in the file, by decreasing total number of elements; empty for a run of tinylm.
    """

    family: str | None
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    tokenizer: str
    special: SpecialTokens
    chat_template: str | None
    dtypes: tuple[str, ...] = ()


def rank_dtypes(sizes: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Names of dtypes by decreasing total number of elements. sizes: name of the dtype and elements of each tensor."""
    counts: collections.Counter[str] = collections.Counter()
    for name, count in sizes:
        counts[name] += count
    return tuple(name for name, _ in counts.most_common())
