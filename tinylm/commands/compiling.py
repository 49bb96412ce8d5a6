"""Whether a decoder writes by compiled code, and where that comes from."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

from tinylm.commands.model import OpenModel
from tinylm.console import Console
from tinylm.errors import TinyLMError, UsageError

if TYPE_CHECKING:
    from tinylm.inference.compiled import CompiledDecoder
    from tinylm.model.decoder import Decoder

COMPILE_FROM = 100_000  # tokens of one text after another, which earn back the time that compiling takes
LOAD_FROM = 128  # tokens, which earn back the time that loading takes


def choose_code(opened: OpenModel, wanted: str, *, int8: bool, tokens: int, samples: int, cache: bool) -> Path | None:
    """The file of the code to write so many tokens by, there or not yet; `None` for none.

    Raises UsageError where compiling is wanted and not possible.
    """
    from tinylm.cache import is_private, private_folder
    from tinylm.device import can_compile
    from tinylm.inference.compiled import code_file, obstacle
    from tinylm.model.decoder import Decoder

    # Eight bits are computed with another rounding, so that their text must not depend on what is in the cache.
    least = COMPILE_FROM if int8 else LOAD_FROM
    if wanted == "off" or (wanted == "auto" and tokens < least):
        return None
    network = opened.network
    if not isinstance(network, Decoder):
        why_not: str | None = "it is for models that write on from a prompt"
    elif samples > 1:
        why_not = "it is for one sample at a time"
    elif not cache:
        why_not = "it needs the cache"
    elif opened.adapters:
        why_not = "an adapter is on the model; make one model of both with tinylm merge-lora"
    else:
        why_not = obstacle(network)
    if why_not is None:
        try:
            file = code_file(private_folder("compiled"), opened.config.model, int8)
        except TinyLMError as error:
            why_not = str(error)
        else:
            if is_private(file) or (can_compile("cpu") and (wanted == "on" or tokens >= COMPILE_FROM)):
                return file
            why_not = "there is no C++ compiler here"
    if wanted == "on":
        raise UsageError(f"--compile on is not possible: {why_not}; leave it out.")
    return None


def compiled_decoder(console: Console, network: "Decoder", file: Path, wanted: str) -> "CompiledDecoder | None":
    """A decoder that was arranged for it, by its code, which is compiled if it is not there.

    Where that fails it is said, and raised as a TinyLMError if compiling is wanted.
    """
    from tinylm.cache import is_private
    from tinylm.inference.compiled import compile_decoder, load_compiled

    try:
        if not is_private(file):
            console.note("Compiling, once for models of this shape...")
            begun = time.monotonic()
            compile_decoder(network, file)
            console.note(f"Compiled in {time.monotonic() - begun:.0f} s; kept in {file.parent}.")
        return load_compiled(network, file)
    except TinyLMError as error:
        if wanted == "on":
            raise
        console.warn(str(error))
        return None
