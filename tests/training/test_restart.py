"""A command that torchrun has restarted. The restarts themselves are tested in `test_ranks.py`."""

import errno
import os
from pathlib import Path

import pytest

from tinylm.errors import TinyLMError
from tinylm.ranks import Ranks
from tinylm.training import restart
from tinylm.training.pipeline import Session
from tinylm.training.restart import start_run
from tinylm.training.training_request import train_request


def test_a_save_that_cannot_be_recovered_is_an_error_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(restart, "recover_last", refuse)
    request = train_request(tmp_path / "text.txt", tmp_path / "run", {})
    with pytest.raises(TinyLMError, match=r"Cannot continue .*run after a restart: Read-only file system\."):
        start_run(request, Session(ranks=Ranks(job="a", restarts=1)))
