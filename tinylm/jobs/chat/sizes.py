"""The sizes of encoded conversations, for planning."""

import numpy as np

from tinylm.config.run import DataConfig
from tinylm.jobs.chat.tokens import ChatTokens, chat_rows, worth_packing
from tinylm.planning.sizes import PARTS, Rows, Sizes, fitting_context


class ChatSizes(Sizes):
    """Conversations for training and for validation; those longer than the context are cut."""

    def __init__(self, train: ChatTokens, val: ChatTokens) -> None:
        self._train, self._val = train, val

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """The default, lengthened so that nearly all conversations fit."""
        return max(context, fitting_context(self._train.lengths - 1, self._val.lengths - 1))

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        """As `Sizes.check_context`. Raises UsageError if no token within the context counts in the loss."""
        named = list(zip(PARTS, (self._train, self._val), strict=True))
        for name, part in named:
            part.require_examples(context, name)
        return [sentence for name, part in named for sentence in part.describe_left_out(context, name)]

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        """As `Sizes.rows`."""
        packed = self._packs(context, pack)
        rows = chat_rows(self._train, context, packed)
        return Rows(len(rows), rows.n_tokens / len(rows), rows.width, constant=packed)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        """As `Sizes.validation_size`."""
        return self._val.n_scored, int(np.minimum(self._val.lengths, context).sum())

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        """Whether conversations share rows."""
        return {"pack": self._packs(context, pack)}

    def _packs(self, context: int, pack: bool | None) -> bool:
        """The user's choice, or what is faster for the context."""
        return worth_packing(self._train, context) if pack is None else bool(pack)
