"""Generations: parts of a run. Each trains a new model, which also learns from the model of the part before it.

A model that has read a text many times learns it by heart, and more passes do not help it. A student of it, with new
weights, becomes better than its teacher (born-again networks, Furlanello et al. 2018).
"""

from collections.abc import Callable
from dataclasses import dataclass

from tinylm.config.run import RunConfig
from tinylm.errors import TinyLMError, memory_errors
from tinylm.jobs.job import Task
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.layout import TEACHER_FILES
from tinylm.run_directory.weights import require_tensors
from tinylm.transformer.architectures import Decoder, Transformer
from tinylm.transformer.build import build_model


@dataclass(frozen=True)
class Generations:
    """How the generations of the run in `directory` follow each other. They are numbered from 0.

    model: its weights are replaced. task: of the first generation
    """

    directory: RunDirectory
    config: RunConfig
    model: Transformer
    task: Task

    def keep_teacher(self, number: int, step: int) -> None:
        """Keep the weights that the model has now, those from which generation `number` learns."""
        self.directory.save_teacher(number, dict(self.model.state_dict()), self.config, step)

    def task_of(self, number: int, dtype: str, check: Callable[[], None]) -> Task:
        """The task of generation `number`, from 1, with what its teacher predicts.

        dtype: of autocast. check: called often; may raise an exception

        Raises TinyLMError if the weights of the teacher are missing or damaged, and if memory runs out.
        """
        teacher = build_model(self.config.model)
        assert isinstance(teacher, Decoder)  # by RunConfig
        tensors = self.directory.read_teacher(number, self.config)
        require_tensors(tensors, teacher.state_dict(), self.directory.path / TEACHER_FILES[number - 1])
        teacher.load_state_dict(tensors)
        try:
            with memory_errors():
                return self.task.with_soft_targets(teacher.to(self.model.device), dtype, check)
        except MemoryError:
            raise TinyLMError(
                f"Out of memory for the predictions of the teacher in {TEACHER_FILES[number - 1]}; the run is saved. "
                "Free memory and resume, or train with `generations=1`."
            ) from None

    def renew_weights(self, number: int) -> None:
        """Give the model the first weights of generation `number`, from a seed of its own."""
        training = self.config.training_parts(self.directory.path).training
        self.model.load_state_dict(build_model(self.config.model, training.seed + number).state_dict())
