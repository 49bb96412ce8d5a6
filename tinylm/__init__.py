"""Train, fine-tune, evaluate and sample small language models.

The functions, the class `Model` and the modules `errors` and `events` are imported on first access; all but `errors`
import torch then.
"""

import sys
import time

TYPE_CHECKING = False  # as in `typing`, whose import took most of the time before `main` handles Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from tinylm import errors as errors
    from tinylm.analysis.comparison import compare as compare
    from tinylm.models.exporting import export_model as export_model
    from tinylm.models.importing import import_model as import_model
    from tinylm.models.load import load as load
    from tinylm.models.model import Model as Model
    from tinylm.run_report.page import report as report
    from tinylm.training import events as events
    from tinylm.training.api import finetune_adapter as finetune_adapter
    from tinylm.training.api import finetune_lora as finetune_lora
    from tinylm.training.api import train as train

__version__ = "0.1.0"
__all__ = [
    "Model",
    "__version__",
    "compare",
    "errors",
    "events",
    "export_model",
    "finetune_adapter",
    "finetune_lora",
    "import_model",
    "load",
    "report",
    "train",
]

_MODULES = {  # module of each public name, imported on first use (PEP 562)
    "errors": "tinylm.errors",
    "events": "tinylm.training.events",
    "load": "tinylm.models.load",
    "Model": "tinylm.models.model",
    "train": "tinylm.training.api",
    "finetune_lora": "tinylm.training.api",
    "finetune_adapter": "tinylm.training.api",
    "import_model": "tinylm.models.importing",
    "export_model": "tinylm.models.exporting",
    "compare": "tinylm.analysis.comparison",
    "report": "tinylm.run_report.page",
}


_last_import = (0.0, 0.0)  # `time.monotonic()` before and after; `tinylm.train(time="10s")` may import torch first


def __getattr__(name: str) -> "Any":
    global _last_import
    if name not in _MODULES:
        raise AttributeError(f"module 'tinylm' has no attribute {name!r}")
    import importlib

    begun = time.monotonic()
    if "torch" not in sys.modules:
        from tinylm.kernels.process import set_spin_count

        set_spin_count()
    module = importlib.import_module(_MODULES[name])
    value = globals()[name] = getattr(module, name, module)
    _last_import = begun, time.monotonic()
    return value


def __dir__() -> list[str]:
    return __all__
