"""How often a decoder prefers a good sentence to a bad one: accuracy on minimal pairs, by phenomenon.

`blimp` names a sample of BLiMP (Warstadt et al. 2020, "BLiMP: The Benchmark of Linguistic Minimal Pairs for English",
https://github.com/alexwarstadt/blimp, CC BY 4.0), which comes with the package: every tenth pair of each paradigm.
"""

import io
import lzma
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinylm.config.validation import describe_value, require
from tinylm.errors import TinyLMError, UsageError
from tinylm.evaluation.loop import EVALUATION_TOKENS, evaluation_mode
from tinylm.generation.prompts import start_tokens
from tinylm.jobs.run_tokens import reopen_ids
from tinylm.machine.device import autocast
from tinylm.models.model import Model
from tinylm.objectives.loss import MAX_LOGITS
from tinylm.reporter import counted
from tinylm.system.files import open_regular
from tinylm.text.readers import parse_json_line, require_encodable
from tinylm.text.tokenizer import describe_characters
from tinylm.transformer.architectures import Decoder
from tinylm.transformer.layers import log_softmax

BLIMP, BLIMP_FILE = "blimp", Path(__file__).parent / "blimp.jsonl.xz"
OVERALL = "all"
MAX_PAIRS = 1_000_000
SAMPLE_TOKENS = 50_000  # of the training text, in which English words are counted
_WORDS = "the of and to a in that is it for was with as on be he his her not you"
FUNCTION_WORDS = frozenset(re.findall("[a-z]+", _WORDS))
MIN_SHARE = 0.15  # of these words in English prose: 0.25 to 0.35 in books, papers and plays


class MinimalPair(NamedTuple):
    """Two sentences that differ in little, of which one is good. phenomenon: what the pair tests"""

    good: str
    bad: str
    phenomenon: str


@dataclass(frozen=True)
class PairAccuracy:
    """The share of the pairs of a phenomenon in which the good sentence is more probable; ties count as wrong.

    low, high: the 95 % confidence interval of `accuracy` (Wilson 1927, "Probable inference, the law of succession, and
    statistical inference", Journal of the American Statistical Association 22)
    """

    phenomenon: str
    pairs: int
    accuracy: float
    low: float
    high: float


