"""How much of its training text a trained model repeats: samples and continuations, compared with that text."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence

from tinylm.errors import UsageError
from tinylm.evaluation.memorisation import (
    AFTER_HELD_OUT,
    AFTER_TRAINING,
    HELD_OUT,
    SAMPLES,
    Memorisation,
    MemorisationConfig,
    Passage,
    draw_passages,
    measure_copied,
)
from tinylm.evaluation.verbatim import Documents
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import EncodedPrompt, start_tokens
from tinylm.loaded_model import Model
from tinylm.model.decoder import Decoder
from tinylm.reporter import Reporter
from tinylm.run_config import DataConfig
from tinylm.text.compression import Progress
from tinylm.text.corpus import STANDARD_INPUT, Corpus, Stream
from tinylm.text.corpus_loading import TextSource, opened_corpus
from tinylm.text.decoding import decoded_stream
from tinylm.text.run_tokens import reopen_ids
from tinylm.validation import require

ROWS = 64  # texts generated as one batch


def measure_memorisation(
    model: Model,
    held_out: TextSource | None = None,
    training: TextSource | None = None,
    config: MemorisationConfig | None = None,
) -> Memorisation:
    """Compare samples of a decoder, and its continuations of training text and of held-out text, with the training
    text. The control is the true continuation of each held-out passage.

    held_out: text that the model was not trained on. Default: the validation text of its run.
    training: the text that it was trained on. Default: that of its run, as encoded in the user's cache or in the run;
        the paths that a run recorded are not opened, since an untrusted run could name any file.

    Raises UsageError for a model that is not a decoder, for a text that is missing, cannot be used or has no document
    of the needed length, and TinyLMError for damaged data.
    """
    config = config or MemorisationConfig()
    require(
        isinstance(model.network, Decoder),
        f"Memorisation is measured for decoders; {model.path} is an {model.architecture}.",
    )
    if training is not None and held_out is None:
        raise UsageError("`train_data` needs a held-out text beside it; name one.")
    with _documents(model, training, "train") as training_text, _documents(model, held_out, "val") as held_out_text:
        trained, unseen = (
            _passages(text, name, config, model.reporter)
            for name, text in (("training", training_text), ("held-out", held_out_text))
        )
        prefixes = [[""] * config.num_samples, *([passage.prefix for passage in part] for part in (trained, unseen))]
        with model.reporter.counting("sampling", sum(map(len, prefixes)), "texts") as advance:
            samples = _continue(model, [prefix for group in prefixes for prefix in group], config, advance)
        ends = itertools.accumulate(map(len, prefixes))
        texts = {
            source: samples[end - len(group) : end]
            for source, group, end in zip((SAMPLES, AFTER_TRAINING, AFTER_HELD_OUT), prefixes, ends, strict=True)
        }
        texts[HELD_OUT] = [passage.continuation for passage in unseen]
        with model.reporter.counting("searching", training_text.size, training_text.unit) as advance:
            return measure_copied(texts, training_text, config.min_match, advance)


def _passages(documents: Documents, name: str, config: MemorisationConfig, reporter: Reporter) -> list[Passage]:
    with reporter.counting(f"reading {name} text", documents.size, documents.unit) as advance:
        passages = draw_passages(documents, config, advance)
    if not passages:
        least = config.prefix_length + config.min_match
        raise UsageError(f"The {name} text has no document of at least {least} characters; give a longer text.")
    return passages


def _continue(model: Model, prefixes: Sequence[str], config: MemorisationConfig, progress: Progress) -> list[str]:
    """One continuation of each prefix, up to its first `sample_length` characters. Unknown characters are skipped.

    Text i has the random stream (seed, i).
    """
    texts = [""] * len(prefixes)
    for first in range(0, len(prefixes), ROWS):
        prompts = [_encode(model, prefix) for prefix in prefixes[first : first + ROWS]]
        # As many tokens as characters are enough, as long as no token is empty.
        generation = GenerationConfig(config.sample_length, len(prompts), config.temperature, seed=config.seed)
        for row, text in model.continue_each(prompts, generation, first):
            texts[first + row] += text
            if all(len(text) >= config.sample_length for text in texts[first : first + ROWS]):
                break
        progress(len(prompts))
    return [text[: config.sample_length] for text in texts]


def _encode(model: Model, prefix: str) -> EncodedPrompt:
    known = prefix.translate(dict.fromkeys(map(ord, model.tokenizer.unknown_characters(prefix))))
    ids = model.encode(known)[-model.context :] if known else []
    return EncodedPrompt(known, ids, start_tokens(model.tokenizer, model.data, ids))


@contextlib.contextmanager
def _documents(model: Model, source: TextSource | None, part: str) -> Iterator[Documents]:
    """The documents of a source, or by default one part, "train" or "val", of the text of the model's run."""
    if source is not None:
        with opened_corpus(source, "text", model.reporter) as corpus:
            yield corpus_documents(corpus)
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

    names = _recorded_name(model.data)
    yield Documents(stream, lambda index: names or f"document {index + 1}", None, "characters")


def _recorded_name(data: DataConfig) -> str:
    """The path of the text, if the run was trained on a single file that is one document; else empty."""
    single = len(data.corpus) == 1 and data.documents == 1 and data.corpus[0] != STANDARD_INPUT
    return data.corpus[0] if single else ""


def corpus_documents(corpus: Corpus) -> Documents:
    """The documents of a corpus, with the names that `Corpus.stream` gives them."""
    names: list[str] = []

    def stream(progress: Progress) -> Stream:
        names.clear()
        return corpus.stream(progress, started=names.append)

    return Documents(stream, names.__getitem__, corpus.size, "bytes")
