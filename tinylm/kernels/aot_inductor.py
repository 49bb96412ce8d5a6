"""Programs compiled ahead of time by AOTInductor, and loaded without importing the compiler (decision 017).

`torch._inductor.aoti_load_package` imports the compiler, which takes two seconds; `AOTIModelPackageLoader` does not.
"""

import secrets
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tinylm.errors import TinyLMError
from tinylm.kernels.compiler_cache import prepare_compiler

OPTIONS = {
    "aot_inductor.package_constants_in_so": False,  # weights are passed in when the code is loaded
    "aot_inductor.precompile_headers": False,  # precompiling takes 16 s longer for one file (decision 020)
    "always_keep_tensor_constants": True,  # otherwise short weights are compiled into the code
    "cpp.dynamic_threads": True,  # use torch's number of threads at run time
}


def is_available() -> bool:
    """Whether this version of torch can load the files of `compile_package`."""
    return hasattr(getattr(torch._C, "_aoti", None), "AOTIModelPackageLoader")


def compile_package(export: Callable[[], torch.export.ExportedProgram], file: Path) -> None:
    """Compile the program that `export` returns, without its weights, and write it to `file`; takes tens of seconds.

    `file` is replaced atomically. Raises TinyLMError if compiling or writing fails.
    """
    unfinished = file.with_name(f"{file.stem}.{secrets.token_hex(4)}.tmp.pt2")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"Cannot keep compiled code in {file.parent}: {error.strerror}. Set TINYLM_CACHE to another folder."
        raise TinyLMError(message) from error
    prepare_compiler()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about its own code
            import torch._inductor

            torch._inductor.aoti_compile_and_package(export(), package_path=str(unfinished), inductor_configs=OPTIONS)
        unfinished.chmod(0o600)
        unfinished.replace(file)
    except Exception as error:  # the compiler raises errors of any type
        raise TinyLMError(f'Compiling failed ({_reason(error)}); `compile="off"` generates without it.') from error
    finally:
        unfinished.unlink(missing_ok=True)


def load_package(file: Path, weights: Mapping[str, Tensor]) -> Callable[[list[Tensor]], list[Tensor]]:
    """The compiled function with these weights, from a list of input tensors to a list of output tensors.

    Raises TinyLMError for a damaged file, and removes the file.
    """
    try:
        _require_intact(file)
        package = torch._C._aoti.AOTIModelPackageLoader(str(file), "model", False, 1, -1)
        package.load_constants({name: weights[name] for name in package.get_constant_fqns()}, False, True, True)
    except (RuntimeError, LookupError, AttributeError, TypeError, ValueError, OSError, zipfile.BadZipFile) as error:
        file.unlink(missing_ok=True)
        message = f'{file} could not be loaded ({_reason(error)}) and was removed; `compile="on"` compiles it again.'
        raise TinyLMError(message) from error
    return package.run


def _require_intact(file: Path) -> None:
    """Check the CRC-32 of each member of the archive, since damaged machine code would end the process by a signal."""
    with zipfile.ZipFile(file) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"{damaged} is damaged")


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:120] if lines else type(error).__name__
