"""The cache folders of torch's compilers, from which they load code and pickles."""

import getpass
import json
import os
import sys
from pathlib import Path

import pytest

from tests.shell import ROOT, run_child
from tinylm.errors import TinyLMError
from tinylm.kernels.process import FOLDERS, prepare_compiler, use_private_folders
from tinylm.machine.device import can_compile

# A process that compiles layers and prints the paths of all files that it opened for writing, folders
# that it made, and files that it loaded as code. Its compilers are processes of their own, which write to TMPDIR.
AUDITED = """
import json, os, sys
paths, writing = set(), os.O_WRONLY | os.O_RDWR | os.O_CREAT

def record(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and (arguments[2] or 0) & writing:
        paths.add(os.fsdecode(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "ctypes.dlopen", "import"):
        paths.update(os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes)) and os.sep in os.fsdecode(a))

sys.addaudithook(record)
import torch
from tests.variants import small
from tinylm.transformer.build import build_model
from tinylm.objectives.loss import next_token
from tinylm.text.batches import Batch
from tinylm.training.execution import compile_layers

model, ids = build_model(small()), torch.zeros(2, 9, dtype=torch.long)
notices = []
batch = Batch(ids[:, :-1], ids[:, 1:])
assert compile_layers(model, [batch], next_token, "fp32", notices.append), notices
print(json.dumps(sorted(paths)))
"""


def test_the_folders_are_in_the_private_cache_folder_unless_the_user_has_set_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch writes its default into the environment once it has compiled something; that is no setting of the user."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    assert cache_dir() == default_cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own/triton")
    use_private_folders()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == Path(os.environ["TINYLM_CACHE"]) / "torch"
    assert os.environ["TRITON_CACHE_DIR"] == "/own/triton"
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)
    (Path(os.environ["TINYLM_CACHE"]) / "torch").chmod(0o777)
    with pytest.raises(TinyLMError, match="Other users can write to"):
        use_private_folders()
    assert not FOLDERS.keys() & os.environ.keys()


def test_precompiled_headers_are_in_the_private_folder_or_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are switched off if this version of torch has no name for their folder."""
    from torch._inductor import codecache, config

    for name in ("_HEADER_DIR", "_HEADER_LOCK_DIR"):
        monkeypatch.setattr(codecache, name, getattr(codecache, name, "headers"), raising=False)
    private = Path(os.environ["TINYLM_CACHE"]) / "torch"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(private))
    with config.patch(cpp_cache_precompile_headers=True):
        prepare_compiler()
        assert private in Path(codecache._HEADER_DIR).parents and private in Path(codecache._HEADER_LOCK_DIR).parents
        assert config.cpp_cache_precompile_headers
        monkeypatch.delattr(codecache, "_HEADER_LOCK_DIR")
        prepare_compiler()
        assert not config.cpp_cache_precompile_headers


@pytest.mark.slow
@pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")
def test_compilers_use_no_folder_that_another_user_could_create(tmp_path: Path) -> None:
    cache, temporary, here = (tmp_path / name for name in ("cache", "tmp", "here"))
    temporary.mkdir()
    here.mkdir()
    env = {variable: value for variable, value in os.environ.items() if variable not in FOLDERS}
    env |= {"TINYLM_CACHE": str(cache), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = run_child([sys.executable, "-c", AUDITED], limit=900, env=env, cwd=here)
    assert done.returncode == 0, done.stderr[-3000:]
    paths = [Path(path) for path in json.loads(done.stdout.splitlines()[-1])]
    assert any(cache / "torch" in path.parents for path in paths), "no path was recorded"
    # Temporary files with random names are safe; another user could create one whose name can be predicted.
    temporary_names = [path.relative_to(temporary).parts[0] for path in paths if temporary in path.parents]
    assert [name for name in temporary_names if "torchinductor" in name or name == getpass.getuser()] == []
    assert [path.name for path in temporary.iterdir() if "tinylm" not in path.name] == []
