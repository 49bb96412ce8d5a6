"""The diagnosis of this machine: versions, devices, speeds, memory, and problems with them."""

import contextlib
import copy
import functools
import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tinylm import __version__
from tinylm.config.presets import make_model_config
from tinylm.errors import TinyLMError
from tinylm.kernels.cpu import instruction_sets
from tinylm.kernels.process import SPIN_VARIABLES
from tinylm.machine.device import (
    can_compile,
    choose_generation_dtype,
    choose_training_dtype,
    describe_device,
    free_memory,
    must_compare_bf16,
)
from tinylm.machine.measure import (
    COMPARED_DTYPES,
    LoadMeter,
    Machine,
    choose_machine,
    layer_seconds_entry,
    matmul_rates_entry,
    measure_layer_seconds,
    measure_matmul_rates,
    slows_training,
)
from tinylm.reporter import Reporter, counted
from tinylm.system.files import SUBFOLDERS, cache_root, measure_usage, private_folder
from tinylm.system.machine_profile import identify_processor, usable_cores
from tinylm.transformer.build import build_model

PACKAGES = ("torch", "numpy", "tokenizers", "gigatoken", "safetensors", "gguf", "typer", "rich", "tqdm")
# Packages that not every platform or installation has, each with the features that need it.
OPTIONAL_PACKAGES = {
    "xllamacpp": "fast sampling on CPUs, and a server",
    "sacrebleu": "BLEU and chrF of translations",
    "zstandard": "texts in .zst files",
    "pyarrow": "texts in .parquet files",
    "tensorboardX": "metrics to TensorBoard",
    "wandb": "metrics to Weights & Biases",
    "matplotlib": "plots of results in Python",
    "ipywidgets": "progress bars in notebooks",
}
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd")  # of the kernel drivers of NVIDIA and AMD
LOAD_SECONDS = 0.5  # this process sleeps meanwhile
LOW_MEMORY, LOW_DISK = 1 << 30, 1 << 30  # bytes
MAX_ERROR = 1e-3  # see `computation_error`


@dataclass(frozen=True)
class Problem:
    """A problem of this machine.

    subject: one word, such as "gpu". broken: whether something does not work.
    message: the problem and usually its remedy. If the remedy is a command of tinylm, the command line adds it.
    """

    subject: str
    message: str
    broken: bool


@dataclass
class Diagnosis:
    """The findings: the machine, JSON values by section and name, and the problems."""

    machine: Machine
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def works(self) -> bool:
        """Whether no problem is `broken`. Slow computation and low memory or disk space count as working."""
        return not any(problem.broken for problem in self.problems)

    def warn(self, subject: str, message: str) -> None:
        """Add a problem with `broken` unset."""
        self.problems.append(Problem(subject, message, broken=False))

    def fail(self, subject: str, message: str) -> None:
        """Add a problem with `broken` set."""
        self.problems.append(Problem(subject, message, broken=True))


def diagnose(
    device: str, reporter: Reporter, *, refresh: bool = False, error_of: Callable[[str], float] | None = None
) -> Diagnosis:
    """Examine this machine, and the device (`auto` or a name) that training would use.

    refresh: repeat the measurements of the machine profile, on which the plans of later runs depend.
    error_of: by default `computation_error`

    Raises UsageError for an unknown or unavailable device, and with `refresh` TinyLMError or OSError if the
    measurements cannot be recorded.
    """
    machine = choose_machine(device, "auto", reporter)
    if refresh:
        reporter.note("Measuring this machine again...")
        dtypes = _measured_dtypes(machine.device)
        matmul_rates_entry(machine.device, dtypes).refresh(lambda: measure_matmul_rates(machine.device, dtypes))
        for dtype in dtypes if machine.layer_seconds is not None else ():
            layer_seconds_entry(machine.device, dtype).refresh(functools.partial(measure_layer_seconds, dtype))
        machine = choose_machine(device, "auto", reporter)
    diagnosis = Diagnosis(machine)
    diagnosis.sections["versions"] = {"tinylm": __version__, "python": platform.python_version()}
    diagnosis.sections["versions"] |= {name: _version(name) for name in PACKAGES}
    diagnosis.sections["optional_packages"] = {name: _version(name) for name in OPTIONAL_PACKAGES}
    _examine_devices(diagnosis, machine)
    _examine_threads(diagnosis)
    _examine_memory_and_disk(diagnosis, machine)
    _examine_cache(diagnosis)
    _examine_computation(diagnosis, machine, error_of or computation_error)
    return diagnosis


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _examine_devices(diagnosis: Diagnosis, machine: Machine) -> None:
    identity = identify_processor()
    rates = {machine.dtype: machine.matmul_rate}
    with contextlib.suppress(TinyLMError):  # the cache cannot be used
        rates = matmul_rates_entry(machine.device, _measured_dtypes(machine.device)).recorded() or {}
    available = ["cpu"]
    available += [f"cuda ({torch.cuda.get_device_name(index)})" for index in range(torch.cuda.device_count())]
    available += ["mps"] if torch.backends.mps.is_available() else []
    diagnosis.sections["devices"] = {
        "system": platform.platform(),
        "processor": identity["model name"] or identity["architecture"],
        "instructions": ", ".join(instruction_sets()),
        "available": available,
        "training": machine.reasons,
        "sampling": choose_generation_dtype("auto", machine.device).value,
        "matmul_tflops": {dtype: round(rate / 1e12, 3) for dtype, rate in rates.items()},
        "layer_microseconds": None if machine.layer_seconds is None else round(machine.layer_seconds * 1e6, 1),
        "compiled_layers": "faster" if machine.compiled_is_faster else "not faster, or not available",
    }
    if machine.device == "cpu" and any(Path(file).exists() for file in GPU_FILES):
        diagnosis.warn(
            "gpu",
            f"This machine seems to have a GPU, but torch {torch.__version__} cannot use it. Install the "
            "build of torch for its driver, as described under Get started on PyTorch's site.",
        )
    if not can_compile(machine.device) and machine.device == "cpu":
        diagnosis.warn(
            "compiler", "There is no C++ compiler, so that long runs are not compiled. Install g++, or set CXX."
        )


