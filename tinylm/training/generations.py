"""Generations: parts of a run. Each trains a new model, which also learns from the model of the part before it.

A model that has read a text many times learns it by heart, and more passes do not help it. A student of it, with new
weights, becomes better than its teacher (born-again networks, Furlanello et al. 2018), and several of them together
are better than the best of them (`tinylm.training.join`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinylm.config.run import RunConfig
from tinylm.config.training import TrainingConfig
from tinylm.errors import TinyLMError, memory_errors
from tinylm.jobs.job import Task
from tinylm.planning.recipes import JOIN_LENGTH, JOIN_ROWS, JOIN_STEPS, MAX_WORSE
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.layout import GENERATION_FILES
from tinylm.run_directory.weights import read_header, require_tensors
from tinylm.training.join import join_models
from tinylm.transformer.architectures import Decoder, Transformer
from tinylm.transformer.build import build_model


@dataclass(frozen=True)
class Generations:
    """How the generations of the run in `directory` follow each other. They are numbered from 0.

    model: its weights are replaced. task: of the first generation
    config: of the run, whose model may join several generations
    """

    directory: RunDirectory
    config: RunConfig
    model: Transformer
    task: Task

    def keep_best(self, index: int, step: int, val_loss: float) -> None:
        """Keep the weights that the model has now, the best of generation `index` so far, in nats per token."""
        self.directory.save_generation(index, dict(self.model.state_dict()), self.config, step, val_loss)

    def task_of(self, number: int, dtype: str, check: Callable[[], None]) -> Task:
        """The task of generation `number`, from 1, with what its teacher predicts.

        dtype: of autocast. check: called often; may raise an exception

        Raises TinyLMError if the weights of the teacher are missing or damaged, and if memory runs out.
        """
        teacher = self._read(number - 1)
        try:
            with memory_errors():
                return self.task.with_soft_targets(teacher.to(self.model.device), dtype, check)
        except MemoryError:
            raise TinyLMError(
                f"Out of memory for the predictions of the model in {GENERATION_FILES[number - 1]}; the run is saved. "
                "Free memory and resume, or train with `generations=1`."
            ) from None

    def best(self, last: int) -> list[int]:
        """The generations up to `last`, from 0, that the run joins: those of the lowest validation losses, but none
        that is worse than the best by MAX_WORSE, such as one that ended soon after it began.

        Raises TinyLMError if the weights of one are missing or damaged.
        """
        files = [self.directory.path / name for name in GENERATION_FILES[: last + 1]]
        losses = [read_header(file).val_loss or math.inf for file in files]
        near = [index for index, loss in enumerate(losses) if loss <= (1 + MAX_WORSE) * min(losses)]
        return sorted(sorted(near, key=lambda index: losses[index])[: self._training.join])

    def join(self, numbers: Sequence[int], dtype: str, check: Callable[[], None]) -> Decoder:
        """The best weights of the generations of these numbers in one model.

        dtype, check: as in `task_of`. Raises TinyLMError as `task_of`, and MemoryError if memory runs out.
        """
        with memory_errors():
            members = [self._read(number).to(self.model.device).eval() for number in numbers]
            batches = (self.task.batch(step).ids[:JOIN_ROWS, :JOIN_LENGTH] for step in range(JOIN_STEPS))
            return join_models(members, self.config.model, self._training.join, batches, dtype, check)

    def _read(self, index: int) -> Decoder:
        model = build_model(self.config.while_training.model)
        assert isinstance(model, Decoder)  # by RunConfig
        tensors = self.directory.read_generation(index, self.config)
        require_tensors(tensors, model.state_dict(), self.directory.path / GENERATION_FILES[index])
        model.load_state_dict(tensors)
        return model

    def renew_weights(self, number: int) -> None:
        """Give the model the first weights of generation `number`, from a seed of its own."""
        first = build_model(self.config.while_training.model, self._training.seed + number)
        self.model.load_state_dict(first.state_dict())

    @property
    def _training(self) -> TrainingConfig:
        return self.config.training_parts(self.directory.path).training
