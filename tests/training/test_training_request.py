"""What a caller gives: texts of any kind of sequence, and settings of which `None` means the default."""

from pathlib import Path
from typing import Any

import pytest

from tinylm.config.settings import AdapterSettings, LoRASettings, TrainSettings
from tinylm.errors import UsageError
from tinylm.training.training_request import TrainingRequest


def test_files_are_a_path_a_sequence_or_an_iterator() -> None:
    given: tuple[Any, ...] = ("a.txt", Path("a.txt"), ["a.txt"], iter([Path("a.txt")]))
    for files in given:
        request = TrainingRequest(settings=TrainSettings(), files=files)
        assert request.paths == request.text.paths == ("a.txt",)


def test_none_is_the_default_of_every_setting() -> None:
    for kind in (TrainSettings, LoRASettings, AdapterSettings):
        names = kind().__dict__
        assert vars(kind(**dict.fromkeys(names))) == vars(kind())


def test_settings_that_contradict_each_other_are_an_error_before_anything_is_read() -> None:
    contradictions: tuple[tuple[dict[str, Any], str], ...] = (
        ({"steps": 1, "epochs": 1}, "`steps` and `epochs`"),
        ({"extend_vocab": True}, "`init_from`"),
        ({"unknown": "skip"}, "`unknown` is for a given vocabulary"),
        ({"init_from": "a", "width": 8}, "`init_from` fixes `width`"),
        ({"init_from": "a", "extend_vocab": True, "unknown": "skip"}, "contradict each other"),
    )
    for settings, message in contradictions:
        with pytest.raises(UsageError, match=message):
            TrainingRequest(settings=TrainSettings(**settings), files="missing.txt")
    with pytest.raises(UsageError, match="`resume` fixes `width`"):
        TrainingRequest(settings=TrainSettings(width=8), resume=Path("run"))
    with pytest.raises(UsageError, match="no text to train on"):
        TrainingRequest(settings=TrainSettings())
