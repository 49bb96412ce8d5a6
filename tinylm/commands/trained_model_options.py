"""Options of the commands that use a trained model: the model and adapters."""

from pathlib import Path
from typing import Annotated

from tinylm.commands.option_groups import complete_runs, option
from tinylm.config.validation import Panel
from tinylm.run_directory.layout import ADAPTER_FILE

ModelOption = Annotated[
    Path | None,
    option(
        "Run, Hugging Face folder, GGUF file or hf:OWNER/NAME (default: the adapter's base, or the newest model).",
        None,
        "MODEL",
        *("--model", "-m"),
    ),
]
ResumeAdapterOption = Annotated[
    Path | None,
    option(
        "Continue training this adapter; only length, intervals and --parallel may change.",
        Panel.RUN,
        "RUN",
        autocompletion=complete_runs(ADAPTER_FILE),
    ),
]
AdapterOption = Annotated[
    list[str] | None,
    option(
        "Adapter directory or name; may be given several times. DIR=0.5 scales its update by 0.5.",
        None,
        "DIR",
        "--adapter",
        autocompletion=complete_runs(ADAPTER_FILE),
    ),
]
