"""One sitting of training on a run folder: puts model, data, optimizer and saved state together, and trains."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.adapters.adapter import adapter_layers, adapter_tensors
from tinylm.checkpoint import LastSave, RunFolder
from tinylm.compiler import prepare_compiler
from tinylm.config import RunConfig
from tinylm.device import autocast, choose_inference_dtype, empty_cache
from tinylm.errors import TinyLMError, UsageError, is_out_of_memory
from tinylm.evaluation import evaluate, rows_at_once
from tinylm.model.block import PreNormBlock
from tinylm.model.stack import Transformer
from tinylm.objective import Objective
from tinylm.tasks import Task
from tinylm.text.dataset import Batch
from tinylm.training.average import WeightAverage
from tinylm.training.eager import eagerly
from tinylm.training.optimizer import build_optimizer
from tinylm.training.state import TrainerState, optimizer_tensors, restore_optimizer
from tinylm.training.trainer import Evaluated, Event, Logged, Notice, Outcome, Trainer


def trained_tensors(model: Transformer, config: RunConfig) -> dict[str, Tensor]:
    """What of a model a run saves: all of it, or the adapter alone."""
    return dict(model.state_dict()) if config.adapter is None else adapter_tensors(adapter_layers(model))


class _RunStore:
    """The trainer's Store on a run folder."""

    def __init__(self, run: RunFolder, config: RunConfig) -> None:
        self._run = run
        self._config = config

    def save_best(self, model: Transformer, step: int, val_loss: float) -> None:
        self._run.save_best(trained_tensors(model, self._config), self._config, step, val_loss)

    def save_last(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> None:
        self._run.save_last(
            trained_tensors(model, self._config), optimizer_tensors(optimizer, model), state.to_json(), self._config
        )


def train_session(
    run: RunFolder,
    config: RunConfig,
    model: Transformer,
    task: Task,
    *,
    resume_from: LastSave | None = None,
    report: Callable[[Event], None],
    check_stop: Callable[[], None],
    started: float,
) -> Outcome:
    """Train until the budget is used, validation stops improving, or `check_stop` says so; everything lands in `run`.

    With `resume_from`, the model already has its weights; the optimizer and the trainer continue from its state.
    """
    training, runtime = config.training, config.runtime
    assert training is not None and runtime is not None
    torch.set_num_threads(runtime.threads)
    torch.manual_seed(training.seed)
    device = torch.device(runtime.device)
    model.to(device)
    optimizer = build_optimizer(model, training, runtime.dtype)
    trial = next(task.batch(0).split(training.micro_batch))
    if runtime.compile and not _compile_layers(model, trial, task.objective, runtime.dtype, report):
        config = replace(config, runtime=replace(runtime, compile=False))
        run.write_config(config)
    if resume_from is None:
        state = TrainerState(micro_batch=training.micro_batch)
    else:
        restore_optimizer(optimizer, model, resume_from.optimizer)
        state = TrainerState.from_json(resume_from.state)
        if training.budget.time is not None and state.seconds >= training.budget.time:
            raise UsageError(
                f"{run.path} has used its {training.budget.time:g} s; give a larger --time to go on with it."
            )
        run.write_config(config)
        run.cut_metrics(state.step)

    def validate() -> float:
        # Without a backward pass, four times what the device could train on at once fits it too.
        rows = min(rows_at_once(model.context), 4 * state.micro_batch)
        batches = task.validation(rows, training.eval_tokens)
        dtype = choose_inference_dtype("auto", device.type).value
        with eagerly():
            return evaluate(model, task.score, batches, dtype, lambda scored: check_stop()).loss

    def record(event: Event) -> None:
        if isinstance(event, Logged | Evaluated):
            run.append_metrics(metrics_record(event))
        report(event)

    return Trainer(
        model,
        task.objective,
        task.batch,
        validate,
        optimizer,
        training,
        dtype=runtime.dtype,
        total_steps=training.budget.total_steps(task.steps_per_epoch),
        state=state,
        store=_RunStore(run, config),
        report=record,
        check_stop=check_stop,
        started=started,
        inspect=(lambda: {"gradient_norms": layer_gradient_norms(model)}) if training.log_gradients else dict,
        average=WeightAverage(optimizer, training.average) if training.average else None,
    ).run()


def layer_gradient_norms(model: nn.Module) -> dict[str, float | None]:
    """The norm of all gradients of each layer together, and of those of each part outside of layers, by name.

    `None` where it is no finite number, as in a step that fp16 leaves out.
    """
    parts: list[str] = []
    norms: list[Tensor] = []  # each (2,)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            layer = re.match(r"(?:encoder\.)?layers\.\d+", name)
            parts.append(layer[0] if layer else name.rpartition(".")[0])
            norms.append(_scaled_norm(parameter.grad.detach()))
    of_part: dict[str, list[float]] = {}
    for part, (norm, scale) in zip(parts, torch.stack(norms).tolist() if norms else (), strict=True):
        of_part.setdefault(part, []).append(norm * scale)
    totals = {part: math.hypot(*values) for part, values in of_part.items()}
    return {part: total if math.isfinite(total) else None for part, total in totals.items()}


def _scaled_norm(gradient: Tensor) -> Tensor:
    """(2,): the norm of a gradient divided by its largest entry, and that entry; their product is the norm.

    Computed in fp32, since MPS has no float64; without the scale, squares of entries above 1.8e19 would overflow.
    """
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    scale = gradient.abs().max()
    norm = torch.linalg.vector_norm(gradient / scale.clamp(min=torch.finfo(gradient.dtype).tiny))
    return torch.stack([norm, scale])


def metrics_record(event: Logged | Evaluated) -> dict[str, Any]:
    """An event under the names that metrics.jsonl and --json use."""
    if isinstance(event, Evaluated):
        return {"step": event.step, "val_loss": event.val_loss, "seconds": round(event.seconds, 3)}
    return {
        "step": event.step,
        "loss": event.loss,
        "lr": event.lr,
        "grad_norm": event.grad_norm,
        "tokens_per_second": round(event.tokens_per_second, 1),
        "seconds": round(event.seconds, 3),
        **event.told,
    }


def _compile_layers(
    model: Transformer, batch: Batch, objective: Objective, dtype: str, report: Callable[[Event], None]
) -> bool:
    """Compile each layer, of either side, and try it. Returns whether it works; if not, one notice says why.

    Out of memory, fewer rows are tried; the trainer finds out by itself how many fit a step.
    """
    blocks = [module for module in model.modules() if isinstance(module, PreNormBlock)]
    device = model.device
    try:
        prepare_compiler()
    except TinyLMError as error:
        report(Notice(f"{error} Going on without torch.compile."))
        return False
    for block in blocks:
        block.compile()
    while True:
        try:
            with torch.random.fork_rng(), autocast(device.type, dtype):
                objective(model, batch.to(device)).nats.backward()
            return True
        except Exception as error:  # a compiler fails in ways of its own
            if not is_out_of_memory(error) or len(batch) == 1:
                torch._dynamo.reset()
                for block in blocks:
                    block._compiled_call_impl = None
                reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
                report(Notice(f"torch.compile failed ({reason[:120]}); going on without it."))
                return False
        finally:
            model.zero_grad(set_to_none=True)
        empty_cache(device)
        batch = next(batch.split(-(-len(batch) // 2)))
