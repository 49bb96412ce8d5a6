"""How much of its training text a decoder repeats: verbatim matches of its samples and continuations with that text.

Continuations of held-out text and held-out text itself are the controls.
"""

import contextlib
import dataclasses
import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tinylm.config.validation import require
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import MemorisationConfig
from tinylm.evaluation.result import ratio_interval
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import EncodedPrompt, start_tokens
from tinylm.jobs.evaluated_text import opened_corpus
from tinylm.jobs.reading import ModelReader
from tinylm.jobs.run_tokens import reopen_ids
from tinylm.models.model import Model
from tinylm.reporter import Reporter
from tinylm.text.corpus import Stream
from tinylm.text.decoding import decoded_stream
from tinylm.text.file_selection import TextSource
from tinylm.text.files import Progress, no_progress
from tinylm.transformer.architectures import Decoder

ROWS = 64  # texts generated as one batch
SPARE = 1.5  # generated texts may have so many times as many tokens per character as passages
REPORTED_MATCHES = 3
MAX_COMPARISONS = 1000  # of a window of the samples with windows of the training text
SAMPLES, AFTER_TRAINING, AFTER_HELD_OUT, HELD_OUT = (
    "samples",
    "continuations of training text",
    "continuations of held-out text",
    "held-out text",
)


class Documents(NamedTuple):
    """A long text.

    open: returns the text as a stream, and calls its argument with the progress of reading, in `unit`s
    size: number of units; `None` if unknown
    unit: plural noun, such as bytes
    """

    open: Callable[[Progress], Stream]
    size: int | None
    unit: str


@dataclass(frozen=True)
class Match:
    """A verbatim match: `text`, with its number of `characters`, is a part of the text with index `sample`."""

    sample: int
    characters: int
    text: str


@dataclass(frozen=True, kw_only=True)
class CopiedText:
    """The copied part of the texts of one source.

    source: SAMPLES, AFTER_TRAINING, AFTER_HELD_OUT or HELD_OUT.
    samples, characters: number of the source's texts, and their total length.
    copied: share of the characters in verbatim matches with the training text. copied_low, copied_high: its 95 %
        confidence interval by bootstrap of the texts; `None` for fewer than 10 texts that are not empty.
    longest: length of the longest match in characters; 0 for none.
    matches: of the longest match of each text, the REPORTED_MATCHES longest.
    """

    source: str
    samples: int
    characters: int
    copied: float
    copied_low: float | None
    copied_high: float | None
    longest: int
    matches: tuple[Match, ...]


@dataclass(frozen=True, kw_only=True)
class Memorisation:
    """The result of a memorisation test.

    min_match: least length of a match in characters. sources: the results by source of the texts.
    """

    min_match: int
    sources: tuple[CopiedText, ...]

    def to_json(self) -> list[dict[str, Any]]:
        """One object per source, with `min_match`."""
        return [{**dataclasses.asdict(source), "min_match": self.min_match} for source in self.sources]


def measure_memorisation(
    model: Model,
    held_out: TextSource | None = None,
    training: TextSource | None = None,
    config: MemorisationConfig | None = None,
) -> Memorisation:
    """Compare samples of a decoder, and its continuations of training text and of held-out text, with the training
    text, and as a control also the true continuations of the held-out passages.

    held_out: text that the model was not trained on. Default: the validation text of its run.
    training: the text that the model was trained on; needs `held_out`. Default: the training text of its run, as
        encoded in the user's cache or in the run. The paths that a run recorded are not opened, since an untrusted run
        could name any file.

    Raises UsageError for a model that is not a decoder and for a text that is missing, cannot be used or has no
    document of `prefix_length` + `min_match` characters, and TinyLMError for damaged data.
    """
    config = config or MemorisationConfig()
    require(
        config.min_match <= config.sample_length,
        f"`min_match` is {config.min_match}; it must be at most `sample_length`, {config.sample_length}.",
    )
    require(
        isinstance(model.network, Decoder),
        f"Memorisation is measured for decoders; {model.path} is an {model.architecture}.",
    )
    if training is not None and held_out is None:
        raise UsageError("`train_data` needs a held-out text beside it; name one.")
    if held_out is None and model.data is not None and model.data.val_fingerprint == model.data.fingerprint:
        raise UsageError(f"{model.path} was validated on its training text; name a held-out text.")
    with _documents(model, training, "train") as training_text, _documents(model, held_out, "val") as held_out_text:
        trained, unseen = (
            _passages(text, name, config, model.reporter)
            for name, text in (("training", training_text), ("held-out", held_out_text))
        )
        prefixes = [[""] * config.num_samples, *([prefix for prefix, _ in part] for part in (trained, unseen))]
        with model.reporter.counting("sampling", sum(map(len, prefixes)), "texts") as advance:
            samples = _continue(model, [prefix for group in prefixes for prefix in group], config, advance)
        ends = itertools.accumulate(map(len, prefixes))
        texts = {
            source: samples[end - len(group) : end]
            for source, group, end in zip((SAMPLES, AFTER_TRAINING, AFTER_HELD_OUT), prefixes, ends, strict=True)
        }
        texts[HELD_OUT] = [continuation for _, continuation in unseen]
        with model.reporter.counting("searching", training_text.size, training_text.unit) as advance:
            return measure_copied(texts, training_text, config.min_match, advance)


