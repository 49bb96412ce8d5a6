"""The job of pairs: an encoder-decoder predicts a target, given its source. Evaluated by loss and by translations."""

import copy
import functools
import importlib.util
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from tinylm.config.model import ModelConfig
from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.training import TrainingConfig
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.result import MAX_FLOPS, MAX_TOKENS, Evaluation, token_excerpt
from tinylm.jobs.job import Job, Scoring, Task
from tinylm.jobs.pairs.corpus import PairCorpus, PairTokens, pair_evaluation_batches
from tinylm.jobs.pairs.translate import SOURCES_PER_BATCH, search_targets, translate
from tinylm.machine.device import DTYPES
from tinylm.objectives.loss import LanguageModel, Loss, Objective, scored_loss, target_losses
from tinylm.planning.plan_request import PARTS, Rows, Sizes, fitting_context
from tinylm.planning.recipes import DropoutRule
from tinylm.reporter import Reporter, counted
from tinylm.text.batches import Batch
from tinylm.text.corpus import Corpus
from tinylm.text.token_files import TokenFolder, Tokens
from tinylm.text.tokenizer import Tokenizer

SACREBLEU_MISSING = "BLEU and chrF need sacrebleu: pip install sacrebleu"


def sequence_to_sequence_losses(model: LanguageModel, batch: Batch) -> Tensor:
    """-log p(target | source, targets before it) of each scored target in nats, (N,), row by row."""
    return target_losses(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch)


def evaluate_pairs(scoring: Scoring) -> Evaluation:
    """Loss and perplexity of the reference targets, with a confidence interval of the loss. For targets found by beam
    search: exact match rate and, with sacrebleu, BLEU and chrF.

    Pairs longer than the context are left out of the loss, and longer sources are cut for beam search, for which the
    weights have the number format of the loss.

    Raises UsageError if no pair fits the context, and for `bleu_tokenize` without sacrebleu.
    """
    model, tokenizer, config, reporter = scoring.model, scoring.tokenizer, scoring.config, scoring.reporter
    has_sacrebleu = _has_sacrebleu()
    if config.bleu_tokenize is not None and not has_sacrebleu:
        raise UsageError(f"{SACREBLEU_MISSING}; leave out `bleu_tokenize`, or install it.")
    pairs = PairTokens(scoring.text.codes, tokenizer.end_of_text_id)
    fitting = pairs.fitting(model.context)
    if len(fitting) < len(pairs):
        reporter.warn(
            f"{len(pairs) - len(fitting)} of {len(pairs)} pairs do not fit the model's context of {model.context}: "
            "they are left out of the loss, and sources that are longer are cut."
        )
    if not len(fitting):
        raise UsageError(f"No pair fits the model's context of {model.context} tokens; give shorter ones.")
    batches = pair_evaluation_batches(pairs, model.context, scoring.rows(int(pairs.contexts[fitting].max())))
    n_tokens = int((pairs.lengths[fitting, 1] + 1).sum())
    losses = scoring.losses(batches, sequence_to_sequence_losses, n_tokens, "tokens")
    result = losses.total

    references = [tokenizer.decode(pairs.target(index)) for index in range(len(pairs))]
    sources = [pairs.source(index)[: model.context - 1].tolist() for index in range(len(pairs))]
    converted = model if scoring.dtype == "fp32" else copy.deepcopy(model).to(DTYPES[scoring.dtype])
    # Batches of sources are assigned to the ranks in turns.
    owners = [number // SOURCES_PER_BATCH % scoring.ranks.size for number in range(len(sources))]
    own = [source for source, owner in zip(sources, owners, strict=True) if owner == scoring.ranks.launch.rank]
    found: list[str] = []
    with reporter.counting("translating", len(own), "targets") as advance:
        for target in search_targets(converted, own, tokenizer.end_of_text_id, config, model.context):
            found.append(tokenizer.decode(target.tokens))
            advance(1)
    parts = [iter(part) for part in scoring.ranks.gather(found)]
    hypotheses: list[str] = [next(parts[owner]) for owner in owners]
    bleu, chrf = bleu_and_chrf(hypotheses, references, config.bleu_tokenize or "13a")
    if not has_sacrebleu:
        reporter.note(f"{SACREBLEU_MISSING}.")
    return Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        exact_match=sum(a == b for a, b in zip(hypotheses, references, strict=True)) / len(pairs),
        bleu=bleu,
        chrf=chrf,
        tokens=result.tokens,
        pairs=len(pairs),
        **losses.shuffled_groups().interval("pairs", reporter),
    )