def _measured_dtypes(device: str) -> tuple[str, ...]:
    """The formats whose speed `choose_machine` needs: fp32 and bf16 if it compares them, else the chosen one."""
    if must_compare_bf16(device):
        return COMPARED_DTYPES
    return (choose_training_dtype("auto", device, matmul_rate=lambda dtype: 0.0).value,)


def _examine_threads(diagnosis: Diagnosis) -> None:
    found: dict[str, Any] = {
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        **{name: os.environ.get(name) for name in SPIN_VARIABLES},
    }
    diagnosis.sections["threads"] = found
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit is not None and torch.get_num_threads() < usable_cores():
        diagnosis.warn("threads", f"OMP_NUM_THREADS={limit} leaves cores unused; unset it to use all {usable_cores()}.")
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 1)
    meter = LoadMeter()
    time.sleep(LOAD_SECONDS)
    others = meter.read()
    if others is not None:
        found["cores_of_other_processes"] = round(others, 2)
        if slows_training(others, torch.get_num_threads(), meter.cores):
            diagnosis.warn(
                "load",
                f"Other processes take {others:.1f} of the {counted(meter.cores, 'core')}: training is up to twice as "
                "slow, and a measurement of the machine would be wrong. End them, or lower their priority with the "
                "command renice -n 19; the command top shows them.",
            )


def _examine_memory_and_disk(diagnosis: Diagnosis, machine: Machine) -> None:
    free = {"memory": free_memory("cpu"), "disk": _free_disk(Path()), "cache_disk": None}
    with contextlib.suppress(TinyLMError):
        free["cache_disk"] = _free_disk(cache_root())
    if machine.device != "cpu":
        free[f"{machine.device}_memory"] = free_memory(machine.device)
    diagnosis.sections["free_space"] = {
        f"{name}_gb": None if number is None else round(number / 1e9, 1) for name, number in free.items()
    }
    if (memory := free["memory"]) is not None and memory < LOW_MEMORY:
        diagnosis.warn(
            "memory", f"Only {memory / 1e6:,.0f} MB of memory are free; end other programs, or train a smaller `size`."
        )
    for name, place in (("disk", "the disk of this folder"), ("cache_disk", "the disk of the cache")):
        if (disk := free[name]) is not None and disk < LOW_DISK:
            diagnosis.warn("disk", f"Only {disk / 1e6:,.0f} MB are free on {place}.")


def _free_disk(path: Path) -> int | None:
    """Free bytes of the file system of `path`, which need not exist; `None` if unknown."""
    existing = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
    try:
        return shutil.disk_usage(existing).free
    except OSError:
        return None


def _examine_cache(diagnosis: Diagnosis) -> None:
    try:
        sizes = {f"{name}_mb": round(measure_usage(name).bytes / 1e6, 1) for name in SUBFOLDERS}
        diagnosis.sections["cache"] = {"folder": str(cache_root()), **sizes}
        for name in SUBFOLDERS:
            probe = private_folder(name) / ".doctor"
            probe.write_bytes(b"")
            probe.unlink()
    except TinyLMError as error:
        diagnosis.fail("cache", str(error))
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}"
        diagnosis.fail("cache", f"The cache cannot be written ({reason}); set TINYLM_CACHE to another folder.")


def _examine_computation(diagnosis: Diagnosis, machine: Machine, error_of: Callable[[str], float]) -> None:
    """Compare logits and gradients of a small model on the device with those of the CPU in fp64."""
    try:
        error = error_of(machine.device)
    except (RuntimeError, MemoryError) as failure:
        line = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        diagnosis.fail("computation", f"{describe_device(machine.device)} cannot compute a small model: {line}.")
        return
    diagnosis.sections["computation"] = {"device": machine.device, "largest_error_in_fp32": float(f"{error:.1e}")}
    if not error < MAX_ERROR:  # NaN, too
        diagnosis.fail(
            "computation",
            f"{describe_device(machine.device)} computes wrong logits or gradients (error {error:.1e}). Update torch "
            "and the driver, or choose another `device`.",
        )


def computation_error(device: str) -> float:
    """The largest difference between the logits and gradients of a small model in fp32 on `device` and in fp64 on the
    CPU, relative to the largest absolute value in the same tensor.
    """
    reference = build_model(make_model_config(vocab_size=64, preset="modern", size="nano"))
    model = copy.deepcopy(reference).to(device)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(64, (4, 64), generator=generator)
    pairs = zip(
        _logits_and_gradients(model, ids.to(device)), _logits_and_gradients(reference.double(), ids), strict=True
    )
    return max(((own.cpu() - exact).abs().max() / exact.abs().max()).item() for own, exact in pairs)


def _logits_and_gradients(model: Any, ids: Tensor) -> Iterator[Tensor]:
    """The logits of the model for ids (B, T), and the gradients of a cross-entropy with the ids as targets."""
    logits = model.logits(model(ids).hidden)  # (B, T, V)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    yield logits.detach()
    yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
