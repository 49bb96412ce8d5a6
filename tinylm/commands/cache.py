"""tinylm cache: list the cache folder, or clear it."""

from typing import Annotated

import typer

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.options import OutputOptions
from tinylm.config.validation import Panel, Setting
from tinylm.errors import UsageError
from tinylm.reporter import shorten_number
from tinylm.system.files import SUBFOLDERS, cache_root, clear_cache, measure_usage

KEPT = "machine"  # cleared only by name, since the plans of later runs depend on the measurements


@with_option_groups
def cache(
    parts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Parts of the cache (default: all; with --clear, all but machine).",
            metavar="|".join(SUBFOLDERS),
            show_default=False,
            autocompletion=lambda incomplete: [name for name in SUBFOLDERS if name.startswith(incomplete)],
        ),
    ] = None,
    clear: Annotated[bool, Setting("Delete these parts of the cache.", Panel.RUN)] = False,
    *,
    output: OutputOptions,
) -> None:
    """List or clear the cache: encoded texts, text statistics, models for llama.cpp, compiled code, measurements.

    Everything in the cache can be made again. To resume a run whose encoded text was deleted, name its text files; to
    use an adapter whose base is elsewhere, name the base with --model.
    """
    console = output.console()
    for name in parts or ():
        if name not in SUBFOLDERS:
            raise UsageError(f"The cache has no part {name!r}; choose from: {', '.join(SUBFOLDERS)}.")
    names = parts or [name for name in SUBFOLDERS if not (clear and name == KEPT)]
    usages = {name: clear_cache(name) if clear else measure_usage(name) for name in names}
    if console.as_json:
        for name, usage in usages.items():
            console.record({"name": name, "path": str(cache_root() / name), **usage._asdict(), "cleared": clear})
        return
    if clear:
        console.note(f"Deleted from {cache_root()}:")
    else:
        console.note(f"The cache is {cache_root()}; tinylm cache --clear deletes all but {KEPT}.")
    rows = [
        (name, SUBFOLDERS[name], str(usage.files), f"{shorten_number(usage.bytes)}B") for name, usage in usages.items()
    ]
    console.table(("name", "content", "files", "size"), rows)
