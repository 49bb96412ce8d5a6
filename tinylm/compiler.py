"""Where torch's compilers keep code and pickles: in folders that only this user can write (decision 020)."""

import os
import sys
from pathlib import Path

from tinylm.cache import private_folder

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",  # else /tmp/torchinductor_<user>, from which torch unpickles
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "QUACK_CACHE_DIR": "quack",  # of torch's CuTe kernels for GPUs; else a folder in /tmp
}


def use_private_folders() -> None:
    """Set the folders of torch's compilers in the environment, best before torch is imported.

    Folders that the user has set stay. Raises TinyLMError where the cache folder cannot be trusted.
    """
    own = private_folder("torch")
    _forget_default()
    for variable, name in FOLDERS.items():
        os.environ.setdefault(variable, str(own / name))


def prepare_compiler() -> None:
    """Set the folders, that of precompiled headers too, before anything is compiled; imports torch's compiler.

    Raises TinyLMError where the cache folder cannot be trusted.
    """
    use_private_folders()
    from torch._inductor import codecache, config

    # torch takes the default folder for these, whatever the environment says.
    if hasattr(codecache, "_HEADER_DIR") and hasattr(codecache, "_HEADER_LOCK_DIR"):
        codecache._HEADER_DIR = str(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(Path(codecache._HEADER_DIR) / "locks")
    else:
        config.cpp_cache_precompile_headers = False


def _forget_default() -> None:
    """torch writes its default into the environment once it has used it: nobody has chosen that folder."""
    module = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if module is not None and folder is not None and Path(folder) == Path(module.default_cache_dir()).absolute():
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
