"""What a training run says while it trains: its plan as lines, and its state as the text of a progress bar."""

from tinylm.config.run import RunConfig
from tinylm.config.settings import format_duration
from tinylm.config.training import SEQUENCE_GROWTHS
from tinylm.jobs.job import load_job
from tinylm.planning.plan import Plan
from tinylm.planning.recipes import MAX_EVALUATION_SHARE
from tinylm.reporter import counted, shorten_number
from tinylm.training.events import Evaluated, Event, GenerationBegan, Logged, Started, Stepped
from tinylm.transformer.build import count_parameters


def plan_lines(plan: Plan, config: RunConfig, trainable_parameters: int) -> dict[str, str]:
    """What a plan says, by its subject. trainable_parameters: their number; for an adapter, that of the adapter."""
    model, training, data = plan.model, plan.training, config.data
    trained = config.while_training.model
    joined = ""
    if training.join > 1:
        parameters = count_parameters(model)["total"]
        joined = f"; the best {training.join} are joined: width {model.width}, {parameters:,} parameters"
    assert data is not None
    micro_batch = f", micro-batch {training.micro_batch}" if training.micro_batch < training.batch_size else ""
    batch = f"{counted(training.batch_size, 'sequence')} per step{micro_batch}"
    if training.sequence_growth > 1:
        *early, whole = (model.context // n for n in reversed(SEQUENCE_GROWTHS) if n <= training.sequence_growth)
        lengths = f"{', '.join(map(str, early))}, then {whole}"
        batch = f"{training.batch_size} x {whole} tokens per step{micro_batch}, in sequences of {lengths}"
    about = "about " if training.budget.time is not None else ""
    held = {"ddp": "a replica", "fsdp": "a shard"}[plan.parallel]
    each = f" in the first of {plan.ranks} processes, with {held} of the model in each" if plan.ranks > 1 else ""
    evaluation_share = plan.evaluation_seconds / max(plan.seconds, 1e-9)
    # More than usual, as a chosen interval may cause
    is_long = plan.evaluation_seconds >= 1 and evaluation_share > MAX_EVALUATION_SHARE
    sampled = data.is_plain_text and training.eval_tokens < data.val_tokens
    lines = {
        "tokenizer": f"{config.tokenizer.kind}, {model.vocab_size:,} ids",
        "text": f"{counted(data.train_tokens, 'token')} to train on, "
        + ("the same to validate with" if data.by_heart else f"{data.val_tokens:,} to validate with")
        + (f" (each time {training.eval_tokens:,} of them)" if sampled else "")
        + (f" ({counted(data.val_records, 'record')})" if data.val_records else "")
        + (f"; {described}" if (described := load_job(training.objective).describe(config, data)) else ""),
        "model": f"{plan.parameters:,} parameters: {counted(trained.layers, 'layer')}, "
        f"{counted(trained.heads, 'head')}, width {trained.width}, context {trained.context}"
        + ("" if model.tie else ", untied")
        + (", compiled" if plan.runtime.compile else ""),
        "batch": batch,
        "length": f"{about}{counted(plan.steps, 'step')}, {plan.epochs:.1f} passes over the text"
        + (f", in {training.generations} generations" if training.generations > 1 else "")
        + joined
        + ("; averaged weights are saved" if training.average else ""),
        "time": f"about {format_duration(plan.seconds)}"
        + (f", {evaluation_share:.0%} of it for evaluations" if is_long else ""),
        "memory": f"about {plan.memory / 1e6:,.0f} MB{each}"
        + (", with activations computed again in the backward pass" if training.checkpoint_activations else ""),
    }
    if training.keep == "last":
        few = counted(data.val_records, "record") if data.val_records else counted(data.val_tokens, "token")
        lines["weights"] = f"the last ones are kept: {few} to validate with cannot show which are better"
    if data.by_heart:
        lines["goal"] = (
            "to learn so short a text by heart; a fraction for validation, such as 0.1, holds a part of it back"
        )
    if config.adapter is not None:
        shape = {"lora": "rank {} on", "bottleneck": "hidden size {} after"}[config.adapter.kind]
        targets = ", ".join(config.adapter.targets)
        lines["adapter"] = f"{shape.format(config.adapter.rank)} {targets}: {trainable_parameters:,} parameters"
    return lines


class RunProgress:
    """The best evaluation, the last losses and the speed of a run, from its events, as texts for a progress bar.

    best: the best evaluation so far, or ""
    """

    def __init__(self, started: Started) -> None:
        self._config, self._steps_per_epoch = started.config, started.steps_per_epoch
        self._loss = self._val_loss = self._speed = self.best = ""
        if started.best is not None:
            step, val_loss = started.best
            self.best = f"best {self.short(val_loss)}@{step}"

    def update(self, event: Event) -> None:
        """Take the figures of a log line, or of an evaluation that is compared with others. Those of a generation are
        forgotten when the next one begins.
        """
        match event:
            case GenerationBegan():
                self._loss = self._val_loss = ""
            case Logged():
                names = [name for name in self._config.row.metrics if name in event.metrics]
                self._loss = "  ".join([f"loss {event.loss:.3f}", *(f"{n} {event.metrics[n]:.3f}" for n in names)])
                self._speed = f"{event.tokens_per_second:,.0f} tok/s"
            case Evaluated() if event.tokens is None:
                evaluated = f"{self.short(event.val_loss)}@{event.step}"
                if event.best:
                    self.best, self._val_loss = f"best {evaluated}", ""
                else:
                    self._val_loss = f"val {evaluated}"

    def describe(self, event: Stepped) -> str:
        """The state after a step, in fields separated by two spaces, the most important first."""
        epochs, data, training = event.step / self._steps_per_epoch, self._config.data, self._config.training
        tokens = epochs * data.train_tokens if data is not None else 0
        seen = f"{shorten_number(tokens)} tokens {epochs:.2f} epochs"
        count = 1 if training is None else training.generations
        generation = f"generation {event.generation}/{count}" if count > 1 else ""
        fields = (generation, self.best, self._loss, seen, f"step {event.step}", self._val_loss, self._speed)
        return "  ".join(filter(None, fields))

    def short(self, val_loss: float) -> str:
        """A validation loss: bits per byte, where they exist, with the nats per token in parentheses."""
        bits = self._config.bits_per_byte(val_loss)
        return f"{val_loss:.3f}" if bits is None else f"{bits:.3f} bits/byte ({val_loss:.3f})"
