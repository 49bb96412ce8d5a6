"""Short training runs on disk, which can be interrupted, resumed and compared."""

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.variants import small
from tinylm.adapters.adapter import adapter_layers, load_adapter_tensors
from tinylm.config.jobs import data_kinds, objective_for
from tinylm.config.model import ModelConfig
from tinylm.config.run import AdapterConfig, DataConfig, RunConfig, RuntimeConfig, TokenizerConfig
from tinylm.config.training import Budget, TrainingConfig
from tinylm.models.load_adapter import add_adapter, load_base_model
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config, read_model_config, read_weights, restore_model
from tinylm.run_directory.metrics_log import read_metrics
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import MASK, train_char
from tinylm.training.events import Event, Stepped
from tinylm.training.run import TrainingRun
from tinylm.training.state import TrainerState
from tinylm.training.trainer import StopTraining
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import build_model

TOKENIZER = train_char("abcdef .").with_special_tokens([MASK])
SIZES: dict[str, Any] = {"context": 8, "layers": 1, "width": 8, "heads": 2, "kv_heads": 1, "ffn_width": 8}
SHAPE = small(vocab_size=TOKENIZER.vocab_size, **SIZES, dropout=0.2, attention_dropout=0.2)
SETTINGS: dict[str, Any] = {"budget": Budget(steps=60), "batch_size": 5, "micro_batch": 2, "seed": 3}
SETTINGS |= {"lr": 0.02, "min_lr": 0.001, "warmup": 0.1, "eval_every": 12, "save_every": 15, "log_every": 7}

PLAIN: dict[str, Any] = {"device": "cpu", "dtype": "fp32", "compile": False, "threads": 1}


def config_of(
    adapter: AdapterConfig | None = None, model: ModelConfig = SHAPE, runtime: dict[str, Any] = PLAIN, **choices: Any
) -> RunConfig:
    kind = data_kinds(model.architecture)[0]
    objective = objective_for(model.architecture, kind)
    sizes: dict[str, Any] = dict.fromkeys(("characters", "bytes", "documents", "train_tokens", "val_tokens"), 0)
    return RunConfig(
        data=DataConfig(kind=kind, corpus=(), fingerprint="", train_characters=0, **sizes),
        version="0",
        created="now",
        model=model,
        tokenizer=TokenizerConfig(kind=TOKENIZER.kind, sha256=TOKENIZER.sha256),
        training=TrainingConfig(**{**SETTINGS, "objective": objective, **choices}),
        runtime=RuntimeConfig(**{**PLAIN, **runtime}),
        adapter=adapter,
    )


class Killed(BaseException):
    """Ends a run without a save, as SIGKILL does."""


@dataclass
class RunSession:
    """Trains a run until it is finished, or raises `end` in the first check from step `until` on."""

    path: Path
    tokens: TokenFolder
    until: int | None = None
    end: type[BaseException] = StopTraining
    events: list[Event] = field(default_factory=list)
    step: int = 0

    def reported(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    def report(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, Stepped):
            self.step = event.step

    def check(self) -> None:
        if self.until is not None and self.step >= self.until:
            raise self.end

    def begin(self, config: RunConfig) -> tuple[str, TrainerState]:
        run = RunDirectory.create(self.path, config, TOKENIZER)
        return self._train(run, config, self._model(config), resume_from=None)

    def resume(self, **changes: Any) -> tuple[str, TrainerState]:
        """Resume as `tinylm train --resume` does, with other random numbers and a newly built model."""
        torch.manual_seed(99)
        config = read_config(self.path)
        assert config.training is not None
        config = dataclasses.replace(config, training=dataclasses.replace(config.training, **changes))
        save = RunDirectory(self.path).load_last(config)
        if config.adapter is None:
            model = restore_model(config.while_training, save.read_weights(), self.path)
        else:
            model = self._model(config)
            load_adapter_tensors(adapter_layers(model), save.read_weights(), self.path)
        self.step = save.state["step"]
        return self._train(RunDirectory(self.path), config, model, resume_from=save)

    def _model(self, config: RunConfig) -> Transformer:
        assert config.training is not None
        if config.adapter is None:
            return build_model(config.while_training.model, config.training.seed)
        base = load_base_model(self.path, config.adapter, Path(config.adapter.base), "cpu").network
        add_adapter(base, config.adapter, config.training.seed)
        return base

    def _train(
        self, run: RunDirectory, config: RunConfig, model: Transformer, resume_from: Any
    ) -> tuple[str, TrainerState]:
        training = TrainingRun(run, config, model, TOKENIZER, self.tokens, resume_from)
        return training.train(self.report, self.check, started=time.monotonic())


def contents(path: Path) -> dict[str, Any]:
    """The contents of a run directory, without times."""

    def bytes_of(tensors: dict[str, Tensor]) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}

    def untimed(record: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in record.items() if "seconds" not in name and "per_second" not in name}

    config = read_config(path)
    save, best = RunDirectory(path).load_last(config), read_weights(path, read_model_config(path))
    return {
        "weights": bytes_of(save.read_weights()),
        "optimizer": bytes_of(save.read_optimizer()),
        "state": untimed(save.state),
        "best": (bytes_of(best.tensors), best.step, best.val_loss),
        "metrics": [untimed(record) for record in read_metrics(path)],
        "config": config,
    }


def adapter_for(path: Path, tokens: TokenFolder, **shape: Any) -> AdapterConfig:
    """Train a base model at `path`; returns the configuration of a LoRA on it."""
    RunSession(path, tokens).begin(config_of(model=dataclasses.replace(SHAPE, **shape), budget=Budget(steps=2)))
    lora: dict[str, Any] = {"rank": 2, "alpha": 4.0, "dropout": 0.2, "targets": ("q_proj", "v_proj", "down_proj")}
    return AdapterConfig(base=str(path), base_digest=load_model(path)[3].digest, **lora)
