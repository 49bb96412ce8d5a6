"""The protocol of a job: what the rest of the program asks about what a model learns from.

A job is a row of JOBS (`tinylm.config.jobs`) and a folder in tinylm/jobs, whose module `job` has it as `JOB`.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from tinylm.config.jobs import JOBS, rows_on
from tinylm.config.run import DataConfig, RunConfig
from tinylm.errors import UsageError
from tinylm.evaluation.evaluation_config import EvaluationConfig
from tinylm.evaluation.loop import TextLosses, default_batch_size, text_losses, token_losses
from tinylm.evaluation.result import Evaluation, token_excerpt
from tinylm.objectives.loss import Objective
from tinylm.planning.plan_request import Sizes
from tinylm.reporter import Reporter
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.batches import Batch
from tinylm.text.corpus import Corpus
from tinylm.text.file_selection import TextSource
from tinylm.text.parallel_encoding import TEXT_ENCODING, Encoding
from tinylm.text.split import SplitCorpus
from tinylm.text.token_files import TokenFolder, Tokens
from tinylm.text.tokenizer import Tokenizer
from tinylm.transformer.architectures import Decoder

MarkedText = tuple[tuple[str, bool], ...]  # parts of a text in order, each scored or not


class Task(Protocol):
    """Encoded data with the objectives of a job.

    validation_objective: its mean is the validation loss.
    steps_per_epoch: optimizer steps per pass over the training data.
    """

    validation_objective: Objective
    steps_per_epoch: float

    def objective(self, progress: float) -> Objective:
        """The function that is minimised in training, at `progress` from 0 to 1."""
        ...

    def batch(self, number: int) -> Batch:
        """The training batch `number`, from 0. The same number gives the same batch, so that resuming is exact."""
        ...

    def with_soft_targets(self, teacher: Decoder, dtype: str, check: Callable[[], None]) -> "Task":
        """The task of a later generation: the same data, with the predictions of a teacher as targets beside the text.
        Only of jobs whose runs may have generations.

        dtype: of autocast. check: called often; may raise an exception
        """
        raise NotImplementedError

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        """Validation batches of at most `rows` rows, the same at each call.

        max_tokens: approximate number of targets in total; of masked windows, of their tokens
        """
        ...


MakeTask = Callable[..., Task]  # see `Job.task`


class EvaluationTokens(NamedTuple):
    """An encoded text.

    kind: of the corpus. codes: (N,), ids, or the codes of the job. document_end: the text that each end-of-text id
    stands for.
    """

    kind: str
    codes: np.ndarray
    document_end: str = ""


@dataclass(frozen=True)
class Scoring:
    """A model of the job's architecture, an encoded text, and how the model is evaluated on it.

    dtype: autocast dtype. ranks: the processes that share the work; all get the same losses.
    """

    model: Any
    tokenizer: Tokenizer
    text: EvaluationTokens
    config: EvaluationConfig
    dtype: str
    reporter: Reporter
    ranks: Ranks = ONE_RANK

    def rows(self, width: int) -> int:
        """Rows per batch: the chosen number, or what is usual for rows of `width` tokens."""
        return self.config.batch_size or default_batch_size(width)

    def values(
        self, batches: Iterable[Batch], of: Any, total: int | None, unit: str, columns: tuple[int, ...] = ()
    ) -> np.ndarray:
        """The values of the targets of all batches, (N, *columns). of, columns: as `losses` of `token_losses`"""
        with self.reporter.counting("scoring", total, unit) as advance:
            return token_losses(self.model, batches, self.dtype, advance, self.ranks, of, columns)

    def losses(self, batches: Iterable[Batch], of: Any, total: int | None, unit: str) -> TextLosses:
        """The losses of the targets of all batches, summed over each of their texts. of: as in `text_losses`"""
        with self.reporter.counting("scoring", total, unit) as advance:
            return text_losses(self.model, batches, of, self.dtype, advance, self.ranks)


class Reader(Protocol):
    """What reading data asks of a model, which may be a new one.

    data_kinds: the kinds of data that it can be trained on or is evaluated on, the default first
    labels: of its output layer; empty without one for labels
    tokenizer: `None` for a new model
    chat_template: source of its template of conversations; `None` for a model that has none
    adds_tokens: whether special tokens of a template can be added to the tokenizer
    """

    @property
    def data_kinds(self) -> tuple[str, ...]: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def adds_tokens(self) -> bool: ...


class Baselines(Protocol):
    """Returns the scores of baselines on the tokens, (N,), by name.

    training: tokens (M,) of the training text; `None` if they cannot be read
    """

    def __call__(
        self, tokenizer: Tokenizer, tokens: np.ndarray, training: Tokens | None, reporter: Reporter
    ) -> dict[str, float]: ...


class Job:
    """What a model learns from. The methods here are those of plain text.

    corpus: the class of the data
    encoding: from examples of the corpus to the codes in a token folder
    shares_text: whether the records can also be read as texts alone
    baselines: `None` for a job without any
    compared: name of the metric of `evaluate` that `baselines` also computes
    """

    corpus: ClassVar[type[Corpus]] = Corpus
    encoding: ClassVar[Encoding] = TEXT_ENCODING
    shares_text: ClassVar[bool] = True
    baselines: ClassVar[Baselines | None] = None
    compared: ClassVar[str] = "bits_per_byte"

    # Reading

    def accepted_keys(self, text_key: str) -> frozenset[str]:
        """The keys of records that may stand in files without a JSON suffix; empty for none."""
        return frozenset()

    def recognises(self, corpora: Sequence[Corpus], reporter: Reporter) -> bool:
        """Whether corpora that were found as plain text are of this job. Raises UsageError if only some of them are."""
        return False

    def fields(self, source: TextSource, reader: Reader) -> dict[str, Any]:
        """Further fields of the corpora that are found in a TextSource. Raises UsageError for what cannot be read."""
        return {}

    def opened(self, corpora: list[Corpus], reader: Reader, reporter: Reporter) -> list[Corpus]:
        """The corpora with what is found by reading them. Raises UsageError for data of another job."""
        return corpora

    def report_found(self, corpora: Sequence[Corpus], reporter: Reporter, *, needs_records: bool) -> None:
        """Tell the user about corpora of detected format before they are read.

        needs_records: whether the user named a key of the text. Raises UsageError if there is none.
        """

    def report_read(self, corpus: Any, reporter: Reporter) -> None:
        """Tell the user about a corpus after it was read."""

    def report_encoded(self, split: SplitCorpus, tokens: TokenFolder, reporter: Reporter) -> None:
        """Tell the user about a SplitCorpus after it was encoded."""

    def recorded(self, tokens: TokenFolder, corpus: Any, tokenizer: Tokenizer) -> dict[str, Any]:
        """The fields of DataConfig that this job alone has."""
        return {}

    def record_ids(self, tokens: Tokens, corpus: Corpus, end_of_text_id: int) -> Iterator[bytes]:
        """The ids of each record of one part of the encoded data, to find records that stand twice."""
        codes = np.asarray(tokens)
        starts = np.append(0, np.flatnonzero(codes[:-1] == end_of_text_id) + 1)
        edges = [*starts[:: corpus.documents_per_record].tolist(), len(codes)]
        for start, stop in itertools.pairwise(edges):
            yield codes[start : stop - bool(codes[stop - 1] == end_of_text_id)].tobytes()

    def marked_examples(self, tokens: TokenFolder, tokenizer: Tokenizer, number: int) -> tuple[MarkedText, ...]:
        """The first `number` training examples, in parts that count in the loss or not; empty for text without any."""
        return ()

    # Training and evaluation

    def task(self, *arguments: Any, **others: Any) -> Task:
        """The Task of a token folder, a tokenizer, a ModelConfig, a TrainingConfig and, by name, what the objective
        compares the model with: the `reference` of a job that has one, or the `teachers`.

        Raises UsageError or TinyLMError for a text that is too short, or of which nothing fits the context.
        """
        raise NotImplementedError

    def evaluate(self, scoring: Scoring) -> Evaluation:
        """The metrics of a model. Raises UsageError for a text in which nothing is scored."""
        raise NotImplementedError

    def excerpt(self, tokenizer: Tokenizer, tokens: Tokens, parameters: int) -> np.ndarray:
        """The beginning of the tokens, (N,), which the report evaluates for a model with so many parameters."""
        return token_excerpt(tokenizer, tokens, parameters)

    # Use

    def classify(self, *arguments: Any) -> Any:
        """The labels of texts. Raises UsageError if models of the job have none."""
        raise UsageError("The model finds no labels; name a classifier.")

    def fill_mask(self, *arguments: Any) -> Any:
        """The tokens for the masks of a prompt. Raises UsageError if models of the job fill none."""
        raise UsageError("The model fills no masks; name an encoder.")

    def translate(self, *arguments: Any) -> Any:
        """The targets of the lines of a prompt. Raises UsageError if models of the job have none."""
        raise UsageError("The model does not translate; name an encoder-decoder.")

    # Planning

    def sizes(self, tokens: TokenFolder, tokenizer: Tokenizer) -> Sizes:
        """The sizes of encoded data, on which a plan depends."""
        return Sizes()

    def describe(self, config: RunConfig, data: DataConfig) -> str:
        """What a run learns from, for the plan, such as "12 conversations"; may be empty."""
        return ""


@functools.cache
def _imported(module: str) -> Job:
    job: Job = importlib.import_module(module).JOB
    return job


def load_job(objective: str) -> Job:
    """The job of an objective in JOBS, whose code is imported now."""
    return _imported(JOBS[objective].module)


def job_on(data: str) -> Job:
    """The first job on data of this kind: all of them read and encode it alike."""
    return _imported(rows_on(data)[0].module)