def bleu_and_chrf(
    hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a"
) -> tuple[float | None, float | None]:
    """sacrebleu's BLEU and chrF of hypotheses with one reference each; `None` without sacrebleu."""
    if not _has_sacrebleu():
        return None, None
    import sacrebleu

    bleu = sacrebleu.corpus_bleu(hypotheses, [references], tokenize=tokenize, force=True).score
    return bleu, sacrebleu.corpus_chrf(hypotheses, [references]).score


def _has_sacrebleu() -> bool:
    return importlib.util.find_spec("sacrebleu") is not None


MAX_TRAINING_PAIRS, MAX_TRAINING_TOKENS = 50_000, 20_000_000
SOURCE_ITSELF, NEAREST_SOURCE = "source itself", "target of the nearest training source"


def baseline_bleu(
    tokenizer: Tokenizer, tokens: np.ndarray, training: Tokens | None, reporter: Reporter
) -> dict[str, float]:
    """BLEU of each baseline, by name, on the pairs in `tokens` (N,): the source itself as translation, and
    `nearest_targets` among the first training pairs, at most MAX_TRAINING_PAIRS with MAX_TRAINING_TOKENS tokens.

    training: tokens (M,) of the training pairs; `None` leaves out the second baseline. Without sacrebleu, the result is
        empty.
    """
    end = tokenizer.end_of_text_id

    def texts(ids: np.ndarray) -> tuple[list[str], list[str]]:
        pairs = PairTokens(ids, end)
        sides = ((pairs.source(index), pairs.target(index)) for index in range(len(pairs)))
        decoded = [(tokenizer.decode(source), tokenizer.decode(target)) for source, target in sides]
        return [source for source, _ in decoded], [target for _, target in decoded]

    sources, references = texts(tokens)
    targets: Mapping[str, Sequence[str]] = {SOURCE_ITSELF: sources}
    known = None if training is None else texts(first_pairs(training, end, MAX_TRAINING_PAIRS, MAX_TRAINING_TOKENS))
    if known is not None and known[0]:
        targets = {**targets, NEAREST_SOURCE: nearest_targets(sources, *known)}
    scores = {name: bleu_and_chrf(hypotheses, references)[0] for name, hypotheses in targets.items()}
    return {name: bleu for name, bleu in scores.items() if bleu is not None}


def nearest_targets(
    sources: Sequence[str], training_sources: Sequence[str], training_targets: Sequence[str]
) -> list[str]:
    """For each source, the target of the training source with the largest Dice coefficient 2 |A & B| / (|A| + |B|) of
    their sets of words A and B; of several, the first.

    Words are separated by whitespace. There must be at least one training source.
    """
    postings: defaultdict[str, list[int]] = defaultdict(list)
    sizes = np.zeros(len(training_sources))
    for index, source in enumerate(training_sources):
        words = set(source.split())
        sizes[index] = len(words)
        for word in words:
            postings[word].append(index)
    nearest = []
    for source in sources:
        words = set(source.split())
        shared = np.zeros(len(training_sources))
        for word in words & postings.keys():
            shared[postings[word]] += 1
        nearest.append(training_targets[int(np.argmax(2 * shared / np.maximum(sizes + len(words), 1)))])
    return nearest


MAX_PAIRS, MIN_PAIRS = 200, 20


