"""Models of the Hugging Face hub: `hf:OWNER/NAME[@REVISION]` becomes a folder in the cache of huggingface_hub."""

import re
from collections.abc import Callable
from pathlib import Path

from tinylm.errors import TinyLMError, UsageError
from tinylm.text.tokenizer_file import short_repr

PREFIX = "hf:"
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_REFERENCE = re.compile(rf"{PREFIX}({_PART}/{_PART})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")
# No code, no pickles, and no second copy of the weights in another format.
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
)


def is_reference(text: str) -> bool:
    """Whether a text begins with `hf:`, as a reference to a model of the hub does. `download` checks the rest."""
    return text.startswith(PREFIX)


def download(reference: str, snapshot_download: Callable[..., str] | None = None) -> Path:
    """The folder of a model of the hub, downloaded unless it is in the cache. Respects HF_HUB_OFFLINE and HF_TOKEN.

    snapshot_download: by default that of huggingface_hub.

    Raises UsageError for a reference that is not `hf:OWNER/NAME[@REVISION]` or without the package huggingface_hub,
    and TinyLMError for a failed download.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise UsageError(f"{short_repr(reference)} does not name a model of the hub; write hf:OWNER/NAME[@REVISION].")
    repository, revision = match.groups()
    try:
        import huggingface_hub  # 0.3 s; only needed here
    except ImportError as error:
        raise UsageError(f"{reference} needs the package huggingface_hub: pip install huggingface_hub") from error
    fetch = snapshot_download or huggingface_hub.snapshot_download
    try:
        return Path(fetch(repository, revision=revision, allow_patterns=list(FILES)))
    except (OSError, ValueError, RuntimeError) as error:  # errors of the network and of the hub
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise TinyLMError(
            f"Cannot download {reference}: {reason[0][:300]} A folder downloaded elsewhere can be used as well."
        ) from error
