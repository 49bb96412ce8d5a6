"""Output of a training run: the plan, progress, samples, and the result."""

import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tinylm.commands.console import Console
from tinylm.commands.next_steps import improvement, shell_quote, use_commands
from tinylm.config.run import LAST, RunConfig, describe_loss
from tinylm.errors import ClosedOutputError, InterruptedRunError, OutputError, TinyLMError
from tinylm.system.process_signals import Interrupted

if TYPE_CHECKING:
    from tinylm.jobs.job import MarkedText
    from tinylm.planning.plan import Plan
    from tinylm.text.tokenizer import Tokenizer
    from tinylm.training.events import Evaluated, Event
    from tinylm.training.progress import RunProgress
    from tinylm.training.result import TrainingResult

SAMPLE_TOKENS = 120  # of the sample at the end, on a terminal
SAMPLE_SECONDS, SAMPLE_SHARE = 2.0, 0.02  # the most that it may take, and of a time budget
LOADING_SECONDS = 4e-9  # per parameter, about 1 GB of fp32 weights per second
BASELINE_SHARE = 0.1  # of the training time, the most that the baselines may take
OVERFIT_MARGIN = 0.01  # nats per token by which the validation loss may rise without a warning


class TrainingDisplay:
    """Training callback that shows the plan, examples, progress, warnings and, on a terminal, samples.

    With --json, it also prints metrics. The context manager ends the display of progress.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress_context = contextlib.ExitStack()
        self._show_progress: Callable[[float | None, str], None] = lambda progress, text: None
        self._has_started = False  # other ranks than the first get no events
        self._config: RunConfig  # this and the next two are set when training starts
        self._tokenizer: Tokenizer
        self._progress: RunProgress
        self._best_metrics = ""
        self._sampled_step = -1  # of the last sample that was shown
        self._after_stop: Evaluated | None = None
        self._has_trained = False
        self._generation: int | None = None  # of the last step
        self._output_error: OutputError | None = None  # stdout cannot be written; training continues without metrics

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress_context.close()
        if isinstance(error, Interrupted) and not self._has_trained:
            self._console.note(InterruptedRunError.BEFORE_FIRST_STEP)

    def __call__(self, event: "Event") -> None:
        from tinylm.training.events import (
            Evaluated,
            Examples,
            GenerationBegan,
            Joining,
            Logged,
            Notice,
            Planned,
            Sampled,
            Started,
            Stepped,
            metrics_record,
        )
        from tinylm.training.progress import RunProgress

        match event:
            case Planned():
                show_plan(self._console, event.plan, event.config, event.parameters, as_result=False)
            case Examples():
                show_examples(self._console, event.examples)
            case Started():
                self._has_started = True
                self._config, self._tokenizer = event.config, event.tokenizer
                self._progress = RunProgress(event)
                self._show_progress = self._progress_context.enter_context(self._console.progress())
            case GenerationBegan():
                self._console.note(
                    f"Generation {event.number} of {event.count} begins after step {event.step}: a new model, which "
                    f"also learns from the last one ({self._progress.best})."
                )
                self._progress.update(event)
            case Joining():
                width = f"width {self._config.model.width}"
                self._console.note(
                    f"Joining the best {event.count} generations into one model of {width} ({self._progress.best})."
                )
            case Stepped():
                self._has_trained = True
                self._generation = event.generation
                # A narrow terminal drops the last fields.
                self._show_progress(event.progress, self._progress.describe(event))
            case Logged():
                self._progress.update(event)
            case Evaluated() if event.tokens is not None:
                self._after_stop = event if event.step else None  # not the untrained model at step 0
            case Evaluated():
                self._progress.update(event)
                if event.best:
                    self._sampled_step = -1  # a sample of this step was of other weights
                    self._best_metrics = "".join(f", {name} {value:.4f}" for name, value in event.metrics.items())
                if event.joined is not None:
                    kept = "it is kept" if event.best else "the best generation has less, and is kept alone"
                    loss = self._progress.short(event.val_loss)
                    self._console.note(f"The joined model has a validation loss of {loss}: {kept}.")
            case Sampled() if self._console.on_terminal and not self._console.quiet:
                self._sampled_step = event.step
                title = f"Sample at step {event.step}, validation loss {self._progress.short(event.val_loss)}:"
                self._console.print_highlighted(title, [(event.text, False)])
            case Notice():
                self._console.warn(event.message)
        if self._console.as_json and self._output_error is None and isinstance(event, Logged | Evaluated):
            try:
                self._console.record(metrics_record(event))
            except OutputError as error:
                self._output_error = error

    def show_result(self, result: "TrainingResult", command: str) -> None:
        """Print why training stopped, the best validation loss, and the path of the run (with --json: its result); on
        ranks that got no events, nothing.

        Raises InterruptedRunError if a signal arrived during training, TinyLMError if standard output could not be
        written, and ClosedOutputError if its reader has closed it.
        """
        from tinylm.training.result import STOP_REASONS

        console, run = self._console, result.run
        if result.stopped_by == "signal":
            resume = f"{command} --resume {shell_quote(run)}"
            message = f"Stopped at step {result.step}; the run is saved."
            if result.kept_step < result.step:
                message += (
                    f" Its weights are those of step {result.kept_step}, the best that were evaluated; those of step "
                    f"{result.step} are {shell_quote(run / LAST)}."
                )
            elif self._after_stop is not None:
                loss = self._describe_loss(self._after_stop.val_loss, self._after_stop.val_bits_per_byte)
                message += f" The validation loss of its last weights is {loss}, on {self._after_stop.tokens:,} tokens."
            message += f" Resume it with: {resume}"
            if console.as_json:
                with contextlib.suppress(OutputError):  # the signal may have ended the reader, too
                    console.record(_result_record(result))
            raise InterruptedRunError(message, result.signal_number)
        reason = STOP_REASONS[result.stopped_by]
        if result.signal_number:
            message = f"Stopped at step {result.step}: {reason}. The run is saved in {run}."
            raise InterruptedRunError(message, result.signal_number)
        if not self._has_started:
            return
        console.note(f"Stopped at step {result.step}: {reason}.")
        training = self._config.training
        number, planned = self._generation, 1 if training is None else training.generations
        if result.stopped_by == "time" and number is not None and number < planned:
            console.warn(f"There was time for {number} of {planned} generations: this machine is slower than planned.")
        assert result.val_loss is not None and result.best_val_loss is not None  # it was not stopped by a signal
        best = self._describe_loss(result.best_val_loss, result.best_val_bits_per_byte)
        if result.val_loss > result.best_val_loss + OVERFIT_MARGIN:
            last = self._describe_loss(result.val_loss, result.val_bits_per_byte)
            data = self._config.data
            own = data is not None and data.by_heart
            cause = "the model overfits the text" if result.epochs > 1 and not own else "a lower --lr may help"
            if training is not None and training.generations > 1:
                cause = "the last of the --generations is worse than one before; fewer and longer ones may help"
            kept = f"The best weights are kept; those of the last step are in {result.run / LAST}."
            if result.kept_step != result.best_step:
                kept = "The last weights are kept, since the validation data are too few to choose by."
            console.warn(f"The validation loss rose from {best} at step {result.best_step} to {last}: {cause}. {kept}")
        console.note(f"Best validation loss: {best}{self._best_metrics}, at step {result.best_step}.")
        try:
            if self._output_error is not None:
                raise self._output_error
            if console.as_json:
                console.record(_result_record(result))
            else:
                console.result(str(run))
        except ClosedOutputError:
            raise
        except OutputError as error:
            raise TinyLMError(f"The run is complete and saved in {run}. {error}") from error
        self._show_comparison(result)
        if console.on_terminal:
            self._show_use(result)

    def _describe_loss(self, nats: float, bits: float | None) -> str:
        return describe_loss(nats, bits, self._config.loss_unit)

    def _show_comparison(self, result: "TrainingResult") -> None:
        """Show the bits per byte of a run on plain text beside those of baselines, unless these take long, and a
        sentence on what would improve it.
        """
        import numpy as np

        from tinylm.jobs.run_tokens import reopen_ids
        from tinylm.jobs.text.baselines import MAX_BYTES, SECONDS_PER_BYTE, baseline_bits_per_byte
        from tinylm.reporter import SilentReporter
        from tinylm.text.text_cache import remember

        data, tokenizer, bits = self._config.data, self._tokenizer, result.best_val_bits_per_byte
        # The baselines were not made to learn a text by heart.
        if self._console.quiet or bits is None or data is None or data.by_heart:
            return

        def compute() -> dict[str, float]:
            val, train = (reopen_ids(result.run, data, tokenizer, part) for part in ("val", "train"))
            return baseline_bits_per_byte(tokenizer, np.asarray(val), train, SilentReporter())

        scores: dict[str, float] = {}
        text = [data.fingerprint, data.val_fingerprint, data.train_characters, data.val_records]
        if SECONDS_PER_BYTE * min(data.bytes, 2 * MAX_BYTES) <= BASELINE_SHARE * result.seconds:
            with contextlib.suppress(Exception):  # the run is complete, as in `_show_use`
                scores = remember(["gzip, xz, PPMd", *text], compute)
                compared = ", ".join(f"{name} {score:.4f}" for name, score in scores.items() if name != "gzip")
                self._console.note(f"The same text in bits per byte: this model {bits:.4f}, {compared}.")

        training = self._config.training
        assert training is not None
        # With few validation data, and beside the losses of teachers, the curves do not show this.
        if training.objective == "next-token" and training.keep == "best":
            history = result.history if training.generations == 1 else None
            advice = improvement(history, result.epochs, training.budget, bits, scores.get("PPMd"))
            if advice:
                self._console.note(advice)

    def _show_use(self, result: "TrainingResult") -> None:
        """Show a sample of the saved weights, unless one was just shown or it takes long, and the command for more."""
        config = self._config
        is_plain = config.data is not None and config.data.is_plain_text
        generates = config.model.architecture == "decoder" and is_plain
        if generates and self._sampled_step != result.kept_step:
            # The run is complete: no failure of the sample may end the command as one of the run.
            with contextlib.suppress(Exception):
                text = _sample(result, config)
                if text:
                    self._console.print_highlighted("Sample of the saved weights:", [(text, False)])
        self._console.note(f"To use it: {next(iter(use_commands(result.run, config).values()))}")


def _sample(result: "TrainingResult", config: RunConfig) -> str:
    """The beginning of a text by the saved weights; "" for an adapter, whose base may be large, and without time."""
    from tinylm.models.load import load
    from tinylm.reporter import SilentReporter
    from tinylm.transformer.build import count_parameters

    training, runtime, _ = config.training_parts(result.run)
    budget = training.budget.time
    seconds = SAMPLE_SECONDS if budget is None else min(SAMPLE_SECONDS, SAMPLE_SHARE * budget)
    end = time.monotonic() + seconds
    if result.is_adapter or LOADING_SECONDS * count_parameters(config.model)["total"] > seconds / 2:
        return ""
    model = load(result.run, device=runtime.device, reporter=SilentReporter())
    text = ""
    for chunk in model.generate(max_tokens=SAMPLE_TOKENS, seed=0, engine="torch", stream=True):
        text += chunk
        if time.monotonic() >= end:
            break
    return text


def _result_record(result: "TrainingResult") -> dict[str, Any]:
    bits = {name: getattr(result, name) for name in ("val_bits_per_byte", "best_val_bits_per_byte")}
    return {
        "run": str(result.run),
        "step": result.step,
        "val_loss": result.val_loss,
        "best_step": result.best_step,
        "best_val_loss": result.best_val_loss,
        **{name: value for name, value in bits.items() if value is not None},
        "parameters": result.parameters,
        "seconds": round(result.seconds, 3),
        "stopped_by": result.stopped_by,
    }


def show_examples(console: Console, examples: "Sequence[MarkedText]") -> None:
    """Print training conversations with their scored parts marked."""
    for number, parts in enumerate(examples, start=1):
        console.print_highlighted(f"Example {number}, scored parts marked:", parts)


def show_plan(console: Console, plan: "Plan", config: RunConfig, trainable_parameters: int, *, as_result: bool) -> None:
    """Print the plan and its notices: the notices on stderr, the plan on stderr or, with `as_result`, on stdout.

    trainable_parameters: their number; for an adapter, that of the adapter.
    """
    for notice in plan.notices:
        console.warn(notice)
    if as_result and console.as_json:
        values = config.to_json()
        parts = {name: values[name] for name in ("model", "tokenizer", "data", "training", "runtime", "adapter")}
        times = {name: round(getattr(plan, name), 1) for name in ("seconds", "evaluation_seconds")}
        cost = {"steps": plan.steps, **times, "memory": plan.memory, "parallel": plan.parallel}
        console.record({"parameters": trainable_parameters, **cost, **parts})
        return
    from tinylm.training.progress import plan_lines

    for name, text in plan_lines(plan, config, trainable_parameters).items():
        write = console.line if as_result else console.note
        write(f"{name + ':':<10} {text}", 11)
