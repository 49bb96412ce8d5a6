"""The model families of Hugging Face that tinylm reads and writes, by `model_type`."""

from collections.abc import Mapping
from typing import Any

from tinylm.config.model import ModelConfig
from tinylm.config.validation import describe_value
from tinylm.errors import UsageError
from tinylm.formats.families.gemma import GEMMA, GEMMA3_TEXT
from tinylm.formats.families.gpt2 import GPT2
from tinylm.formats.families.gpt_neox import GPT_NEOX
from tinylm.formats.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from tinylm.formats.families.mixture import MIXTRAL, QWEN3_MOE
from tinylm.formats.family import ConvertedTensors, Family, Source, convert_tensors

# In the order in which choose_family tries them.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (QWEN3, LLAMA, MISTRAL, QWEN2, QWEN3_MOE, MIXTRAL, GPT2, GPT_NEOX, GEMMA, GEMMA3_TEXT)
}


def find_family(values: Mapping[str, Any]) -> Family:
    """The family of a config.json. Raises ValueError if its `model_type` is missing or not a key of FAMILIES."""
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"its model_type is {describe_value(name)}; tinylm reads {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def convert(
    values: Mapping[str, Any], tensors: Source, file: str = "config.json"
) -> tuple[str, ModelConfig, ConvertedTensors]:
    """Convert a model. values: content of its config.json, which messages call `file`. tensors: by foreign names.

    Returns the name of its family, its configuration, and its tensors under tinylm's names, which are converted when
    they are looked up. Raises ValueError with a reason that completes a sentence such as "Cannot import PATH: ".
    """
    family = find_family(values)
    try:
        config = family.config(values, file)
    except UsageError as error:
        raise ValueError(f"tinylm cannot build its model: {error}".replace("`", "").rstrip(".")) from error
    return family.name, config, convert_tensors(family, config, tensors)
