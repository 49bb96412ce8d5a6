"""How good the model is during training: its validation loss, on as many tokens as there is time for, and samples."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tinylm.config.run import RunConfig
from tinylm.config.training import TrainingConfig
from tinylm.errors import DivergedError, TinyLMError, memory_errors
from tinylm.evaluation.loop import EvaluationLoss, default_batch_size, evaluate_loss
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.prompts import start_tokens
from tinylm.generation.torch_engine import Sampler, generate
from tinylm.jobs.job import Task
from tinylm.kernels.graphs import force_eager
from tinylm.machine.device import autocast
from tinylm.planning.memory import evaluation_rows
from tinylm.system.ranks import Ranks
from tinylm.text.batches import Batch
from tinylm.text.decoding import decode_after
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.clock import Clock
from tinylm.training.events import Evaluated
from tinylm.training.parallel import is_sharded, release_gathered
from tinylm.training.state import TrainerState
from tinylm.transformer.architectures import Decoder, Transformer
from tinylm.transformer.build import count_parameters


@dataclass(frozen=True, eq=False)
class Validation:
    """Evaluates the model of a trainer. The parameters are fields of `Trainer`.

    members: of a joined model: as many times larger are its activations
    """

    model: Transformer
    task: Task
    config: TrainingConfig
    state: TrainerState
    dtype: str
    ranks: Ranks
    members: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of an evaluation: those of the configuration, or fewer if a time budget allows no more."""
        return self.state.eval_tokens or self.config.eval_tokens

    def n_targets(self, max_tokens: int) -> int:
        """Number of targets that are scored in an evaluation on about `max_tokens`."""
        return sum(batch.n_targets for batch in self._batches(max_tokens))

    def _batches(self, max_tokens: int) -> Iterator[Batch]:
        rows = evaluation_rows(self.state.micro_batch, self.config.checkpoint_activations)
        most = default_batch_size(self.config.sequence_length or self.model.context)
        rows = max(1, min(most, rows) // self.members)
        return self.task.validation_batches(rows, max_tokens)

    def loss(self, max_tokens: int, check: Callable[[], None]) -> EvaluationLoss:
        """The loss on about `max_tokens`. `check` is called after each batch, and may raise an exception.

        Raises DivergedError for a loss that is not finite.
        """
        batches, objective = self._batches(max_tokens), self.task.validation_objective
        try:
            with force_eager():
                found = evaluate_loss(
                    self.model,
                    objective,
                    batches,
                    self.dtype,
                    lambda tokens: check(),
                    self.ranks,
                    sharded=is_sharded(self.model),
                )
        finally:
            release_gathered(self.model)
        if not math.isfinite(found.loss):
            raise DivergedError(
                f"The validation loss after step {self.state.step} is not finite; saved weights are from before that "
                f"step. Try a lower `lr` (it is {self.config.lr:g})."
            )
        return found

    def tokens_within(self, seconds: float) -> int:
        """The `max_tokens` of an evaluation that is expected to take at most `seconds`; 0 if a row takes longer."""
        share = self.ranks.first(seconds / max(self.state.eval_seconds, 1e-9))
        tokens, n_targets = int(min(1.0, share) * self.tokens), share * self.n_targets(self.tokens)
        while tokens and self.n_targets(tokens) > n_targets:  # the tokens may be more than those of the text
            tokens = tokens * 4 // 5
        return tokens

    def loss_within(self, seconds: float, clock: Clock) -> EvaluationLoss | None:
        """The loss on as many tokens as are expected to take half of `seconds`; `None` if these are less than a row,
        and if the loss is not finite, or not found within `seconds` and the memory.
        """
        tokens = self.tokens_within(0.5 * seconds / clock.slowdown)
        end = clock.seconds + seconds

        def check() -> None:
            if self.ranks.first(clock.seconds > end):
                raise TimeoutError

        # Of several ranks, one may fail alone, and the others would wait for it.
        failures = (TimeoutError, TinyLMError if self.ranks.size == 1 else DivergedError)
        with contextlib.suppress(*failures):
            return self.loss(tokens, check) if tokens else None
        return None


SAMPLE_TOKENS = 120  # per sample
MIN_SECONDS = 5.0  # of training before the first sample
SECONDS_PER_PARAMETER = 1e-9  # and per token: expected time of the first sample, an overestimate on most machines
MAX_SHARE = 0.01  # of the training time that samples may take
MAX_BUDGET_SHARE = 0.02  # of a time budget that one sample may take: the last one is sampled after the last evaluation
MIN_GROWTH = 0.02  # interval between samples as a fraction of the training time: at most about 500 samples in a day


class RunSampler:
    """Samples after evaluations, at intervals that bound the number of samples and the time they take.

    generate: as `generate_sample`. now: the clock
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: RunConfig,
        generate: Callable[..., str | None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._generate, self._now = generate or functools.partial(generate_sample, now=now), now
        expected = SAMPLE_TOKENS * SECONDS_PER_PARAMETER * count_parameters(model)["total"]
        self._next = now() + max(MIN_SECONDS, expected / MAX_SHARE)  # time of the next sample
        budget = None if config.training is None else config.training.budget.time
        self._max_seconds = math.inf if budget is None else MAX_BUDGET_SHARE * budget

    def sample_if_due(self, evaluated: Evaluated) -> str | None:
        """A sample; `None` before the first step, after a stop, of a joined model, before the time of the next sample,
        and as `generate_sample`.
        """
        start = self._now()
        if evaluated.tokens is not None or evaluated.joined is not None or start < self._next:
            return None
        text = self._generate(self._model, self._tokenizer, self._config, SAMPLE_TOKENS, self._max_seconds)
        cost = self._now() - start
        self._next = start + max(cost / MAX_SHARE, MIN_GROWTH * evaluated.seconds)
        return text


def generate_sample(
    model: Transformer,
    tokenizer: Tokenizer,
    config: RunConfig,
    tokens: int = SAMPLE_TOKENS,
    seconds: float = math.inf,
    now: Callable[[], float] = time.monotonic,
) -> str | None:
    """A sample of at most `tokens` tokens without a prompt; the random number generators of training do not advance.

    It ends after `seconds`, with the token that is then being generated.

    `None` for models other than decoders of plain text, and for sharded models; also if memory runs
    out and for logits that are not finite, since a sample must not end the training run.
    """
    is_other = config.data is not None and not config.data.is_plain_text
    if not isinstance(model, Decoder) or is_sharded(model) or is_other:
        return None
    dtype = "fp32" if config.runtime is None else config.runtime.dtype  # a frozen base has 16-bit weights
    was_training = model.training
    model.eval()
    sampler = Sampler(SamplingConfig(), 1, tokenizer.vocab_size)
    sampler.start(seed=0)
    start = start_tokens(tokenizer, config.data, [], model.context)
    end, ids = now() + seconds, []
    try:
        with memory_errors(), force_eager(), autocast(model.device.type, dtype):
            for (token,), _ in generate(model, [start], sampler, tokens, kept_id=tokenizer.start_id):
                ids.append(token)
                if now() >= end:
                    break
    except (MemoryError, TinyLMError):  # the latter for logits that are not finite: the next evaluation diverges
        return None
    finally:
        model.train(was_training)
    return decode_after(tokenizer, start, ids)
