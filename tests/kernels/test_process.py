"""Settings for system libraries: freed memory, the folders of torch's compilers, and the polling of OpenMP."""

import gc
import getpass
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tinylm
import tinylm.training.run
from tests.shell import ROOT, run_child
from tinylm.__main__ import TORCH_COMMANDS, main
from tinylm.analysis import comparison
from tinylm.errors import TinyLMError
from tinylm.kernels import process
from tinylm.kernels.process import FOLDERS, prepare_compiler, use_private_folders
from tinylm.machine.device import can_compile
from tinylm.models import model as evaluated

PROGRAM = """
import resource
import torch
from tinylm.kernels.process import keep_freed_blocks, return_large_blocks

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

assert keep_freed_blocks() and return_large_blocks()
torch.zeros(7 << 20)  # freed: glibc would keep smaller blocks from now on
before = resident()
blocks = [torch.ones(1 << 20) for _ in range(40)]
last = torch.ones(1 << 20)  # at the end of the heap, if the blocks are there
assert resident() > before + 100e6
del blocks
print(resident() - before)

assert keep_freed_blocks()
for step in range(30):
    if step == 20:
        before = faults()
    torch.ones(10 << 20)  # 40 MB
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/statm").exists() or not hasattr(process.ctypes.CDLL(None), "mallopt"),
    reason="needs Linux with glibc",
)
def test_freed_blocks_are_returned_or_kept_and_used_again_without_new_pages() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    returned, kept = map(int, done.stdout.split())
    assert returned < 20e6
    assert kept < 1000  # pages; 40 MB have 10,000


def test_a_c_library_without_the_settings_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: object())
    assert not process.keep_freed_blocks()
    assert not process.return_large_blocks()


def test_training_evaluation_and_comparison_keep_freed_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for module in (tinylm.training.run, evaluated, comparison):
        monkeypatch.setattr(module, "keep_freed_blocks", lambda name=module.__name__: calls.append(name))
    (tmp_path / "text").write_text("It was cold by the sea, and the old man said so. " * 100)
    settings = {"layers": 1, "heads": 1, "width": 16, "context": 16, "device": "cpu"}
    tinylm.train(tmp_path / "text", tmp_path / "run", steps=1, **settings)
    assert calls == ["tinylm.training.run"]
    model = tinylm.load(tmp_path / "run", device="cpu")
    model.evaluate(text="It was cold.")
    comparison.compare_models(model, model)
    assert calls[1:] == ["tinylm.models.model", "tinylm.analysis.comparison"]


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


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the variables that `main` sets, and restore them afterwards."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", *FOLDERS):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def start(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", ["tinylm", *arguments])
    with pytest.raises(SystemExit):
        main()


@pytest.mark.usefixtures("unset")
def test_a_command_that_computes_sets_spin_count_and_compiler_folders_and_collects_garbage_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An unset spin count makes threads wait actively, which is slow beside other programs."""
    assert {"train", "sample", "chat", "eval", "compare", "report", "doctor"} <= {*TORCH_COMMANDS}
    calls: list[object] = []
    monkeypatch.setattr("gc.set_threshold", calls.append)
    monkeypatch.setattr("atexit.register", calls.append)
    for number, command in enumerate(TORCH_COMMANDS, start=1):
        for variable in ("GOMP_SPINCOUNT", *FOLDERS):
            monkeypatch.delenv(variable, raising=False)
        start(monkeypatch, command, "--no-such-option")
        assert os.environ["GOMP_SPINCOUNT"] == "10000", command
        assert FOLDERS.keys() <= os.environ.keys(), command
        assert calls == [10_000, gc.freeze] * number, command
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5")):  # set by the user
        monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
        monkeypatch.setenv(name, value)
        start(monkeypatch, "train", "--no-such-option")
        assert os.environ[name] == value
        assert os.environ.get("GOMP_SPINCOUNT", "5") == "5"


@pytest.mark.usefixtures("unset")
def test_a_command_that_computes_nothing_changes_no_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gc.set_threshold", None)
    monkeypatch.setattr("atexit.register", None)
    monkeypatch.setenv("TINYLM_CACHE", "/nowhere/at/all")
    before = dict(os.environ), torch.get_num_threads()
    commands = ("", "--help", "--version", "train --help", "nonsense", "runs", "info x", "import x y", "export x")
    for arguments in commands:
        start(monkeypatch, *arguments.split())
        assert (dict(os.environ), torch.get_num_threads()) == before, arguments
    assert not Path("/nowhere").exists()
