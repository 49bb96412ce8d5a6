"""Generations: parts of a run. Each trains a new model, which also learns from the best model before it.

A model that has read a text many times learns it by heart, and more passes do not help it. A student of it, with new
weights, becomes better than its teacher (born-again networks, Furlanello et al. 2018).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tinylm.config.run import RunConfig
from tinylm.jobs.job import Task
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.weights import require_tensors
from tinylm.transformer.architectures import Decoder, Transformer
from tinylm.transformer.build import build_model


@dataclass(frozen=True)
class Generations:
    """What a trainer needs to begin a generation of the run in `directory`, all but the first.

    model: its weights are replaced. task: of the first generation
    """

    directory: RunDirectory
    config: RunConfig
    model: Transformer
    task: Task

    def keep_teacher(self, number: int) -> None:
        """Keep the weights for inference, from which generation `number` learns."""
        self.directory.keep_teacher(number, self.config)

    def taught_task(self, number: int, dtype: str, check: Callable[[], None]) -> Task:
        """The task of generation `number`, from 1. dtype: of autocast. check: called often; may raise an exception

        Raises TinyLMError if the weights of the teacher are missing or damaged.
        """
        teacher = build_model(self.config.model).to(self.model.device)
        assert isinstance(teacher, Decoder)  # the only models whose runs have generations
        tensors = self.directory.read_teacher(number, self.config)
        require_tensors(tensors, teacher.state_dict(), self.directory.path)
        teacher.load_state_dict(tensors)
        return self.task.taught_by([teacher], dtype, check)

    @torch.no_grad()
    def renew_weights(self, number: int) -> None:
        """Give the model the first weights of generation `number`, from a seed of its own."""
        training = self.config.training_parts(self.directory.path).training
        new = build_model(self.config.model, training.seed + number)
        self.model.load_state_dict(new.state_dict())