def pair_excerpt(tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
    """The tokens of the first pairs, (N,): as many pairs as a model with this number of parameters translates with
    about MAX_FLOPS operations, from MIN_PAIRS to MAX_PAIRS, but at most MAX_TOKENS tokens.
    """
    end = tokenizer.end_of_text_id
    beginning = token_excerpt(tokenizer, tokens, parameters)
    tokens_per_pair = 2 * len(beginning) / max(1, int((beginning == end).sum()))
    flops = 2 * parameters * EvaluationConfig.beams * tokens_per_pair
    return first_pairs(tokens, end, int(min(MAX_PAIRS, max(MIN_PAIRS, MAX_FLOPS / flops))), MAX_TOKENS)


def first_pairs(tokens: Tokens, end_of_text_id: int, count: int, limit: int) -> np.ndarray:
    """The tokens of the first pairs: at most `count` whole pairs and `limit` tokens.

    Each source and target ends with the end-of-text id, unless the last one of `tokens` has none.
    """
    ids = np.asarray(tokens[:limit])
    ends = np.flatnonzero(ids == end_of_text_id)
    if len(tokens) <= limit and len(ends) < 2 * count:
        return ids
    whole = min(count, len(ends) // 2)
    return ids[: int(ends[2 * whole - 1]) + 1 if whole else 0]


LABEL_SMOOTHING = 0.1  # Vaswani et al. 2017, section 5.4


def sequence_to_sequence(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum log p(target | source, targets before it) over the scored targets, with teacher forcing."""
    return scored_loss(model, model(batch.ids, batch.source, batch.source_lengths, batch.mask), batch, smoothing)


class SequenceToSequence(Task):
    """Predict each token of a target from the source and the target tokens before it."""

    validation_objective: Objective = staticmethod(sequence_to_sequence)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing = training.label_smoothing
        self._context = model.context
        self._val = PairTokens(tokens.val, tokenizer.end_of_text_id)
        train = PairTokens(tokens.train, tokenizer.end_of_text_id)
        for part, pairs in (("training", train), ("validation", self._val)):
            if not len(pairs.fitting(model.context)):
                raise UsageError(
                    f"No {part} pair fits the context of {model.context} tokens; the shortest needs "
                    f"{pairs.contexts.min()}."
                )
        self._batches = train.training_batches(model.context, training.batch_size, training.seed)
        self.steps_per_epoch = float(self._batches.batches_per_epoch)

    def objective(self, progress: float) -> Objective:
        return functools.partial(sequence_to_sequence, smoothing=self._smoothing)

    def batch(self, number: int) -> Batch:
        return self._batches.batch(number)

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        return pair_evaluation_batches(self._val, self._context, rows, max_tokens)


class PairSizes(Sizes):
    """Pairs; those longer than the context are left out.

    train, val: (N,) and (M,), the context that each pair needs.
    """

    dropout = DropoutRule(per_epoch=1 / 500, minimum=0.04, maximum=0.3)  # decisions 008 and 040

    def __init__(self, train: np.ndarray, val: np.ndarray) -> None:
        self._train, self._val = train, val

    def choose_context(self, data: DataConfig, context: int, notices: list[str]) -> int:
        return fitting_context(self._train, self._val)

    def check_context(self, data: DataConfig, context: int, *, is_new: bool) -> list[str]:
        sentences = []
        for name, part in zip(PARTS, (self._train, self._val), strict=True):
            left_out = int((part > context).sum())
            if left_out:
                sentences.append(
                    f"{left_out:,} of {len(part):,} {name} pairs are left out: they do not fit the context of "
                    f"{context}, and the longest needs {part.max()}."
                )
        return sentences

    def rows(self, data: DataConfig, context: int, pack: bool | None) -> Rows:
        fitting = int((self._train <= context).sum())
        longest = 2 * min(int(self._train.max()), context)  # source and target
        return Rows(fitting, data.train_tokens / data.train_pairs, longest, constant=False)

    def validation_size(self, data: DataConfig, context: int) -> tuple[int, int]:
        return data.val_tokens // 2, data.val_tokens  # about half of a pair is its target

    def settings(self, context: int, pack: bool | None) -> dict[str, float | bool]:
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
        return PairSizes(*(PairTokens(part, tokenizer.end_of_text_id).contexts for part in (tokens.train, tokens.val)))

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        return counted(data.train_pairs, "pair")


JOB = PairsJob()
