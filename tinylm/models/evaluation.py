"""The evaluation of a model on a text: the text is read and encoded on rank 0, and all ranks share the work."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tinylm.config.jobs import JOBS, JobRow, applicable, changed_settings, data_kinds, objective_for, rows_on
from tinylm.config.settings import ChatSettings, TextFileSettings, UnknownCharacterSettings
from tinylm.errors import TinyLMError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.result import Evaluation
from tinylm.generation.text_generator import TextGenerator
from tinylm.jobs.evaluated_text import evaluation_source, evaluation_tokens
from tinylm.jobs.job import EvaluationTokens, Scoring, load_job
from tinylm.jobs.reading import ModelReader
from tinylm.jobs.run_tokens import reopen_ids
from tinylm.kernels.process import keep_freed_blocks
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.file_selection import TextSource
from tinylm.text.token_files import Tokens
from tinylm.transformer.architectures import Transformer


@dataclass(frozen=True, kw_only=True)
class ReadingSettings(TextFileSettings, ChatSettings, UnknownCharacterSettings):
    """How the text of an evaluation is read; see TextSource."""


class EvaluatedModel(TextGenerator):
    """A model that is evaluated on texts. Its attributes are those of `tinylm.Model`."""

    path: Path
    network: Transformer
    dtype: str
    objective: str | None

    def evaluate(
        self,
        files: str | Path | Sequence[str | Path] | TextSource | None = None,
        *,
        text: str | None = None,
        ranks: Ranks = ONE_RANK,
        **settings: Any,
    ) -> Evaluation:
        """Loss, perplexity and further metrics on a text, or on the answers of conversations; for an encoder-decoder,
        on pairs.

        files: files, folders, glob patterns, or - for standard input; or a TextSource, which also sets how they are
            read. Default: the validation text of the run.
        text: the text itself, in place of files (pairs: a source, a tab and a target per line).
        ranks: from `tinylm.distributed.ranks.join_ranks`. Each rank has the model and calls this method with the same
            arguments. The ranks share the work and get the same result. Only rank 0 reads files.
        settings: fields of EvaluationConfig, such as `stride`, and of ReadingSettings, which apply to `files` by name.

        The loss is computed under autocast to `dtype`, from fp32 weights if the model has them.

        Raises UsageError for a setting, a text or a file that cannot be used, TypeError for unknown settings, and
        TinyLMError for damaged data.
        """
        names = {field.name for field in fields(EvaluationConfig)}
        config = EvaluationConfig(**{name: value for name, value in settings.items() if name in names})
        reading = ReadingSettings(**{name: value for name, value in settings.items() if name not in names})
        given = changed_settings(config)
        applicable(EvaluationConfig, given, self.rows)

        # Read and encode the text, on all ranks
        with evaluation_source(files, text, self.data_kinds[0], vars(reading)) as source:
            tokens = self._shared_tokens(source, ranks)
        objective = self.objective_on(tokens.kind)
        applicable(EvaluationConfig, given, (JOBS[objective],))

        # Evaluate, and compare with baselines
        torch.set_num_threads(ranks.share_threads(torch.get_num_threads()))
        keep_freed_blocks()
        job = load_job(objective)
        result = job.evaluate(Scoring(self.network, self.tokenizer, tokens, config, self.dtype, self.reporter, ranks))
        if result.confusion is not None:
            return replace(result, labels=self.labels)
        if not config.baselines or job.baselines is None:
            return result
        scores = None
        if ranks.is_first:
            scores = job.baselines(self.tokenizer, tokens.codes, self._training_tokens(), self.reporter)
        return replace(result, baselines=ranks.first(scores))

    def objective_on(self, data: str) -> str:
        """The objective for a kind of data: that of training if it fits, else the default for the architecture.

        Raises UsageError if the architecture has none for this kind.
        """
        return objective_for(self.architecture, data, self.objective)

    @property
    def rows(self) -> tuple[JobRow, ...]:
        """The jobs that the model can be evaluated on."""
        rows = (row for kind in self.data_kinds for row in rows_on(kind))
        return tuple(row for row in rows if self.architecture in row.architectures)

    @property
    def data_kinds(self) -> tuple[str, ...]:
        """The kinds of data that the model can be evaluated on, the default first."""
        return data_kinds(self.architecture, self.objective, has_labels=bool(self.labels))

    def _shared_tokens(self, source: TextSource | None, ranks: Ranks) -> EvaluationTokens:
        ranks.require_device(self.network.device.type)
        if not ranks.is_first:
            ranks.wait()
            kind, document_end = ranks.first(None)
            return EvaluationTokens(kind, ranks.broadcast({})["codes"].numpy(), document_end)
        reader = ModelReader(self.data_kinds, self.labels, self.tokenizer, self.chat_template)
        text = evaluation_tokens(source, self.path, self.data, self.tokenizer, reader, self.reporter)
        ranks.announce()
        if ranks.size > 1:
            ranks.first([text.kind, text.document_end])
            ranks.broadcast({"codes": torch.from_numpy(np.array(text.codes))})
        return text

    def _training_tokens(self) -> Tokens | None:
        """Tokens of the training text; `None`, with a warning, if there are none or they cannot be read."""
        if self.data is None:
            self.reporter.warn(f"{self.path} has no training text of its own, so baselines that need it are left out.")
            return None
        try:
            tokens = reopen_ids(self.path, self.data, self.tokenizer, "train")
            tokens[:1]  # checks the first token file; the baselines read no other
            return tokens
        except TinyLMError as error:
            self.reporter.warn(f"Baselines that need the training text are left out: {error}")
            return None
