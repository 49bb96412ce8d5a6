"""One step of tinylm's Trainer on a fixed batch, for the benchmarks."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from tinylm.model.decoder import Decoder
from tinylm.model.stack import Transformer
from tinylm.model_config import ModelConfig
from tinylm.objectives.loss import next_token
from tinylm.text.batches import Batch
from tinylm.training.graphed_model import GraphedModel
from tinylm.training.optimizer import build_optimizer
from tinylm.training.state import TrainerState
from tinylm.training.trainer import StopTraining, Trainer, TrainerHooks, TrainingJob
from tinylm.training_config import Budget, TrainingConfig

NEVER = 10**9  # steps


class NoStore:
    """A trainer's Store that saves nothing."""

    saved_step = -1

    def save_best(self, model: Transformer, step: int, val_loss: float) -> None: ...

    def save_last(self, model: Transformer, optimizer: torch.optim.Optimizer, state: TrainerState) -> float:
        return 0.0


def tinylm_step(
    model: Decoder, batch: Batch, dtype: str, steps: int = 1, graphed: GraphedModel | None = None
) -> Callable[[], int]:
    """A function that runs steps of the Trainer, without evaluation, saves, logging and the end of a run.

    It returns the rows of the micro-batches, which are fewer than those of the batch after memory ran out.
    """
    config = TrainingConfig(
        budget=Budget(steps=NEVER),
        eval_every=NEVER,
        save_every=NEVER,
        log_every=NEVER,
        batch_size=len(batch),
        micro_batch=len(batch),
        lr=1e-3,
        min_lr=1e-3,
        warmup=0.0,
        schedule="constant",
    )
    task = SimpleNamespace(objective=lambda progress: next_token, batch=lambda number: batch, steps_per_epoch=1)
    job = TrainingJob(model, task, build_optimizer(model, config, dtype), config, dtype, graphed=graphed)

    def step() -> int:
        checks = iter(range(steps + 1))

        def stop_after_steps() -> None:
            if next(checks) == steps:
                raise StopTraining

        state = TrainerState(step=1, micro_batch=len(batch))
        Trainer(job, state, NoStore(), TrainerHooks(check_stop=stop_after_steps), started=0.0).run()
        return state.micro_batch

    return step


def random_batch(config: ModelConfig, rows: int) -> Batch:
    """Random ids and targets, (rows, context) each, always the same."""
    tokens = torch.randint(config.vocab_size, (rows, config.context + 1), generator=torch.Generator().manual_seed(0))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
