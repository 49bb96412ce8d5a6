"""Where torch's compilers keep what they unpickle and run."""

import getpass
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell import ROOT
from tinylm.compiler import FOLDERS, use_private_folders
from tinylm.device import can_compile
from tinylm.errors import TinyLMError

# A process that compiles a training step and a decoder's step, and prints every file that it opened for writing, every
# folder that it made, and every file that it loaded as code. What its compilers write is found in TMPDIR afterwards.
SPY = """
import json, os, sys
touched, writing = set(), os.O_WRONLY | os.O_RDWR | os.O_CREAT

def spy(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and (arguments[2] or 0) & writing:
        touched.add(os.fsdecode(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "ctypes.dlopen", "import"):
        touched.update(os.fsdecode(a) for a in arguments if isinstance(a, (str, bytes)) and os.sep in os.fsdecode(a))

sys.addaudithook(spy)
import torch
from pathlib import Path
from tests.variants import small
from tinylm.inference.arrange import arrange
from tinylm.inference.compiled import compile_decoder, load_compiled
from tinylm.model.build import build_model
from tinylm.objective import next_token
from tinylm.text.dataset import Batch
from tinylm.training.session import _compile_layers

if sys.argv[1] == "layers":
    model, ids = build_model(small()), torch.zeros(2, 9, dtype=torch.long)
    notices = []
    batch = Batch(ids[:, :-1], ids[:, 1:])
    assert _compile_layers(model, batch, next_token, "fp32", notices.append), notices
else:
    decoder = build_model(small(ffn_width=64)).eval()
    arrange(decoder, packed=False)
    compile_decoder(decoder, Path("code.pt2"))
    load_compiled(decoder, Path("code.pt2"))
print(json.dumps(sorted(touched)))
"""


def test_the_folders_are_below_the_cache_and_those_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/own/triton")
    use_private_folders()
    torch = Path(os.environ["TINYLM_CACHE"]) / "torch"
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == torch
    assert os.environ["TRITON_CACHE_DIR"] == "/own/triton"


def test_the_folder_that_torch_chose_by_itself_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch writes its default into the environment once it has compiled something."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    for variable in FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    assert cache_dir() == default_cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]
    use_private_folders()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(os.environ["TINYLM_CACHE"])


def test_a_cache_that_others_can_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in FOLDERS:
        monkeypatch.delenv(variable, raising=False)
    folder = Path(os.environ["TINYLM_CACHE"]) / "torch"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(TinyLMError, match="Other users can write to"):
        use_private_folders()
    assert not FOLDERS.keys() & os.environ.keys()


@pytest.mark.skipif(not can_compile("cpu"), reason="there is no C++ compiler")
@pytest.mark.parametrize("what", ["layers", "decoder"])
def test_nothing_is_compiled_from_or_into_a_folder_that_another_user_may_create(what: str, tmp_path: Path) -> None:
    cache, temporary, here = (tmp_path / name for name in ("cache", "tmp", "here"))
    for folder in (temporary, here):
        folder.mkdir()
    own = {variable: value for variable, value in os.environ.items() if variable not in FOLDERS}
    env = {**own, "TINYLM_CACHE": str(cache), "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SPY, what]
    done = subprocess.run(command, env=env, cwd=here, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    touched = [Path(path) for path in json.loads(done.stdout.splitlines()[-1])]
    assert any(cache / "torch" in path.parents for path in touched), "the spy saw nothing"
    # Names drawn at random in the folder for temporary files are safe; those that can be known beforehand are not.
    passing = [path.relative_to(temporary).parts[0] for path in touched if temporary in path.parents]
    assert [name for name in passing if "torchinductor" in name or name == getpass.getuser()] == []
    assert [path.name for path in temporary.iterdir() if "tinylm" not in path.name] == []
