"""The task of an encoder: predict masked tokens (Devlin et al. 2019)."""

import functools
from collections.abc import Iterator

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.jobs.masked.windows import MaskedWindows, masked_evaluation_batches
from tinylm.objectives.loss import LanguageModel, Loss, Objective, scored_loss
from tinylm.text.batches import Batch
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer


def masked_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum over the masked positions of log p(token | corrupted window) (Devlin et al. 2019)."""
    return scored_loss(model, model(batch.ids), batch, smoothing)


class MaskedToken:
    """Predict the tokens at masked positions from the corrupted window of `model.context` tokens."""

    validation_objective: Objective = staticmethod(masked_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._val = tokens.val
        self._context = model.context
        self._masking = {"mask_id": tokenizer.mask_id, "vocab_size": tokenizer.vocab_size}
        self.batch = MaskedWindows(
            tokens.train, model.context, training.batch_size, training.seed, tokenizer.end_of_text_id, **self._masking
        ).batch
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def objective(self, progress: float) -> Objective:
        """As `Task.objective`."""
        return functools.partial(masked_token, smoothing=self._smoothing)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        """As `Task.validation_batches`."""
        return masked_evaluation_batches(self._val, self._context, rows, **self._masking, max_tokens=max_tokens)