def _passages(documents: Documents, name: str, config: MemorisationConfig, reporter: Reporter) -> list[tuple[str, str]]:
    with reporter.counting(f"reading {name} text", documents.size, documents.unit) as advance:
        passages = draw_passages(documents, config, advance)
    if not passages:
        least = config.prefix_length + config.min_match
        raise UsageError(f"The {name} text has no document of at least {least} characters; give a longer text.")
    return passages


def _continue(model: Model, prefixes: Sequence[str], config: MemorisationConfig, progress: Progress) -> list[str]:
    """One continuation of each prefix, of at most `sample_length` characters. Continuation i has the random stream
    (seed, i). Characters of a prefix that are not in the vocabulary are skipped.
    """
    texts = [""] * len(prefixes)
    most = 1.0 if model.tokenizer.kind == "char" else max(1.0, SPARE * _tokens_per_character(model, prefixes))
    max_tokens = math.ceil(config.sample_length * most)
    for first in range(0, len(prefixes), ROWS):
        prompts = [_encode(model, prefix) for prefix in prefixes[first : first + ROWS]]
        generation = GenerationConfig(
            max_tokens=max_tokens, num_samples=len(prompts), temperature=config.temperature, seed=config.seed
        )
        for row, text in model.continue_each(prompts, generation, first):
            texts[first + row] += text
            if all(len(text) >= config.sample_length for text in texts[first : first + ROWS]):
                break
        progress(len(prompts))
    return [text[: config.sample_length] for text in texts]


def _tokens_per_character(model: Model, texts: Sequence[str]) -> float:
    """The most tokens per character that any of the texts has; 0 without a text."""
    known = [_known(model, text) for text in texts]
    return max((len(model.encode(text)) / len(text) for text in known if text), default=0.0)


def _known(model: Model, text: str) -> str:
    return text.translate(dict.fromkeys(map(ord, model.tokenizer.unknown_characters(text))))


def _encode(model: Model, prefix: str) -> EncodedPrompt:
    known = _known(model, prefix)
    ids = model.encode(known)[-model.context :] if known else []
    return EncodedPrompt(known, ids, start_tokens(model.tokenizer, model.data, ids, model.context))


@contextlib.contextmanager
def _documents(model: Model, source: TextSource | None, part: str) -> Iterator[Documents]:
    """Context manager that opens the documents of a source, by default the part "train" or "val" of the model's run."""
    if source is not None:
        with opened_corpus(source, ModelReader(), model.reporter) as corpus:
            yield Documents(corpus.stream, corpus.size, "bytes")
        return
    if model.data is None:
        missing = "training text; name it with `train_data`" if part == "train" else "held-out text; name one"
        raise UsageError(f"{model.path} has no recorded {missing}.")
    if not model.data.is_plain_text:
        raise UsageError(f"{model.path} was trained on {model.data.kind}; memorisation is measured for plain text.")
    ids = reopen_ids(model.path, model.data, model.tokenizer, part)

    def stream(progress: Progress) -> Stream:
        for chunk in decoded_stream(ids, model.tokenizer):
            progress(len(chunk or ""))
            yield chunk

    yield Documents(stream, None, "characters")


def draw_passages(
    documents: Documents, config: MemorisationConfig, progress: Progress = no_progress
) -> list[tuple[str, str]]:
    """Up to `num_samples` passages, drawn without replacement, in the order of the text: pairs of a prompt and the
    text that follows it.

    Each document is divided into passages of `prefix_length` + `sample_length` characters that do not overlap. The
    last may be shorter, but not below `prefix_length` + `min_match`. The text is read once
    (reservoir sampling, Vitter 1985).
    """
    size, least = config.prefix_length + config.sample_length, config.prefix_length + config.min_match
    rng = random.Random(config.seed)
    drawn: dict[int, tuple[int, str]] = {}  # by slot: number of the passage, and its text
    count = 0
    rest = ""
    for chunk in _with_end(documents.open(progress)):
        rest += chunk or ""
        stop = len(rest) - (len(rest) % size if chunk is not None else 0)
        for at in range(0, stop, size):
            if min(size, len(rest) - at) < least:
                break
            slot = count if count < config.num_samples else rng.randrange(count + 1)
            if slot < config.num_samples:
                drawn[slot] = count, rest[at : at + size]
            count += 1
        rest = rest[stop:]
    passages = [text for _, text in sorted(drawn.values())]
    return [(text[: config.prefix_length], text[config.prefix_length :]) for text in passages]


