"""Training on a run directory: build the optimizer, compile, restore a save, capture CUDA graphs, run the trainer."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tinylm.config.jobs import JOBS
from tinylm.config.run import RunConfig, RuntimeConfig
from tinylm.config.training import SEQUENCE_GROWTHS, TrainingConfig
from tinylm.errors import TinyLMError
from tinylm.evaluation.loop import evaluation_mode
from tinylm.jobs.job import Task, load_job
from tinylm.kernels.cpu import ThreadPlacement, can_place_threads
from tinylm.kernels.graphs import discard_compiled, force_eager
from tinylm.kernels.process import keep_freed_blocks
from tinylm.machine.device import DTYPES, weights_dtype
from tinylm.machine.measure import LoadMeter, slows_training
from tinylm.models.teachers import Teacher
from tinylm.objectives.loss import LanguageModel
from tinylm.planning.memory import require_repeatable_dropout
from tinylm.run_directory.directory import LastSave, RunDirectory
from tinylm.run_directory.layout import FIRST_FILE
from tinylm.run_directory.loading import TrainedWeights, trained_weights
from tinylm.run_directory.weights import WHOLE, Shard, require_tensors
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.text.batches import Batch
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.events import Evaluated, Event, Logged, Notice, Sampled, metrics_record
from tinylm.training.execution import GraphedModel, capture_graphs, checkpoint_activations, compile_layers
from tinylm.training.generations import Generations
from tinylm.training.optimizer import build_optimizer
from tinylm.training.parallel import load_shards, rank_shard, shard_model
from tinylm.training.run_store import open_store
from tinylm.training.state import TrainerState, restore_optimizer
from tinylm.training.trainer import Trainer
from tinylm.training.validation import RunSampler
from tinylm.transformer.architectures import Transformer
from tinylm.transformer.build import count_parameters
from tinylm.transformer.layers import Dropout

MAX_WHOLE_LAYERS = 16  # of a model that is compiled as a whole; not measured on a GPU


@dataclass
class TrainingRun:
    """A run directory, and the objects to train its model with.

    resume_from: the save whose weights `model` or `rows` has, and whose optimizer and trainer state are restored;
        `None` for a new run. With replicas, only rank 0 reads its files.
    ranks: the processes that train the model together
    parallel: ddp or fsdp: every rank has a replica or a shard of the model
    rows: the rows of the weights on this rank, if the model is on the meta device
    teachers: the models whose predictions the model learns from
    """

    directory: RunDirectory
    config: RunConfig
    model: Transformer
    tokenizer: Tokenizer
    tokens: TokenFolder
    resume_from: LastSave | None = None
    ranks: Ranks = ONE_RANK
    parallel: str = "ddp"
    rows: dict[str, Tensor] | None = None
    teachers: tuple[Teacher, ...] = ()
    _first_model: Transformer | None = field(default=None, init=False, repr=False)

    @property
    def training(self) -> TrainingConfig:
        """`config.training`, which every training run has."""
        return self.config.training_parts(self.directory.path).training

    @property
    def runtime(self) -> RuntimeConfig:
        """`config.runtime`, which every training run has."""
        return self.config.training_parts(self.directory.path).runtime

    @functools.cached_property
    def task(self) -> Task:
        """The task of `training.objective` on the tokens: batches and objectives."""
        context = self.training.sequence_length or self.config.model.context
        model = replace(self.config.model, context=context)
        frozen: dict[str, Any] = {}
        if JOBS[self.training.objective].has_reference:
            frozen["reference"] = self._reference
        if self.teachers:
            frozen["teachers"] = [teacher.network for teacher in self.teachers]
        job = load_job(self.training.objective)
        return job.task(self.tokens, self.tokenizer, model, self.training, **frozen)

    @contextlib.contextmanager
    def _reference(self) -> Iterator[LanguageModel]:
        """Context manager for the model that training started from, in evaluation mode: the base of an adapter, or a
        copy of the first weights.
        """
        model = self.model if self._first_model is None else self._first_model
        with evaluation_mode(model), self.trained_weights.disabled(model), force_eager():
            yield model

    @property
    def trained_weights(self) -> TrainedWeights:
        """The weights that are trained and saved: all, or those of an adapter."""
        return trained_weights(self.config.adapter)

    @property
    def shard(self) -> Shard:
        """The part of the trained parameters and of the optimizer's state on this rank.

        With an adapter, they are replicated, and only the base is sharded.
        """
        return rank_shard(self.parallel, self.config, self.ranks)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and validation loss of the best evaluation before the save; `None` for a new run."""
        state = {} if self.resume_from is None else self.resume_from.state
        is_known = state.get("best_loss") is not None and state.get("best_step") != 0  # see `TrainerState.from_json`
        return (state.get("best_step", 0), state["best_loss"]) if is_known else None

    @property
    def trainable_parameters(self) -> int:
        """The number of trainable parameters."""
        return count_parameters(self.model, trained=True)["total"]

    def train(
        self,
        report: Callable[[Event], None] = lambda event: None,
        check_stop: Callable[[], None] = lambda: None,
        *,
        started: float,
    ) -> tuple[str, TrainerState]:
        """Train until the budget is used up, the validation loss stops improving, or `check_stop` raises StopTraining.

        Weights, state and metrics are written to the run directory. Returns why training ended (see `Trainer.run`), and
        the state at the end.

        report: called with every event
        check_stop: called between steps and between evaluation batches
        started: the `time.monotonic()` from which the time of this session counts

        Raises the errors of `Trainer.run`, SaveError if the run directory cannot be written, TinyLMError if the save is
        damaged or does not fit the model, and UsageError if activations cannot be checkpointed with dropout on this
        device, or if Muon has no weight matrix to train.
        """
        # Threads, memory and random numbers
        if self.training.checkpoint_activations:
            require_repeatable_dropout(self.runtime.device, self.config.model, self.config.adapter)
        torch.set_num_threads(self.ranks.share_threads(self.runtime.threads))
        keep_freed_blocks()
        torch.manual_seed(self.training.seed)

        # The model: device, number format, shards
        if self.parallel == "ddp":
            self.model.to(self.runtime.device)
        set_weights_dtype(self.model, DTYPES[self.runtime.dtype])
        has_reference = JOBS[self.training.objective].has_reference
        if has_reference:
            disable_dropout(self.model)
        if self.parallel == "fsdp":
            shard_model(self.model, self.runtime.device, self.runtime.dtype)
            if self.rows is not None:
                load_shards(self.model, self.rows, self.runtime.device)
                self.rows = None

        # The models that it is compared with
        for teacher in self.teachers:
            set_weights_dtype(teacher.network.to(self.runtime.device), DTYPES[self.runtime.dtype])
        if has_reference and self.config.adapter is None:
            self._first_model = self._copy_of_first_model()

        # The optimizer, and how layers compute
        optimizer = build_optimizer(self.model, self.training, self.runtime.dtype)
        if self.training.checkpoint_activations:
            checkpoint_activations(self.model)
        self._compile(report)

        # The state: new, or of the last save
        if self.resume_from is None:
            state = TrainerState(micro_batch=self.training.micro_batch)
        else:
            restore_optimizer(optimizer, self.model, self._read_optimizer(self.resume_from))
            state = TrainerState.from_json(self.resume_from.state)
            if state.generation >= self.training.generations:
                raise TinyLMError(f"The saved training state is damaged (generation is {state.generation}).")
            self.directory.write_config(self.config)
            self.directory.truncate_metrics(state.step, state.last_eval_step, state.joined_step)
        saved_step = -1 if self.resume_from is None else state.step

        # The loop
        sampler = RunSampler(self.model, self.tokenizer, self.config)
        placement = self._thread_placement()
        opened_store = open_store(self.directory, self.config, self.ranks, self.shard, saved_step, state.save_seconds)
        with self.ranks.peer_errors(), opened_store as store, placement or contextlib.nullcontext():

            def record(event: Event) -> None:
                """Write the event into the run, and report it."""
                store.check()
                if isinstance(event, Evaluated):
                    event = replace(event, val_bits_per_byte=self.config.bits_per_byte(event.val_loss))
                if isinstance(event, Logged | Evaluated):
                    self.directory.append_metrics(metrics_record(event))
                report(event)
                if isinstance(event, Evaluated) and self.ranks.is_first and (text := sampler.sample_if_due(event)):
                    sampled = Sampled(event.step, event.val_loss, round(event.seconds, 3), text)
                    self.directory.append_sample(dataclasses.asdict(sampled))
                    report(sampled)

            trainer = Trainer(
                model=self.model,
                task=self.task,
                optimizer=optimizer,
                config=self.training,
                state=state,
                store=store,
                started=started,
                dtype=self.runtime.dtype,
                ranks=self.ranks,
                graphed=self._capture_graphs(state.micro_batch, report),
                generations=self._generations(),
                report=record,
                check_stop=check_stop,
                step_done=placement.step if placement else lambda tokens, seconds: None,
            )
            return trainer.run(), state

    def _generations(self) -> Generations | None:
        if self.training.generations == 1:
            return None
        return Generations(self.directory, self.config, self.model, self.task)

    def _copy_of_first_model(self) -> Transformer:
        """A frozen copy of the model with the weights that training started from, which the run keeps."""
        model = copy.deepcopy(self.model).requires_grad_(False).float()
        tensors: dict[str, Tensor] = {}
        if self.ranks.is_first and self.resume_from is None:
            self.directory.write_first_weights(dict(model.state_dict()), self.config)
        elif self.ranks.is_first:
            tensors = self.directory.read_first_weights(self.config)
            require_tensors(tensors, model.state_dict(), self.directory.path / FIRST_FILE)
        if self.resume_from is not None:
            model.load_state_dict(self.ranks.broadcast(tensors))
        set_weights_dtype(model, DTYPES[self.runtime.dtype])
        return model

    def _thread_placement(self) -> ThreadPlacement | None:
        """Chooses the cores of this process beside busy processes, if it is the only rank and computes on a CPU."""
        threads = torch.get_num_threads()
        if self.runtime.device != "cpu" or self.ranks.size > 1 or not can_place_threads():
            return None
        meter = LoadMeter()
        return ThreadPlacement(meter.read, lambda others: slows_training(others, threads, meter.cores))

    def _read_optimizer(self, save: LastSave) -> dict[str, Tensor]:
        """The saved state of the optimizer; with sharded parameters, the rows of this rank."""
        if self.shard != WHOLE:
            return save.read_optimizer(self.shard)
        return self.ranks.broadcast(save.read_optimizer() if self.ranks.is_first else {})

    def _compile(self, report: Callable[[Event], None]) -> None:
        """Compile the layers if `runtime.compile` is set; record it as False if that fails on a rank or with shards."""
        if not self.runtime.compile:
            return
        compiled = False
        if self.parallel == "fsdp":
            report(Notice("Layers are not compiled, since the weights are sharded."))
        else:
            batches, objective = self._micro_batches(), self.task.objective(1.0)
            whole = self._is_compiled_as_a_whole(batches)
            compiled = compile_layers(self.model, batches, objective, self.runtime.dtype, report, whole)
        if not all(self.ranks.gather(compiled)):
            if compiled:  # but not on all ranks
                discard_compiled(self.model.modules())
            self.config = replace(self.config, runtime=replace(self.runtime, compile=False))
            self.directory.write_config(self.config)

    def _is_compiled_as_a_whole(self, batches: list[Batch]) -> bool:
        """Whether it is worth the time: on a GPU, for few layers and one shape of micro-batches (`_micro_batches`)."""
        has_one_shape = len({batch.ids.shape for batch in batches}) == 1 and all(
            batch.source is None and batch.lengths is None for batch in batches
        )
        is_shallow = self.config.model.layers <= MAX_WHOLE_LAYERS and self.config.model.experts == 1
        is_plain = has_one_shape and is_shallow and not self.training.checkpoint_activations
        return self.runtime.device == "cuda" and is_plain

    def _capture_graphs(self, micro_batch: int, report: Callable[[Event], None]) -> GraphedModel | None:
        """The model with CUDA graphs; `None` on other devices, and where a step cannot use them (decision 041).

        They are for models whose only input is ids, and whose tensor sizes do not depend on the tokens, as those of
        experts do. Not tried: several ranks.

        micro_batch: of the next step
        """
        if (
            self.runtime.device != "cuda"
            or self.ranks.size > 1
            or self.config.model.experts > 1
            or self.training.checkpoint_activations
            or micro_batch < self.training.batch_size
        ):
            return None
        batches = self._micro_batches()
        if any(
            batch.source is not None or batch.segments is not None or batch.lengths is not None for batch in batches
        ):
            return None
        return capture_graphs(self.model, batches, self.runtime.dtype, report)

    def _micro_batches(self) -> list[Batch]:
        """Micro-batches of the first batch on this rank, one of each size that a step may have."""
        batch = self.task.batch(0)
        own = self.ranks.part(batch)
        by_rows = {len(part): part for part in (own if len(own) else batch).split(self.training.micro_batch)}
        growths = [parts for parts in SEQUENCE_GROWTHS if parts <= self.training.sequence_growth]
        return [part.split_windows(parts) for parts in growths for part in by_rows.values()]


def disable_dropout(model: Transformer) -> None:
    """Turn off the model's own dropout, in place; adapters keep theirs.

    The reference has none: with dropout in the model alone, the loss would differ from log 2 before anything is
    learned.
    """
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0


@torch.no_grad()
def set_weights_dtype(model: Transformer, dtype: torch.dtype) -> None:
    """Prepare the weights, in place, for training under autocast to `dtype`.

    For bf16, the frozen matrices of linear layers are converted: autocast would round them at each use, and store the
    result for the backward pass. So the model computes the same as before. Other frozen parameters are then copied,
    since one that is mapped from a file keeps the whole file in memory. Trained parameters stay fp32, since 16 bits
    lose small updates.
    """
    if weights_dtype(model) != dtype:
        model.float()  # 16-bit weights are used only if autocast computes in the same format
    if dtype != torch.bfloat16:
        return
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad or parameter.dtype == dtype:
                continue
            is_matrix = isinstance(module, nn.Linear) and parameter.dim() > 1
            parameter.data = parameter.data.to(dtype) if is_matrix else parameter.data.clone()
