"""Characters of a text that have no id in the vocabulary of a tokenizer: an error, or left out of the text."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tinylm.config.jobs import rows_on
from tinylm.errors import UnknownCharactersError, UsageError
from tinylm.reporter import Reporter, counted
from tinylm.text.corpus import Corpus, CorpusStats
from tinylm.text.readers import require_encodable
from tinylm.text.split import SplitCorpus, split_corpus
from tinylm.text.tokenizer import Tokenizer, describe_characters


def handle_unknown_characters(
    split: SplitCorpus,
    tokenizer: Tokenizer,
    unknown: str,
    reporter: Reporter,
    *,
    vocabulary_owner: str,
    model: Path | None,
) -> SplitCorpus:
    """Return the split text without the characters that have no id, with a warning, if `unknown` is "skip".

    Raises UsageError if no text is left, and the errors of `require_known_characters`.
    """
    dropped = require_known_characters(split.corpus, split.alphabet, tokenizer, vocabulary_owner, model, unknown)
    if not dropped:
        return split
    corpora = [corpus_without_unknown(corpus, tokenizer) for corpus in split.corpora]
    with reporter.counting("reading", sum(corpus.size for corpus in corpora), "bytes") as advance:
        remaining = split_corpus(corpora, split.val_fraction, advance)
    report_dropped(dropped, corpora, split.all_stats, remaining.all_stats, reporter)
    return remaining


def require_known_characters(
    corpus: Corpus,
    alphabet: str,
    tokenizer: Tokenizer,
    vocabulary_owner: str,
    model: Path | None = None,
    unknown: str = "error",
) -> str:
    """The characters of `alphabet` that have no id and, since `unknown` is "skip", are to be left out.

    alphabet: the characters of the corpus and of its validation text. vocabulary_owner: the subject of the message,
    such as "The model checkpoints/a". model: path of the model that the tokenizer belongs to; it is an attribute of the
    error if the vocabulary can be extended.

    Raises UnknownCharactersError for such characters if `unknown` is "error", and for those that the chat template
    writes, which cannot be skipped.
    """
    missing = tokenizer.unknown_characters(alphabet)
    if not missing:
        return ""
    whose, advice = "text's characters", 'skip such characters with `unknown="skip"`'
    if written := corpus.written_by_template(alphabet, missing):
        whose, missing = "characters that the chat template writes", written
        advice = "choose a `chat_template` without them, since they cannot be skipped"
    if written or unknown != "skip":
        raise UnknownCharactersError(
            f"{vocabulary_owner} has no id for {len(missing)} of the {whose}, {describe_characters(missing)}; "
            f"{advice}.",
            model if tokenizer.kind == "char" else None,
            corpus.paths,
        )
    return missing


def corpus_without_unknown(corpus: Corpus, tokenizer: Tokenizer) -> Corpus:
    """Return a copy of the corpus that also drops the characters without an id in the tokenizer.

    Pairs with a side that becomes empty, and conversations with a message that becomes empty, are skipped.
    """
    drop_others = corpus.drop_unknown or str

    def drop_unknown(text: str) -> str:
        text = drop_others(text)
        unknown = tokenizer.unknown_characters(text)
        return text.translate(dict.fromkeys(map(ord, unknown))) if unknown else text

    return replace(corpus, drop_unknown=drop_unknown)


def report_dropped(
    characters: str,
    corpora: Sequence[Corpus],
    before: Sequence[CorpusStats],
    after: Sequence[CorpusStats],
    reporter: Reporter,
) -> None:
    """Warn of the characters that were dropped from these corpora, and of records that lost a text that they need."""
    count = sum(stats.characters for stats in before) - sum(stats.characters for stats in after)
    reporter.warn(
        f"Skipped {counted(count, 'character')} of the text without an id, "
        f"{counted(len(characters), 'different one')} ({describe_characters(characters)})."
    )
    for corpus, *both in zip(corpora, before, after, strict=True):
        total, left = (stats.documents // corpus.documents_per_record for stats in both)
        if left < total:
            others = "; ..." if total - left > len(corpus.left_out) else ""
            places = f" ({'; '.join(corpus.left_out)}{others})" if corpus.left_out else ""
            reporter.warn(
                f"{total - left:,} of {total:,} {rows_on(corpus.kind)[0].records} are left out, since a text of theirs "
                f"has no other characters{places}."
            )


def without_unknown(text: str, tokenizer: Tokenizer, unknown: str, name: str) -> str:
    """The text without characters that are not in the vocabulary; may be empty. name: of the text, for messages.

    Raises UsageError for such characters if `unknown` is "error", and for text that UTF-8 cannot encode.
    """
    require_encodable(text, name)
    found = tokenizer.unknown_characters(text)
    if found and unknown == "error":
        raise UsageError(
            f"{name} has characters that are not in the vocabulary: {describe_characters(found)}; leave them out, or "
            'skip them with `unknown="skip"`.'
        )
    return text.translate(dict.fromkeys(map(ord, found))) if found else text
