"""The job of plain text."""

from collections.abc import Sequence
from typing import Any, ClassVar

from tinylm.jobs.job import Baselines, Evaluate, Job, MakeTask
from tinylm.jobs.text.baselines import baseline_bits_per_byte
from tinylm.jobs.text.evaluation import evaluate_text, text_excerpt
from tinylm.jobs.text.found import report_html, report_tables
from tinylm.jobs.text.task import NextToken
from tinylm.reporter import Reporter
from tinylm.text.corpus import Corpus, document_end
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer

COUNTED_TOKENS = 1 << 20  # tokens that are decoded at a time, to count their bytes


class TextJob(Job):
    """A decoder predicts the next token of a text."""

    task: ClassVar[MakeTask] = NextToken
    evaluate: ClassVar[Evaluate] = staticmethod(evaluate_text)
    excerpt = staticmethod(text_excerpt)
    baselines: ClassVar[Baselines | None] = staticmethod(baseline_bits_per_byte)

    def report_found(self, corpora: Sequence[Corpus], reporter: Reporter, *, needs_records: bool) -> None:
        """Warn of tables and of HTML that are read as they are."""
        report_tables(corpora, reporter, required=needs_records)
        report_html(corpora, reporter)

    def recorded(self, tokens: TokenFolder, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
        """The number of UTF-8 bytes of the validation text without its first token, which is not scored."""
        sizes = (
            tokenizer.decoded_size(tokens.val[start : start + COUNTED_TOKENS], document_end(corpus.format))[1]
            for start in range(1, len(tokens.val), COUNTED_TOKENS)
        )
        return {"val_bytes": sum(sizes)}


JOB = TextJob()
