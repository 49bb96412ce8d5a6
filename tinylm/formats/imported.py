"""A model that is imported from the format of another tool, or exported to one."""

import collections
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from tinylm.model_config import ModelConfig
from tinylm.run_config import SpecialTokens


@dataclass(frozen=True)
class ForeignModel:
    """A model that was opened from the format of another tool, or is exported to one.

    family: name of its model family, as in `FAMILIES`; `None` for a model of tinylm that is exported.
    tensors: by tinylm's names, in their own dtypes; mapped from the file or converted when they are looked up.
    tokenizer: validated content of a tokenizer.json. Its ids may be fewer than the rows of the embedding.
    chat_template: Jinja source, not yet checked; `None` without one.
    dtypes: names of the dtypes in the file, by decreasing number of elements; empty for a model of tinylm.
    """

    family: str | None
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    tokenizer: str
    special: SpecialTokens
    chat_template: str | None
    dtypes: tuple[str, ...] = ()


def rank_dtypes(numbers: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    """Names of dtypes by decreasing total number of elements. numbers: pairs of a name and a number of elements."""
    counts: collections.Counter[str] = collections.Counter()
    for name, count in numbers:
        counts[name] += count
    return tuple(name for name, _ in counts.most_common())
