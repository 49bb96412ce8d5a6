"""tinylm export: write a model or an adapter in the format of another tool."""

from pathlib import Path
from typing import Annotated

import typer

from tinylm.commands.option_groups import complete_runs, with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.config.validation import Panel, Setting
from tinylm.run_directory.layout import MODEL_FILE


@with_option_groups
def export_model(
    out: Annotated[
        Path,
        Setting("Folder, or for gguf and html file, to write.", Panel.RUN, metavar="PATH", flags=("--out", "-o")),
    ],
    to: Annotated[
        str,
        Setting(
            "hf: folder for transformers, vLLM. gguf: file for llama.cpp, ollama. html: page. peft: LoRA adapter.",
            None,
            ("hf", "gguf", "html", "peft"),
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Argument(
            help="Run, Hugging Face folder or GGUF file (default: the newest model); for peft, an adapter (required).",
            show_default=False,
            autocompletion=complete_runs(MODEL_FILE),
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        Setting(
            "Number format (default: their own; gguf: f16). q are for gguf; html: f32, f16, int8 (default).",
            None,
            metavar="f32|f16|bf16|q8_0|q5_1|q4_0",
        ),
    ] = None,
    base: Annotated[
        Path | None,
        Setting(
            "Base model of the adapter, for peft (default: beside it, in checkpoints/, or where it was).",
            None,
            metavar="MODEL",
        ),
    ] = None,
    force: Annotated[bool, Setting("Replace an earlier export.", Panel.RUN)] = False,
    *,
    output: OutputOptions,
) -> None:
    """Write a model for transformers, vLLM, llama.cpp, ollama or a browser, or an adapter for PEFT, and verify it."""
    from tinylm.models import exporting

    console = output.console()
    exported = exporting.export_model(model, to=to, out=out, dtype=dtype, base=base, force=force, reporter=console)
    if to == "peft":
        console.note(f"Checked: logits with the exported adapter differ by at most {exported.difference:.1e}.")
    else:
        rounding = dtype or exporting.DEFAULT_DTYPES.get(to, "f32")
        same = "the written tensors and tokens are the model's"
        logits = "" if exported.difference is None else f", and logits differ by {exported.difference:.1e}"
        if rounding != "f32":
            same += f", up to the rounding of {rounding}"
        console.note(f"Checked: {same}{logits}.")
    if console.as_json:
        console.record({"path": str(exported.path), "family": exported.family, "difference": exported.difference})
    else:
        console.result(str(exported.path))
