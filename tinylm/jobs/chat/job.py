"""The job of conversations."""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.validation import describe_value
from tinylm.evaluation.result import Evaluation, token_excerpt
from tinylm.jobs.chat.corpus import CHAT_ENCODING, ChatCorpus, ChatTokens
from tinylm.jobs.job import MakeTask, MarkedText, Reader, Scoring
from tinylm.jobs.scored import ScoredJob, ScoredTask, evaluation_batches
from tinylm.objectives.loss import next_token_losses
from tinylm.reporter import Reporter, counted
from tinylm.text.chat_format import chat_format, read_template
from tinylm.text.chat_template import CHATML
from tinylm.text.corpus import Corpus
from tinylm.text.file_selection import TextSource, conversation_keys
from tinylm.text.scored_tokens import ScoredTokens
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

MAX_LISTED_KEYS = 10


class ChatTask(ScoredTask):
    """Predict each scored token of a conversation."""

    tokens_type = ChatTokens


def evaluate_chat(scoring: Scoring) -> Evaluation:
    """Loss of the model on the scored tokens of conversations with its confidence interval, and bits per character and
    byte of their text.

    Those longer than the context are cut, with a warning. Raises UsageError if no token within the context is scored.
    """
    tokens = ChatTokens(scoring.text.codes)
    batches = evaluation_batches(scoring, tokens)
    scored = tokens.scored_ids(scoring.model.context)
    losses = scoring.losses(batches, next_token_losses, len(scored), "tokens")
    interval = losses.shuffled_groups().interval("conversations", scoring.reporter)
    return losses.total.of_text(*scoring.tokenizer.decoded_size(scored), **interval)


class ChatJob(ScoredJob):
    """A decoder predicts the answers of conversations."""

    tokens_type: ClassVar[type[ScoredTokens]] = ChatTokens
    corpus: ClassVar[type[ChatCorpus]] = ChatCorpus
    encoding = CHAT_ENCODING
    shares_text = False
    task: ClassVar[MakeTask] = ChatTask
    excerpt = staticmethod(token_excerpt)
    evaluate = staticmethod(evaluate_chat)

    def recognises(self, corpora: Sequence[Corpus], reporter: Reporter) -> bool:
        """Whether the first file that has conversations has those of this kind."""
        found = (conversation_keys(file, corpus.encoding) for corpus in corpora for file in corpus.files)
        keys = next(filter(None, found), None)
        return keys is not None and self.corpus.has_keys_of(keys)

    def fields(self, source: TextSource, reader: Reader) -> dict[str, Any]:
        """The format of the conversations, by the template of the source, that of the model, or ChatML.

        Raises UsageError for a file that cannot be read, and TinyLMError for one that is too long.
        """
        own = reader.chat_template
        template = read_template(source.chat_template) if source.chat_template else own or CHATML
        extended = reader.adds_tokens and template != own
        return {"chat": chat_format(template, reader.tokenizer, source.train_on or "assistant", extended=extended)}

    def report_read(self, corpus: Corpus, reporter: Reporter) -> None:
        """Name keys without effect, and count texts of special tokens."""
        assert isinstance(corpus, ChatCorpus)
        if corpus.unused_keys:
            names = ", ".join(map(describe_value, corpus.unused_keys[:MAX_LISTED_KEYS]))
            others = ", ..." if len(corpus.unused_keys) > MAX_LISTED_KEYS else ""
            reporter.note(f"{corpus.name}: these keys of its conversations have no effect: {names}{others}.")
        if corpus.n_with_literal_tokens:
            reporter.warn(
                f"{corpus.name}: {corpus.n_with_literal_tokens:,} of its conversations contain the text of special "
                "tokens. In messages and tools it is encoded as other text; only the chat template writes special "
                "tokens."
            )

    def recorded(self, tokens: TokenFolder, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
        """The part of the text that is scored."""
        assert isinstance(corpus, ChatCorpus)
        return {"train_on": corpus.chat.train_on}

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        return counted(data.documents, "conversation")

    def marked_examples(self, tokens: TokenFolder, tokenizer: Tokenizer, number: int) -> tuple[MarkedText, ...]:
        """The first `number` training conversations, split into text that counts in the loss and text that does not.

        Raises TinyLMError if the `tokenizers` library fails.
        """
        train, examples = self.tokens_type(tokens.train), []
        for index in range(min(number, len(train))):
            ids, scored = train.tokens(index)
            scored[:1] = False  # the first token is never a target
            edges = [0, *(np.flatnonzero(np.diff(scored)) + 1), len(ids)]
            texts = (tokenizer.decode(ids[a:b], skip_special_tokens=False) for a, b in itertools.pairwise(edges))
            parts = zip(texts, scored[edges[:-1]].tolist(), strict=True)
            examples.append(tuple(parts))
        return tuple(examples)


JOB = ChatJob()