def _with_end(stream: Any) -> Any:
    yield from stream
    yield None


class Matches(NamedTuple):
    """The verbatim matches of texts with a long one.

    copied: (N,), number of characters of each text that are in matches
    longest: the longest match of each text that has one, in descending order of length
    """

    copied: np.ndarray
    longest: tuple[Match, ...]


def find_matches(
    texts: Sequence[str],
    documents: Documents,
    k: int,
    progress: Progress = no_progress,
    max_comparisons: int = MAX_COMPARISONS,
) -> Matches:
    """Find the verbatim matches of at least k characters between texts and documents, each within a document.

    The documents are read once and not indexed: a match of k characters contains a window that begins at a multiple of
    `step` in its document, and these windows are looked up among those of the texts.

    The number of copied characters is exact. After `max_comparisons` matches of a window, those within a part that is
    known to be copied are not measured, so the longest match of a very repetitive text may be missed.
    """
    step = max(1, k // 2)
    width = k - step + 1  # of a window
    windows: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for sample, text in enumerate(texts):
        for at in range(len(text) - width + 1):
            windows[text[at : at + width]].append((sample, at))
    copied = [bytearray(len(text)) for text in texts]
    longest: dict[int, Match] = {}
    compared: Counter[str] = Counter()
    for document, place in _places(documents.open(progress), step, max(map(len, texts), default=0)):
        window = document[place : place + width]
        for sample, at in windows.get(window, ()):
            reach = slice(max(0, at + width - k), at + k)  # of a match of k characters around the window
            if compared[window] >= max_comparisons and all(copied[sample][reach]):
                continue
            compared[window] += 1
            text, shift = texts[sample], place - at
            begin, end = at, at + width
            while begin and begin + shift and text[begin - 1] == document[begin + shift - 1]:
                begin -= 1
            while end < len(text) and end + shift < len(document) and text[end] == document[end + shift]:
                end += 1
            if end - begin >= k:
                copied[sample][begin:end] = b"\1" * (end - begin)
                if sample not in longest or longest[sample].characters < end - begin:
                    longest[sample] = Match(sample, end - begin, text[begin:end])
    found = sorted(longest.values(), key=lambda match: (-match.characters, match.sample))
    return Matches(np.array([sum(flags) for flags in copied], dtype=np.int64), tuple(found))


def _places(stream: Stream, step: int, context: int) -> Iterator[tuple[str, int]]:
    """Every `step`-th position of each document, in a part of it with `context` characters on both sides."""
    part, at = "", 0
    for chunk in _with_end(stream):
        part += chunk or ""
        places = range(at, len(part) - (0 if chunk is None else context), step)
        for place in places:
            yield part, place
        at += step * len(places)
        cut = len(part) if chunk is None else max(0, at - context)
        part, at = part[cut:], 0 if chunk is None else at - cut


def measure_copied(
    texts: Mapping[str, Sequence[str]], training: Documents, min_match: int, progress: Progress = no_progress
) -> Memorisation:
    """Measure the share of the characters of texts, by source, in verbatim matches of at least `min_match` characters
    with the training text.
    """
    matches = find_matches([text for group in texts.values() for text in group], training, min_match, progress)
    sources = []
    first = 0
    for source, group in texts.items():
        stop = first + len(group)
        sizes, copied = np.array([len(text) for text in group], dtype=np.int64), matches.copied[first:stop]
        longest = [
            dataclasses.replace(match, sample=match.sample - first)
            for match in matches.longest
            if first <= match.sample < stop
        ]
        interval = ratio_interval(copied, sizes)
        sources.append(
            CopiedText(
                source=source,
                samples=len(group),
                characters=int(sizes.sum()),
                copied=float(copied.sum() / max(sizes.sum(), 1)),
                copied_low=None if interval is None else interval.low,
                copied_high=None if interval is None else interval.high,
                longest=longest[0].characters if longest else 0,
                matches=tuple(longest[:REPORTED_MATCHES]),
            )
        )
        first = stop
    return Memorisation(min_match=min_match, sources=tuple(sources))
