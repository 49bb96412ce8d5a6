"""How much of its training text a model repeats: the memorisation section of the report."""

import re
from typing import Any

from tinylm.analysis.memorisation import CopiedText, Memorisation, measure_memorisation
from tinylm.evaluation.evaluation_config import MemorisationConfig
from tinylm.models.model import Model
from tinylm.report.curves import number
from tinylm.transformer.decoder import Decoder

NUM_SAMPLES = 20  # and as many continuations of training text and of held-out text: 60 texts, one batch
# Limits above which memorisation is measured only if it is asked for.
MAX_FLOPS = 1e12  # of generation
MAX_CHARACTERS = 100_000_000  # of training text
MAX_TEXT, MAX_NAME = 300, 200  # shown characters of a match, and of the name of its document


def describe_copied_text(model: Model, wanted: bool | None) -> dict[str, Any] | None:
    """The measured memorisation of a model as JSON values, or only `left_out`: the reason why it was not measured.

    wanted: True measures it with the default settings of MemorisationConfig, at any cost. False returns `None`. `None`
        measures it with NUM_SAMPLES if the work is within MAX_FLOPS and MAX_CHARACTERS, and returns `None` for models
        that are not decoders of plain text.

    Raises the errors of `measure_memorisation`.
    """
    if wanted is False:
        return None
    if wanted:
        return _section(measure_memorisation(model), MemorisationConfig())
    if not isinstance(model.network, Decoder) or model.data is None or not model.data.is_plain_text:
        return None
    config = MemorisationConfig(num_samples=NUM_SAMPLES)
    if model.data.train_characters > MAX_CHARACTERS:
        return {"left_out": "the training text is long"}
    if generation_flops(model, config) > MAX_FLOPS:
        return {"left_out": "the model is large"}
    return _section(measure_memorisation(model, config=config), config)


def generation_flops(model: Model, config: MemorisationConfig) -> float:
    """Estimated FLOPs of generating the samples and the two kinds of continuations."""
    assert model.data is not None
    parameters = sum(parameter.numel() for parameter in model.network.parameters())
    tokens = config.sample_length * model.data.train_tokens / max(1, model.data.train_characters)
    return 2 * parameters * 3 * config.num_samples * tokens


def _section(result: Memorisation, config: MemorisationConfig) -> dict[str, Any]:
    return {
        "min_match": config.min_match,
        "sample_length": config.sample_length,
        "prefix_length": config.prefix_length,
        "sources": [_source(source) for source in result.sources],
    }


def _source(source: CopiedText) -> dict[str, Any]:
    matches = [
        {
            "characters": match.characters,
            "text": match.text[:MAX_TEXT],
            "name": re.split(r"[\\/]", match.name)[-1][:MAX_NAME],
            "line": match.line,
            "character": match.character,
        }
        for match in source.matches
    ]
    return {
        "source": source.source,
        "samples": source.samples,
        "characters": source.characters,
        "copied": number(source.copied),
        "low": number(source.copied_low),
        "high": number(source.copied_high),
        "longest": source.longest,
        "matches": matches,
    }
