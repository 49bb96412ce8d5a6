"""The sections of a report that need the model."""

import base64
from pathlib import Path

import tinylm
from tests.shell import TINY, run_ok
from tinylm.report.predictions import _attention
from tinylm.text.run_tokens import reopen_part


def test_the_attention_maps_of_an_encoder_decoder_stay_within_their_limit(tmp_path: Path) -> None:
    """The decoder has two maps per layer and head, the encoder one."""
    pairs, run = tmp_path / "pairs.tsv", tmp_path / "run"
    pairs.write_text("abcabc\tcbacba\nabcab\tbacba\n" * 4)
    depths = ("--layers", 3, "--encoder-layers", 1)
    options = ("--architecture", "encoder-decoder", "--tokenizer", "char", "--steps", 1, *TINY, *depths)
    run_ok("train", pairs, "--val-data", pairs, "--out", run, *options)
    model, limit = tinylm.load(run), 600
    assert model.data is not None
    maps = _attention(model, None, reopen_part(run, model.data, model.tokenizer, "val"), limit)
    sizes = [len(base64.b64decode(layer["weights"])) for each in maps for layer in each["layers"]]
    assert len(sizes) == 1 + 2 * 3
    assert limit / 2 < sum(sizes) <= limit
