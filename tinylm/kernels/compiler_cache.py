"""The cache folders of torch's compilers. They contain code and pickles, so only this user may write (decision 020)."""

import os
import sys
from pathlib import Path

from tinylm.system.cache_directory import private_folder

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # default: /tmp/torchinductor_<user>, which torch unpickles from
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "QUACK_CACHE_DIR": "quack",  # CuTe kernels for GPUs; default: a folder in /tmp
}


def use_private_folders() -> None:
    """Set environment variables for the folders of torch's compilers; call it before torch is imported if possible.

    Variables that the user has set are kept.

    Raises TinyLMError if the cache folder cannot be created, or if other users can write to it.
    """
    folder = private_folder("torch")
    _unset_default()
    for variable, name in FOLDERS.items():
        os.environ.setdefault(variable, str(folder / name))


def prepare_compiler() -> None:
    """Call `use_private_folders`, and set the folder of precompiled headers, or disable them. Imports torch's compiler.

    Raises TinyLMError if the cache folder cannot be created, or if other users can write to it.
    """
    use_private_folders()
    from torch._inductor import codecache, config

    # torch puts precompiled headers into its default folder even if TORCHINDUCTOR_CACHE_DIR is set.
    if hasattr(codecache, "_HEADER_DIR") and hasattr(codecache, "_HEADER_LOCK_DIR"):
        codecache._HEADER_DIR = str(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(Path(codecache._HEADER_DIR) / "locks")
    else:
        config.cpp_cache_precompile_headers = False


def _unset_default() -> None:
    """Unset TORCHINDUCTOR_CACHE_DIR if torch has set it to its default, so that only a value of the user is kept."""
    default = getattr(sys.modules.get("torch._inductor.runtime.cache_dir_utils"), "default_cache_dir", None)
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if default is not None and folder is not None and Path(folder) == Path(default()).absolute():
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
