"""Options of the commands that use a trained model: the model, adapters, and beam search."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tinylm.commands.options import Panel, option
from tinylm.run_directory.find_run import run_names
from tinylm.run_directory.layout import ADAPTER_FILE, MODEL_FILE


def complete_model(incomplete: str) -> list[str]:
    """Shell completion: names of the models under checkpoints/."""
    return _complete(MODEL_FILE, incomplete)


def complete_adapter(incomplete: str) -> list[str]:
    """Shell completion: names of the adapters under checkpoints/."""
    return _complete(ADAPTER_FILE, incomplete)


def complete_run(incomplete: str) -> list[str]:
    """Shell completion: names of all runs under checkpoints/."""
    return _complete("config.json", incomplete)


def _complete(file: str, incomplete: str) -> list[str]:
    return [name for name in run_names(file) if name.startswith(incomplete)]


ModelOption = Annotated[
    Path | None,
    option(
        "Run, Hugging Face folder, GGUF file or hf:OWNER/NAME (default: the adapter's base, or the newest model).",
        None,
        "MODEL",
        *("--model", "-m"),
        autocompletion=complete_model,
    ),
]
ResumeAdapterOption = Annotated[
    Path | None,
    option(
        "Continue training this adapter; only length, intervals and --parallel may change.",
        Panel.RUN,
        "RUN",
        autocompletion=complete_adapter,
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    option(
        "Adapter directory or name; may be given several times. DIR=0.5 scales its update by 0.5.",
        None,
        "DIR",
        "--adapter",
        autocompletion=complete_adapter,
    ),
]


@dataclass(frozen=True)
class BeamSearchOptions:
    """The fields of BeamSearchConfig."""

    beams: Annotated[int, option("Beam width (default: 5).", Panel.ENCODER_DECODER, "N")] = 5
    length_penalty: Annotated[
        float,
        option(
            "Exponent of the length normalisation; higher favours longer targets (default: 1).",
            Panel.ENCODER_DECODER,
            "X",
        ),
    ] = 1.0
