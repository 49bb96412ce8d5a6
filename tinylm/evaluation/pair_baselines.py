"""Translation baselines without a neural network, to compare a model's BLEU with."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tinylm.evaluation.pairs import bleu_and_chrf
from tinylm.text.pair_batches import PairTokens
from tinylm.text.tokenizer import Tokenizer

MAX_TRAINING_PAIRS = 50_000
SOURCE_ITSELF, NEAREST_SOURCE = "source itself", "target of the nearest training source"


def baseline_bleu(tokenizer: Tokenizer, pairs: PairTokens, training: PairTokens | None) -> dict[str, float]:
    """BLEU of the targets of each baseline, by name: the source itself, and `nearest_targets` among the first
    MAX_TRAINING_PAIRS training pairs.

    training: `None` leaves out the second baseline. Without sacrebleu, the result is empty.
    """

    def texts(of: PairTokens, count: int) -> tuple[list[str], list[str]]:
        sides = ((of.source(index), of.target(index)) for index in range(count))
        decoded = [(tokenizer.decode(source), tokenizer.decode(target)) for source, target in sides]
        return [source for source, _ in decoded], [target for _, target in decoded]

    sources, references = texts(pairs, len(pairs))
    targets: Mapping[str, Sequence[str]] = {SOURCE_ITSELF: sources}
    if training is not None and len(training):
        known = texts(training, min(len(training), MAX_TRAINING_PAIRS))
        targets = {**targets, NEAREST_SOURCE: nearest_targets(sources, *known)}
    scores = {name: bleu_and_chrf(hypotheses, references)[0] for name, hypotheses in targets.items()}
    return {name: bleu for name, bleu in scores.items() if bleu is not None}


def nearest_targets(
    sources: Sequence[str], training_sources: Sequence[str], training_targets: Sequence[str]
) -> list[str]:
    """For each source, the target of the training source with the most words in common: the one with the largest Dice
    coefficient 2 |A & B| / (|A| + |B|) of the sets of words A and B, the first of equals.

    Words are separated by whitespace. There must be a training source.
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
