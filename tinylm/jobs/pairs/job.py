"""The job of pairs, and their sizes for planning."""

from typing import Any, NamedTuple

import numpy as np

from tinylm.config.run import DataConfig, RunConfig
from tinylm.jobs.job import Job
from tinylm.jobs.pairs.corpus import PairCorpus, PairTokens
from tinylm.jobs.pairs.evaluation import baseline_bleu, evaluate_pairs, pair_excerpt
from tinylm.jobs.pairs.task import SequenceToSequence
from tinylm.jobs.pairs.translate import translate
from tinylm.planning.recipes import DropoutRule
from tinylm.planning.sizes import PARTS, Rows, Sizes, fitting_context
from tinylm.reporter import counted
from tinylm.text.corpus import Corpus
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

LABEL_SMOOTHING = 0.1  # Vaswani et al. 2017, section 5.4


class PairContexts(NamedTuple):
    """The context lengths that the training pairs and the validation pairs need, (N,) each."""

    train: np.ndarray
    val: np.ndarray

    @classmethod
    def from_tokens(cls, tokens: TokenFolder, end_of_text_id: int) -> "PairContexts":
        """The context lengths that the pairs in a token folder need. Raises TinyLMError as `PairTokens` does."""
        return cls(*(PairTokens(part, end_of_text_id).contexts for part in (tokens.train, tokens.val)))


class PairSizes(Sizes):
    """Pairs; those longer than the context are left out."""

    dropout = DropoutRule(per_epoch=1 / 500, minimum=0.04, maximum=0.3)  # decisions 008 and 040

    def __init__(self, contexts: PairContexts) -> None:
        self._contexts = contexts

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        """A context that fits nearly all pairs."""
        return fitting_context(*self._contexts)

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        """As `Sizes.check_context`. If no pair fits, the task raises an error."""
        sentences = []
        for name, part in zip(PARTS, self._contexts, strict=True):
            left_out = int((part > context).sum())
            if left_out:
                sentences.append(
                    f"{left_out:,} of {len(part):,} {name} pairs are left out: they do not fit the context of "
                    f"{context}, and the longest needs {part.max()}."
                )
        return sentences

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        """As `Sizes.rows`."""
        train = self._contexts.train
        fitting = int((train <= context).sum())
        longest = 2 * min(int(train.max()), context)  # source and target
        return Rows(fitting, data.train_tokens / data.train_pairs, longest, constant=False)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        """As `Sizes.validation_size`: about half of a pair is its target."""
        return data.val_tokens // 2, data.val_tokens

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
        """As `Sizes.settings`."""
        return {"label_smoothing": LABEL_SMOOTHING}


class PairsJob(Job):
    """An encoder-decoder predicts a target, given its source."""

    corpus = PairCorpus
    task = SequenceToSequence
    evaluate = staticmethod(evaluate_pairs)
    excerpt = staticmethod(pair_excerpt)
    baselines = staticmethod(baseline_bleu)
    compared = "bleu"
    translate = staticmethod(translate)

    def recorded(self, tokens: TokenFolder, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
        """The number of pairs for training."""
        return {"train_pairs": len(PairTokens(tokens.train, tokenizer.end_of_text_id))}

    def sizes(self, tokens: TokenFolder, tokenizer: Tokenizer) -> Sizes:
        """The context that each pair needs."""
        return PairSizes(PairContexts.from_tokens(tokens, tokenizer.end_of_text_id))

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        """The number of pairs for training."""
        return counted(data.train_pairs, "pair")


JOB = PairsJob()
