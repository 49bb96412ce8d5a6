import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.shell import story
from tests.variants import small

measure = importlib.import_module("measure")

SHAPE = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "24", "--rounds", "1", "--warmup", "0"]


def script(name: str) -> ModuleType:
    """A benchmark against the peer; skipped where the peer is not installed."""
    pytest.importorskip("transformers")
    return importlib.import_module(name)


class FakeClock:
    """Time passes only in the functions it makes: each call of one takes the next of its seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def function(self, name: str, *seconds: float) -> Callable[[], None]:
        left = iter(seconds)

        def work() -> None:
            self.calls.append(name)
            self.now += next(left)

        return work


def test_functions_take_turns_and_the_warm_up_does_not_count() -> None:
    clock = FakeClock()
    functions = {"a": clock.function("a", 90, 1, 2), "b": clock.function("b", 90, 3, 4)}
    times = measure.take_turns(functions, rounds=2, warmup=1, clock=clock)
    assert clock.calls == ["a", "b", "a", "b", "a", "b"]
    assert times == {"a": [1, 2], "b": [3, 4]}


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="0 rounds"):
        measure.take_turns({}, rounds=0)


def test_a_ratio_is_taken_within_each_round() -> None:
    """A machine that is ten times slower in one round must not change the ratio."""
    times = {"slow": [4.0, 40.0, 6.0], "fast": [2.0, 20.0, 2.0]}
    assert measure.speedup(times, "fast", base="slow") == measure.Spread(2.0, 2.0, 3.0)
    assert str(measure.speedup(times, "fast", base="slow")) == "2.00 (2.00 to 3.00)"


def test_a_speed_is_that_of_the_median_round() -> None:
    assert measure.tokens_per_second({"a": [1.0, 2.0, 100.0]}, "a", 3000) == "1,500"


def test_a_table_is_markdown_with_padded_columns() -> None:
    assert measure.table(["name", "x"], [["a", "10"]]) == "| name | x  |\n| ---- | -- |\n| a    | 10 |"


def test_the_machine_is_described_with_versions_and_threads() -> None:
    described = measure.describe_machine(["torch"])
    assert f"torch {torch.__version__}" in described
    assert "1 threads" in described


def test_the_peer_with_the_same_weights_gives_the_same_logits() -> None:
    peer = script("peer")
    config = small("gpt2", kv_heads=4)
    model, twin = peer.build_pair(config)
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    peer.assert_same_logits(model, peer.build_peer(config, model, peer.FUSED_GELU), ids)
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("part", ["layers.1.attention.v_proj.bias", "layers.0.feedforward.up_proj.weight"])
def test_a_peer_that_differs_in_one_part_is_found_out(part: str) -> None:
    peer = script("peer")
    model, twin = peer.build_pair(small("gpt2", kv_heads=4))
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    with torch.no_grad():
        model.get_parameter(part)[0] += 1.0
    with pytest.raises(AssertionError):
        peer.assert_same_logits(model, twin, ids)


def test_both_take_the_same_gradient_step() -> None:
    """The embedding's gradient, as the optimizer gets it: the same targets were scored, and clipped alike."""
    peer, training = script("peer"), script("training")
    config = small("gpt2", kv_heads=4)
    model, twin = peer.build_pair(config)
    batch = training.random_batch(config, rows=2)
    gradients: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients.append(optimizer.param_groups[0]["params"][0].grad.clone())

    hook = register_optimizer_step_pre_hook(keep)
    training.tinylm_step(model, batch, "fp32")()
    training.peer_step(twin, batch, "fp32", fused=True)()
    hook.remove()
    ours, theirs = gradients
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_both_decode_the_same_tokens() -> None:
    peer, decoding = script("peer"), script("decoding")
    model, twin = peer.build_pair(small("gpt2", kv_heads=4))
    written = decoding.tinylm_tokens(model, 20, streams=3)
    assert written == decoding.peer_tokens(twin, 20, streams=3)
    assert written == decoding.tinylm_tokens(model, 20, streams=3, use_cache=False)
    assert [len(stream) for stream in written] == [20, 20, 20]


def test_the_training_benchmark_prints_a_row_for_each_setting_and_model(capsys: pytest.CaptureFixture[str]) -> None:
    script("training").main([*SHAPE, "--batch-size", "2"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4 * 3


def test_the_decoding_benchmark_prints_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    script("decoding").main([*SHAPE, "--tokens", "20", "--streams", "3"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == (2 + 6) + (2 + 3)


def test_an_ablation_trains_its_variants_and_tells_their_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The picture is left out: it needs a library for drawing."""
    ablation = importlib.import_module("ablation")
    drawn: list[object] = []
    monkeypatch.setattr(ablation, "draw", lambda results, file: drawn.append(results))
    (tmp_path / "corpus.txt").write_text(story(2000))
    tiny = "--layers 2 --heads 2 --width 16 --context 16 --batch-size 4"
    arguments = ["--groups", "output,residuals", "--steps", "2", "--out", str(tmp_path / "out"), "--options", tiny]
    ablation.main([str(tmp_path / "corpus.txt"), *arguments])
    report = capsys.readouterr().out
    assert (tmp_path / "out" / "ablation.md").read_text() + "\n" == report
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.splitlines() if line.startswith("|")]
    assert [row[0] for row in rows if "-" not in row[0]] == ["output", "tied", "untied", "residuals", "with", "without"]
    tied = rows[2]
    assert 1 < float(tied[1]) < 5 and int(tied[4]) == 2 * 4 * 2 * 1 * 8  # two layers, one key/value head of eight
    assert len(drawn) == 1
    with pytest.raises(SystemExit):
        ablation.main([str(tmp_path / "corpus.txt"), "--groups", "weather"])


def test_start_up_is_measured_beside_importing_torch(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("startup").main([*SHAPE, "--vocab-size", "30"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_memory_is_measured_of_a_corpus_made_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("memory").main(["--megabytes", "0.3"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[2:]] == ["char", "bpe"]
    assert all(50 < int(row[3].replace(",", "")) < 2000 for row in rows[2:])
