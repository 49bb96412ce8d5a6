"""Translation baselines without a neural network, to compare a model's BLEU with."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tinylm.evaluation.excerpt import first_pairs
from tinylm.evaluation.pairs import bleu_and_chrf
from tinylm.reporter import Reporter
from tinylm.text.pair_batches import PairTokens
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.tokenizer import Tokenizer

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