def read_pairs(source: str | Path) -> list[MinimalPair]:
    """The pairs of a JSONL file with `good`, `bad` and, if there are several phenomena, `phenomenon`; or of BLiMP, by
    the name `blimp`, whose sentences begin with a space, as they do in lm-eval.

    Raises UsageError for a file that cannot be read, for a line that is not a pair, and for no pairs.
    """
    is_sample = str(source) == BLIMP and not Path(source).exists()
    path = BLIMP_FILE if is_sample else Path(source)
    try:
        opened = lzma.open if is_sample else open_regular
        with opened(path) as file_bytes, io.TextIOWrapper(file_bytes, encoding="utf-8") as file:
            pairs = []
            for number, line in enumerate(file, start=1):
                require(number <= MAX_PAIRS, f"{path} has more than {MAX_PAIRS:,} lines.")
                if line.strip():
                    pairs.append(_parse_pair(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"Cannot read {path}: {reason}; give a JSONL file, or {BLIMP}.") from error
    require(bool(pairs), f"{path} has no pairs in it; write one per line.")
    return [MinimalPair(f" {good}", f" {bad}", name) for good, bad, name in pairs] if is_sample else pairs


def _parse_pair(line: str, location: str) -> MinimalPair:
    record = parse_json_line(line, location)
    values = record if isinstance(record, dict) else {}
    for key in ("good", "bad"):
        value = values.get(key)
        is_text = isinstance(value, str) and bool(value.strip())
        require(is_text, f"{location}: expected an object with texts under 'good' and 'bad'; {key!r} is missing.")
    phenomenon = values.get("phenomenon", "")
    is_name = isinstance(phenomenon, str)
    require(is_name, f"{location}: 'phenomenon' is {describe_value(phenomenon)}; it must be a text.")
    require(phenomenon != OVERALL, f"{location}: {OVERALL!r} stands for all pairs; give the phenomenon another name.")
    good, bad = (require_encodable(values[key], location) for key in ("good", "bad"))
    return MinimalPair(good, bad, phenomenon)


def measure_minimal_pairs(model: Model, pairs: Sequence[MinimalPair]) -> list[PairAccuracy]:
    """The accuracy of a decoder on all pairs, first, and on those of each phenomenon, if there are several.

    A sentence is scored as a text of its own: the sum of the log-probabilities of its tokens, after what separates
    documents in the training text. Pairs with characters that are not in the vocabulary are left out, with a warning.

    Raises UsageError for a model that is not a decoder of text, if no pairs are left, and for a sentence that is longer
    than its context.
    """
    require_scoring(model, "Minimal pairs are scored by decoders")
    pairs = _known_pairs(model, pairs)
    sentences = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    with model.reporter.counting("scoring", len(sentences), "sentences") as advance:
        scores = np.empty(len(sentences))
        for indices, found in score_sentences(model, sentences):
            scores[indices] = found
            advance(len(indices))
    correct = scores[::2] > scores[1::2]
    names = np.array([pair.phenomenon for pair in pairs])
    groups = {OVERALL: np.ones(len(pairs), dtype=bool)}
    if len(different := sorted(set(names.tolist()))) > 1:
        groups |= {name: names == name for name in different}
    return [_accuracy(name, correct[chosen]) for name, chosen in groups.items()]


def require_scoring(model: Model, needed: str) -> None:
    """Raise UsageError, which begins with what is `needed`, for a model other than a decoder of text."""
    require(isinstance(model.network, Decoder), f"{needed}; {model.path} is an {model.architecture}.")
    require(not model.labels, f"{needed} of text; {model.path} is a classifier.")


def score_sentences(
    model: Model, sentences: Sequence[str], batch_tokens: int = EVALUATION_TOKENS
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield the indices of some of the sentences, and their log-probabilities in nats. The longest come first."""
    before = start_tokens(model.tokenizer, model.data, [], model.context)
    texts = [[*before, *_encode(model, sentence, len(before))] for sentence in sentences]
    for indices, scores in score_ends(model, [(text, len(text) - len(before)) for text in texts], batch_tokens):
        yield indices, np.array([log_p for log_p, _ in scores])


def score_ends(
    model: Model, texts: Sequence[tuple[list[int], int]], batch_tokens: int = EVALUATION_TOKENS
) -> Iterator[tuple[list[int], list[tuple[float, bool]]]]:
    """Yield the indices of some of the texts, and for each of these the log-probability of its end in nats, and whether
    each token of the end is the likeliest one. The longest texts come first.

    texts: of each, the ids, which fit the context but for the last one, and the number of those at its end that are
        scored, of which the first id is none
    batch_tokens: of a forward pass, at least one text
    """
    network = model.network
    assert isinstance(network, Decoder)
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index][0]))
    while order:
        rows = max(1, batch_tokens // len(texts[order[0]][0]))
        chosen, order = order[:rows], order[rows:]
        length = len(texts[chosen[0]][0])
        padded = [texts[index][0] + [0] * (length - len(texts[index][0])) for index in chosen]
        ids = torch.tensor(padded, device=network.device)  # (B, T)
        with torch.no_grad(), evaluation_mode(network), autocast(network.device.type, model.dtype):
            scored_tokens = _score_tokens(network, network(ids[:, :-1]).hidden.flatten(0, 1), ids[:, 1:].flatten())
        found, is_likeliest = (values.view(len(chosen), length - 1) for values in scored_tokens)  # (B, T-1)
        ends = [slice(len(text) - 1 - scored, len(text) - 1) for text, scored in (texts[index] for index in chosen)]
        scores = [(float(found[row, end].sum()), bool(is_likeliest[row, end].all())) for row, end in enumerate(ends)]
        yield chosen, scores


def _score_tokens(network: Decoder, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each target in nats, and whether it is the likeliest id: (N, D), (N,) -> (N,), (N,).

    The logits are computed in chunks of at most MAX_LOGITS.
    """
    log_ps, are_likeliest = [], []
    rows = max(1, MAX_LOGITS // network.vocab_size)
    for part, wanted in zip(hidden.split(rows), targets.split(rows), strict=True):
        log_p = log_softmax(network.logits(part))  # (n, V)
        log_ps.append(log_p.gather(1, wanted[:, None]).squeeze(1))
        are_likeliest.append(log_p.argmax(dim=1) == wanted)
    return torch.cat(log_ps).cpu().double(), torch.cat(are_likeliest).cpu()


def _known_pairs(model: Model, pairs: Sequence[MinimalPair]) -> list[MinimalPair]:
    unknown = set(model.tokenizer.unknown_characters("".join(pair.good + pair.bad for pair in pairs)))
    known = [pair for pair in pairs if unknown.isdisjoint(pair.good + pair.bad)]
    if len(known) < len(pairs):
        left_out = f"{len(pairs) - len(known):,} of {counted(len(pairs), 'pair')}"
        reason = f"characters that are not in the vocabulary of {model.path}"
        message = f"{left_out} with {reason} are left out: {describe_characters(''.join(sorted(unknown)))}."
        require(bool(known), f"{message} A model with the tokenizer bpe knows every character.")
        model.reporter.warn(message)
    return known


def _encode(model: Model, sentence: str, before: int) -> list[int]:
    ids = [int(i) for i in model.tokenizer.encode(sentence)]
    fits = before + len(ids) <= model.context + 1
    require(fits, f"A sentence of {len(ids)} tokens is longer than the context of {model.path}, {model.context}.")
    return ids


def _accuracy(name: str, correct: np.ndarray) -> PairAccuracy:
    n, share = len(correct), float(correct.mean())
    z = 1.959964  # of 95 %
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return PairAccuracy(name, n, share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def reads_english(model: Model) -> bool:
    """Whether the model was trained on English prose, as far as is known: by the share of the commonest words."""
    if model.data is None or not model.data.is_plain_text:
        return True
    try:
        ids = reopen_ids(model.path, model.data, model.tokenizer, "train")
    except TinyLMError:  # the tokens are no longer there
        return True
    words = re.findall("[a-z']+", model.tokenizer.decode(ids[:SAMPLE_TOKENS].tolist()).lower())
    return bool(words) and sum(word in FUNCTION_WORDS for word in words) >= MIN_SHARE * len(words)
