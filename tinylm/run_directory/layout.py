"""The names of the files of a run, and of the hidden files beside it while it is created, replaced or written."""

from pathlib import Path

from tinylm.config.run import LAST, RunConfig

CHECKPOINTS = Path("checkpoints")  # where runs are written by default
MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"  # in last/
PEFT_WEIGHTS = "adapter_model.safetensors"
PEFT_FILES = ("adapter_config.json", PEFT_WEIGHTS)  # of a LoRA adapter, for PEFT only
FOREIGN_FILE = "tokenizer_config.json"  # of Hugging Face folders; runs have none
RUN_FILES = ("config.json", "tokenizer.json", "metrics.jsonl", "samples.jsonl", MODEL_FILE, ADAPTER_FILE, *PEFT_FILES)
RUN_FOLDERS = (LAST, "last.new", "last.old", "tokens")


def weights_file(config: RunConfig) -> str:
    """Name of the weights file of a model or an adapter."""
    return MODEL_FILE if config.adapter is None else ADAPTER_FILE


def staging_directory(path: Path) -> Path:
    """The directory in which a new run for `path` is prepared until its first save."""
    return path.with_name(f".{path.name}.tinylm-new")


def replaced_directory(path: Path) -> Path:
    """The path to which the run at `path` is moved while another one replaces it."""
    return path.with_name(f".{path.name}.tinylm-old")


def lock_file(path: Path) -> Path:
    """The file that is locked while a process writes the run at `path`."""
    return path.with_name(f".{path.name}.tinylm-lock")
