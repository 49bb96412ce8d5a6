"""The task on conversations: predict their scored tokens."""

import functools
from collections.abc import Iterator

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.jobs.chat.tokens import ChatTokens, chat_evaluation_batches, chat_rows
from tinylm.objectives.loss import Objective, next_token
from tinylm.text.batches import Batch
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer


class Chat:
    """Predict each scored token of a conversation from the tokens before it."""

    tokens_type: type[ChatTokens] = ChatTokens
    packs: bool = True  # whether conversations can share rows
    validation_objective: Objective = staticmethod(next_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._context = model.context
        self._packed = training.pack and self.packs
        train, self._val = self.tokens_type(tokens.train), self.tokens_type(tokens.val)
        for part, name in ((train, "training"), (self._val, "validation")):
            part.require_examples(model.context, name)
        rows = chat_rows(train, model.context, self._packed)
        batches = rows.training_batches(training.batch_size, training.seed)
        self.batch = batches.batch
        self.steps_per_epoch = float(batches.batches_per_epoch)

    def objective(self, progress: float) -> Objective:
        """As `Task.objective`."""
        return functools.partial(next_token, smoothing=self._smoothing)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        """As `Task.validation_batches`."""
        return chat_evaluation_batches(self._val, self._context, rows, self._packed, max_tokens)
