"""The result of training, as values, as curves and as a notebook shows it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinylm.config.run import describe_loss
from tinylm.config.settings import format_duration
from tinylm.errors import UsageError
from tinylm.run_directory.metrics_log import History
from tinylm.system.html import FEW, Points, html_table, svg_plot

if TYPE_CHECKING:
    from tinylm.models.model import Model

STOP_REASONS = {
    "steps": "all steps are done",
    "epochs": "all epochs are done",
    "time": "the time is up",
    "patience": "the validation loss has stopped improving",
    "signal": "a signal stopped it",
}
HEADROOM = 1.1  # the top of the curves over the highest validation loss: training begins far above it


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingResult:
    """The result of training a run, over all of its sessions. A notebook shows it as curves and a table.

    run: the run directory
    history: losses and other metrics by step, as columns of training and of validation
    stopped_by: steps, epochs, time, patience, or signal
    step, epochs: optimizer steps, and passes over the training data, so far
    val_loss: the last validation loss, in `loss_unit`; after a signal before the first evaluation, that of the last
        step on few tokens, or `None` if there was no time for it
    best_val_loss, best_step: the lowest validation loss of trained weights, and its step
    val_bits_per_byte, best_val_bits_per_byte: the two losses in bits per byte; `None` except on plain text
    kept_step: the step of the weights that are kept: `best_step` or, if the validation data are few, the last one
    parameters: number of trainable parameters; of a run that joins generations, of the model that it keeps
    seconds: training time, in all sessions
    signal_number: the signal that stopped this session, 0 if none did
    base: the base model of an adapter; `None` for a run of a model
    loss_unit: such as nats per token
    """

    run: Path
    history: History
    stopped_by: str
    step: int
    epochs: float
    val_loss: float | None
    best_val_loss: float | None
    best_step: int
    parameters: int
    seconds: float
    kept_step: int
    val_bits_per_byte: float | None = None
    best_val_bits_per_byte: float | None = None
    signal_number: int = 0
    base: Path | None = None
    loss_unit: str = "nats per token"
    _folder: Path = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Record the working directory, which the program may change: the paths are relative to it."""
        object.__setattr__(self, "_folder", _working_directory())

    def __repr__(self) -> str:
        values = [f"{name} {value}" for name, value in self._rows().items()]
        return f"TrainingResult({str(self.run)!r}: " + ";\n      ".join(values) + ")"

    def _repr_html_(self) -> str:
        """What a notebook shows: the curves of the loss, and a table."""
        curves = self._curves()
        title = f"loss in {self.loss_unit}, by step"
        return svg_plot(curves, title, _top(curves)) + html_table({"run": str(self.run), **self._rows()})

    def _rows(self) -> dict[str, str]:
        best = "-"
        if self.best_val_loss is not None:
            loss = describe_loss(self.best_val_loss, self.best_val_bits_per_byte, self.loss_unit)
            best = f"{loss}, at step {self.best_step:,}"
        return {
            "best validation loss": best,
            "stopped": f"at step {self.step:,}, {self.epochs:.1f} epochs: {STOP_REASONS[self.stopped_by]}",
            "training time": format_duration(self.seconds),
            "parameters": f"{self.parameters:,}",
        }

    def _curves(self) -> dict[str, Points]:
        """The training and the validation loss by step, without evaluations on few tokens."""
        training, validation = self.history.training, self.history.validation
        few = validation.get("val_tokens", [None] * len(validation["step"]))
        logged = zip(training["step"], training["loss"], strict=True)
        evaluations = zip(validation["step"], validation["val_loss"], few, strict=True)
        return {
            "training": [(step, loss) for step, loss in logged if loss is not None],
            "validation": [(step, loss) for step, loss, tokens in evaluations if tokens is None],
        }

    def plot(self, axes: Any = None) -> Any:
        """Draw the curves of the loss with matplotlib. axes: matplotlib's Axes; default: those of a new figure.

        Returns the Axes. Raises UsageError without matplotlib.
        """
        try:
            from matplotlib import pyplot
        except ImportError:
            raise UsageError("Plots need the package matplotlib; install it: pip install matplotlib") from None
        axes = pyplot.subplots()[1] if axes is None else axes
        curves = self._curves()
        for name, points in curves.items():
            steps, losses = [step for step, _ in points], [loss for _, loss in points]
            axes.plot(steps, losses, label=name, marker="." if len(points) < FEW else "")
        axes.set(xlabel="step", ylabel=f"loss, {self.loss_unit}", title=self.run.name)
        axes.set_ylim(top=_top(curves))
        axes.legend()
        return axes

    def load(self) -> "Model":
        """Load the model with the weights that are kept, those of `kept_step`.

        If the run trained an adapter, load it on its base model.
        """
        from tinylm.models.load import load

        folder = Path() if self._folder == _working_directory() else self._folder
        run = folder / self.run
        return load(run) if self.base is None else load(folder / self.base, adapters=run)

    @property
    def is_adapter(self) -> bool:
        """Whether the run trained an adapter."""
        return self.base is not None


def _working_directory() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it was deleted
        return Path()


def _top(curves: dict[str, Points]) -> float | None:
    """The highest loss that curves show; `None` for all of them."""
    losses = [loss for _, loss in curves["validation"]]
    return HEADROOM * max(losses) if len(losses) > 1 else None
