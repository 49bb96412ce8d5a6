"""The choice of a draft model: n-grams of the training text, or none."""

from pathlib import Path

from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.generation_config import GenerationConfig, SpeedConfig
from tinylm.generation.speculative import DraftModel, NGramDraft, is_worth_drafting, speculation_obstacle
from tinylm.model.decoder import Decoder
from tinylm.run_config import DataConfig
from tinylm.text.run_tokens import has_tokens, reopen_ids
from tinylm.text.tokenizer import Tokenizer


class NGramDrafts:
    """The n-gram models of the training texts of a model and its adapters, each built at first use."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        """path: the run that the encoded texts belong to."""
        self._path, self._tokenizer = path, tokenizer
        self._drafts: dict[DataConfig, NGramDraft] = {}

    def choose(
        self, decoder: Decoder, data: DataConfig | None, config: GenerationConfig, speed: SpeedConfig
    ) -> DraftModel | None:
        """The n-gram model of the training text `data`, or `None` to generate without draft tokens.

        With auto, the model is used where speculative decoding is possible and saves time. With ngram, raises
        UsageError where it is not possible.
        """
        if speed.draft == "none" or (speed.draft == "auto" and not self._saves_time(data, config.max_tokens)):
            return None
        obstacle = speculation_obstacle(decoder, config.num_samples, speed.cache)
        if obstacle is None and data is None:
            obstacle = "the model has no training text of its own"
        if obstacle is None:
            assert data is not None
            try:
                return self._draft(data)
            except TinyLMError as error:
                obstacle = str(error).removesuffix(".")
        if speed.draft == "ngram":
            raise UsageError(f'`draft="ngram"` is not possible: {obstacle}; leave it out.')
        return None

    def _saves_time(self, data: DataConfig | None, max_tokens: int) -> bool:
        if data is None or not has_tokens(self._path, data, self._tokenizer):
            return False
        return data in self._drafts or is_worth_drafting(max_tokens, data.train_tokens)

    def _draft(self, data: DataConfig) -> NGramDraft:
        """The n-gram model of `data`. Raises TinyLMError if the encoded text cannot be read."""
        if data not in self._drafts:
            # Damaged tokens only lead to rejected draft tokens, so their hash need not be computed again.
            tokens = reopen_ids(self._path, data, self._tokenizer, "train", trust_mtime=True)
            self._drafts[data] = NGramDraft(tokens)
        return self._drafts[data]
