"""The job of pairs."""

from collections.abc import Sequence
from typing import Any

from tinylm.config.run import DataConfig
from tinylm.jobs.job import Job
from tinylm.jobs.pairs.corpus import PairCorpus, PairTokens
from tinylm.jobs.pairs.evaluation import baseline_bleu, evaluate_pairs, pair_excerpt
from tinylm.jobs.pairs.sizes import PairContexts, PairSizes
from tinylm.jobs.pairs.task import SequenceToSequence
from tinylm.jobs.pairs.translate import translate
from tinylm.planning.sizes import Sizes
from tinylm.reporter import counted
from tinylm.text.corpus import Corpus
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer


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

    def describe(self, data: DataConfig, labels: Sequence[str]) -> str:
        """The number of pairs for training."""
        return counted(data.train_pairs, "pair")


JOB = PairsJob()
