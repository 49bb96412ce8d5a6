"""tinylm doctor: what tinylm finds on this machine, and what is wrong with it."""

from dataclasses import asdict
from typing import Annotated

from tinylm.commands.option_groups import with_option_groups
from tinylm.commands.option_sources import settings_to_flags
from tinylm.commands.options import OutputOptions, print_fields
from tinylm.config.settings import DEVICE
from tinylm.config.validation import Panel, Setting
from tinylm.errors import TinyLMError

COMMANDS = {  # remedies that are commands of tinylm, by the subject of the problem
    "disk": "To free some: tinylm cache --clear.",
    "load": "To measure it again when it is idle: tinylm doctor --refresh.",
}


@with_option_groups
def doctor(
    device: Annotated[str, DEVICE] = "auto",
    refresh: Annotated[
        bool, Setting("Measure the speed of this machine again; later plans may change.", Panel.MACHINE)
    ] = False,
    *,
    output: OutputOptions,
) -> None:
    """Show versions, devices, speeds, threads, memory, disk, cache, and the largest models to train here.

    The models are those planned for ten minutes and for one day. Each problem is shown with its solution. The exit code
    is 1 only if something does not work.
    """
    from tinylm.machine.doctor import OPTIONAL_PACKAGES, diagnose
    from tinylm.planning.plan import largest_models

    console = output.console()
    diagnosis = diagnose(device, console, refresh=refresh)
    diagnosis.sections["largest_models"] = largest_models(diagnosis.machine)
    if console.as_json:
        problems = [asdict(problem) for problem in diagnosis.problems]
        console.record({**diagnosis.sections, "problems": problems, "works": diagnosis.works})
    else:
        packages = diagnosis.sections["optional_packages"]
        packages |= {name: f"not installed; for {OPTIONAL_PACKAGES[name]}" for name in packages if not packages[name]}
        for number, (title, fields) in enumerate(diagnosis.sections.items()):
            print_fields(console, title.replace("_", " "), fields, first=number == 0)
        console.result("\nproblems")
        for problem in diagnosis.problems:
            message = settings_to_flags(output.ctx, f"{problem.message} {COMMANDS.get(problem.subject, '')}".rstrip())
            console.field("does not work" if problem.broken else "warning", message)
        if not diagnosis.problems:
            console.result("  none")
    if not diagnosis.works:
        count = sum(problem.broken for problem in diagnosis.problems)
        raise TinyLMError(f"{count} of the problems must be solved before tinylm works here.")
