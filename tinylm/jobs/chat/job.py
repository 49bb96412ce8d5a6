"""The job of conversations."""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from tinylm.config.run import DataConfig, RunConfig
from tinylm.config.validation import describe_value
from tinylm.evaluation.result import token_excerpt
from tinylm.jobs.chat.corpus import CHAT_ENCODING, ChatCorpus
from tinylm.jobs.chat.evaluation import evaluate_chat
from tinylm.jobs.chat.tokens import ChatTokens, marked_examples
from tinylm.jobs.job import Evaluate, MakeTask, MarkedText, Reader
from tinylm.jobs.scored import ScoredJob, ScoredTask
from tinylm.reporter import Reporter, counted
from tinylm.text.answer_spans import chat_format, read_template
from tinylm.text.chat_template import CHATML
from tinylm.text.corpus import Corpus
from tinylm.text.recognition import conversation_keys
from tinylm.text.scored_tokens import ScoredTokens
from tinylm.text.sharded_tokens import Tokens
from tinylm.text.source import TextSource
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

MAX_LISTED_KEYS = 10


class ChatTask(ScoredTask):
    """Predict each scored token of a conversation."""

    tokens_type = ChatTokens


class ChatJob(ScoredJob):
    """A decoder predicts the answers of conversations."""

    tokens_type: ClassVar[type[ScoredTokens]] = ChatTokens
    corpus: ClassVar[type[ChatCorpus]] = ChatCorpus
    encoding = CHAT_ENCODING
    shares_text = False
    task: ClassVar[MakeTask] = ChatTask
    evaluate: ClassVar[Evaluate] = staticmethod(evaluate_chat)

    def excerpt(self, tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
        """The first tokens."""
        return token_excerpt(tokenizer, tokens, parameters)

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
        """The number of conversations."""
        return counted(data.documents, "conversation")

    def marked_examples(self, tokens: TokenFolder, tokenizer: Tokenizer, number: int) -> tuple[MarkedText, ...]:
        """The first `number` training conversations, split into text that counts in the loss and text that does not."""
        return marked_examples(self.tokens_type(tokens.train), tokenizer, number)


JOB = ChatJob()
