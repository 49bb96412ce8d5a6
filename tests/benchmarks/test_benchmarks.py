import argparse
import importlib
import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.shell import ROOT, records, run_child, run_ok, story
from tests.variants import small
from tinylm.model.build import build_model
from tinylm.objectives.loss import Loss, next_token
from tinylm.text.batches import Batch
from tinylm.training.trainer import Trainer

pytestmark = pytest.mark.slow

measure = importlib.import_module("measure")

SHAPE = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "24", "--rounds", "1", "--warmup", "0"]


class FakeClock:
    """A clock that advances only in calls of its functions, which take the given seconds one after another."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def function(self, name: str, *seconds: float) -> Callable[[], None]:
        durations = iter(seconds)

        def work() -> None:
            self.calls.append(name)
            self.now += next(durations)

        return work


@pytest.mark.parametrize("program", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_a_benchmark_finds_what_it_imports(program: str) -> None:
    importlib.import_module(program)


def test_functions_take_turns_and_the_warm_up_is_not_measured() -> None:
    clock = FakeClock()
    functions = {"a": clock.function("a", 90, 1, 2), "b": clock.function("b", 90, 3, 4)}
    times = measure.take_turns(functions, rounds=2, warmup=1, clock=clock)
    assert clock.calls == ["a", "b", "a", "b", "a", "b"]
    assert times == {"a": [1, 2], "b": [3, 4]}


def test_zero_rounds_are_an_error() -> None:
    with pytest.raises(ValueError, match="0 rounds"):
        measure.take_turns({}, rounds=0)


def test_ratios_are_computed_per_round() -> None:
    """A machine that is ten times slower in one round must not change the ratio."""
    times = {"slow": [4.0, 40.0, 6.0], "fast": [2.0, 20.0, 2.0]}
    assert measure.speedup(times, "fast", base="slow") == measure.Spread(2.0, 2.0, 3.0)
    assert str(measure.speedup(times, "fast", base="slow")) == "2.00 (2.00 to 3.00)"


def test_speed_is_computed_from_the_median_time() -> None:
    assert measure.tokens_per_second({"a": [1.0, 2.0, 100.0]}, "a", 3000) == "1,500"


def test_tables_are_markdown_with_padded_columns() -> None:
    assert measure.table(["name", "x"], [["a", "10"]]) == "| name | x  |\n| ---- | -- |\n| a    | 10 |"


def test_the_description_of_the_machine_has_versions_and_threads() -> None:
    described = measure.describe_machine(["torch"])
    assert f"torch {torch.__version__}" in described
    assert "1 threads" in described


def test_the_peer_with_the_same_weights_gives_the_same_logits() -> None:
    peer = importlib.import_module("peer")
    config = small("gpt2", kv_heads=4)
    model, twin = peer.build_pair(config)
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    peer.assert_same_logits(model, peer.build_peer(config, model, peer.FUSED_GELU), ids)
    assert sum(p.numel() for p in twin.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("part", ["layers.1.attention.v_proj.bias", "layers.0.feedforward.up_proj.weight"])
def test_comparing_logits_detects_a_difference_in_one_parameter(part: str) -> None:
    peer = importlib.import_module("peer")
    model, twin = peer.build_pair(small("gpt2", kv_heads=4))
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    with torch.no_grad():
        model.get_parameter(part)[0] += 1.0
    with pytest.raises(AssertionError):
        peer.assert_same_logits(model, twin, ids)


def test_tinylm_and_the_peer_take_the_same_gradient_step() -> None:
    """Compares the embedding's gradient that the optimizer receives: the same loss and the same clipping."""
    peer, throughput = importlib.import_module("peer"), importlib.import_module("throughput")
    config = small("gpt2", kv_heads=4)
    model, twin = peer.build_pair(config)
    batch = throughput.random_batch(config, rows=2)
    embeddings = model.embedding.weight, twin.transformer.wte.weight
    gradients: dict[int, torch.Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            gradients.update({id(p): p.grad.clone() for p in group["params"]})

    hook = register_optimizer_step_pre_hook(keep)
    throughput.tinylm_step(model, batch, "fp32")()
    throughput.peer_step(twin, throughput.peer_loss(twin, batch), "fp32", fused=True)()
    hook.remove()
    ours, theirs = (gradients[id(embedding)] for embedding in embeddings)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_timed_step_is_one_optimizer_step_without_evaluation_and_save(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = importlib.import_module("training_step")

    def never(trainer: Trainer) -> None:
        raise AssertionError

    monkeypatch.setattr(Trainer, "_evaluate", never)
    monkeypatch.setattr(Trainer, "_save", never)
    taken: list[object] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: taken.append(optimizer))
    config = small("gpt2")
    step = steps.tinylm_step(build_model(config), steps.random_batch(config, rows=2), "fp32")
    for count in (1, 2):
        step()
        assert len(taken) == count
    hook.remove()


def test_the_share_of_the_product_rate_counts_the_operations_of_a_step() -> None:
    throughput = importlib.import_module("throughput")
    config = small("gpt2", kv_heads=4)
    batch = throughput.random_batch(config, rows=3)
    matrices = config.layers * (4 * config.width**2 + 2 * config.width * config.ffn_width)
    matrices += config.width * config.vocab_size
    flops = 3 * config.context * (6 * matrices + 6 * config.layers * config.context * config.width)
    flops_of_products = 100 * 2 * 2048 * 512**2
    as_products = flops / flops_of_products  # seconds, if the products take one second
    shares = throughput.share_of_product_rate(config, batch, [4 * as_products, as_products, 2 * as_products], [1, 1, 1])
    assert shares == "0.50"


def test_tinylm_and_the_peer_decode_the_same_tokens() -> None:
    peer, decoding = importlib.import_module("peer"), importlib.import_module("decoding")
    model, twin = peer.build_pair(small("gpt2", kv_heads=4))
    tokens = decoding.tinylm_tokens(decoding.fused_copy(model), 20, streams=3)
    assert tokens == decoding.peer_tokens(twin, 20, streams=3)
    assert tokens == decoding.tinylm_tokens(model, 20, streams=3, use_cache=False)
    assert [len(stream) for stream in tokens] == [20, 20, 20]


@pytest.mark.parametrize(("bf16", "settings"), [(True, 4), (False, 3)])
def test_the_training_benchmark_prints_a_row_for_each_setting_and_model(
    bf16: bool, settings: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without settings in bf16 on a processor that has no instructions for it."""
    throughput = importlib.import_module("throughput")
    monkeypatch.setattr(throughput, "computes_bf16", lambda: bf16)
    throughput.main([*SHAPE, "--batch-size", "2"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + settings * 3
    assert any("both bf16" in row for row in rows) == bf16


NANOGPT = """
import torch
from dataclasses import dataclass
from torch.nn import functional as F

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float

class GPT(torch.nn.Linear):
    def __init__(self, config):
        super().__init__(config.n_embd, config.vocab_size)
        self.embed = torch.nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, ids, targets):
        logits = super().forward(self.embed(ids))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
"""


def test_nanogpt_is_measured_if_its_file_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a stub with nanoGPT's interface."""
    (tmp_path / "model.py").write_text(NANOGPT)
    throughput = importlib.import_module("throughput")
    monkeypatch.setattr(throughput, "computes_bf16", lambda: True)
    throughput.main([*SHAPE, "--batch-size", "2", "--nanogpt", str(tmp_path / "model.py")])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 4 * 4 and sum("| nanoGPT " in row for row in rows) == 4


def test_the_contexts_benchmark_prints_a_row_for_each_length(capsys: pytest.CaptureFixture[str]) -> None:
    """Also checks the ratio of the bytes read with a short and a long cache."""
    contexts = importlib.import_module("contexts")
    contexts.main([*SHAPE, "--contexts", "32", "64", "--cached", "2", "14"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows] == ["context", "-" * 7, "32", "64", "tokens cached", "-" * 13, "2", "14"]
    config = measure.make_model_config(preset="modern", size="small", vocab_size=65, layers=1, heads=2, width=16)
    weights = sum(4 * p.numel() for p in contexts.build_model(config).parameters())
    token = 2 * 4 * config.kv_heads * config.head_dim
    assert float(rows[-1][4]) == pytest.approx((weights + 14 * token) / (weights + 2 * token), abs=0.01)


def test_the_gpu_benchmark_runs_on_any_device(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part in a process. Even the first evaluations have a loss below that of equal probabilities."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "corpus.txt").write_text(story(5000))
    (tmp_path / "model.py").write_text(NANOGPT)
    text = ["--text", str(tmp_path / "corpus.txt"), "--times", "4s", "2s", "--loss", str(math.log(40))]
    peer = ["--nanogpt", str(tmp_path / "model.py")]
    importlib.import_module("gpu").main(["--small", "--rounds", "1", "--device", "cpu", *text, *peer])
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capfd.readouterr().out.splitlines()
        if line.startswith("|") and not line.startswith("| --")
    ]
    names = [row[0].removeprefix("1x64, fp32: ").removeprefix("1x64, bf16: ").split(",")[0] for row in rows]
    assert names == [
        *("work", "product of matrices", "tinylm", "nanoGPT"),
        *("work", "memory copy", "decoding one stream"),
        *("text", "corpus.txt"),
        *("largest batch", "training"),
        *("correctness", "fp32", "bf16"),
    ]
    assert 0 < float(rows[2][2].strip(" %")) < 100
    assert rows[8][0] == "corpus.txt, 2s" and 0 < float(rows[8][3]) < 60
    assert rows[10][1:] == ["8", "16 were not tried", "256"]
    assert float(rows[12][1]) == 0 < float(rows[13][1]) < 0.1


def test_a_part_of_the_gpu_benchmark_is_killed_at_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = importlib.import_module("gpu")
    monkeypatch.setitem(gpu.PARTS, "batch", gpu.Part(gpu.batch, 0.01))
    with pytest.raises(SystemExit, match="not finished in time: batch"):
        gpu.main(["--parts", "batch", "--small", "--device", "cpu"])
    assert sum(part.limit for part in gpu.PARTS.values()) < 9 * 60


def test_the_time_to_a_loss_is_that_of_the_first_evaluation_that_reaches_it() -> None:
    gpu = importlib.import_module("gpu")
    losses = {1.0: 3.0, 2.0: 1.5, 3.0: 1.4, 4.0: 1.6, 5.0: 1.3}
    records = [{"val_loss": loss, "seconds": seconds} for seconds, loss in losses.items()]
    records = [{"loss": 0.1, "seconds": 0.5}, *records, {"run": "r", "val_loss": 0.2, "seconds": 6.0}]
    assert gpu.seconds_to(records, 1.4) == 3.0
    assert gpu.seconds_to(records, 1.2) is None
    assert gpu.seconds_to(records, None) is None


def test_the_largest_batch_is_the_last_one_without_smaller_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, steps = importlib.import_module("gpu"), importlib.import_module("training_step")
    config = small("gpt2")

    def objective(model: torch.nn.Module, batch: Batch) -> Loss:
        if len(batch) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return next_token(model, batch)

    monkeypatch.setattr(steps, "next_token", objective)
    assert gpu.largest_batch(config, "cpu", "fp32", 64) == 4
    assert gpu.largest_batch(config, "cpu", "fp32", 2) == 2


def test_results_that_differ_from_those_of_the_cpu_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "BOUNDS", {"fp32": 1e-3, "bf16": 1e-5})
    with pytest.raises(SystemExit, match="in bf16 differ"):
        gpu.run("correctness", argparse.Namespace(device="cpu", small=True))


def test_rates_are_shares_of_the_measured_and_of_the_specified_peak() -> None:
    rates = importlib.import_module("gpu_rates")
    peak = rates.Peak("FLOP", 800e12, rates.SPECIFIED["NVIDIA H100 80GB HBM3"].flops)
    assert peak.header() == ["of 800 TFLOP/s, measured", "of 989 TFLOP/s, specified"]
    assert peak.shares(400e12) == ["50.0%", "40.4%"]
    unknown = rates.Peak("B", 2e12, None)
    assert (unknown.header()[1], unknown.shares(1e12)) == ("of unknown, specified", ["50.0%", "-"])


def test_the_flops_of_a_gpt2_training_step_follow_the_published_formula() -> None:
    """6 N per token, N = 12 L D^2 + V D, and 6 L D T for causal attention (Kaplan et al. 2020)."""
    gpu = importlib.import_module("gpu")
    config, _ = gpu.sizes(small=False).trained[0]
    parameters = 12 * 12 * 768**2 + 50_304 * 768
    assert gpu.training_flops(config) == pytest.approx(6 * parameters + 6 * 12 * 768 * 1024, rel=1e-3)


def test_the_decoding_benchmark_prints_a_row_for_each_implementation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_text(story(5000))
    run_ok("train", tmp_path / "corpus.txt", "-o", tmp_path / "run", "--size", "nano", "--steps", 1)
    capsys.readouterr()
    importlib.import_module("decoding").main(
        [*SHAPE, "--tokens", "20", "--streams", "3", "--run", str(tmp_path / "run")]
    )
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("|")]) == (2 + 6) + (2 + 3) + (2 + 4)
    loss, percent = re.fullmatch(r"int8 changes .* from ([\d.]+) to .*: ([-+][\d.]+)%\.", lines[-1]).groups()
    assert float(loss) == pytest.approx(math.log(30), rel=0.3) and abs(float(percent)) < 0.5


def test_the_encoding_benchmark_prints_a_row_for_each_encoder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_text(story(5000))
    importlib.import_module("encoding").main(
        [str(tmp_path / "corpus.txt"), "--megabytes", "0.1", "--vocab-size", "300", "--rounds", "1"]
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 2 * 4


def test_an_ablation_trains_its_variants_and_prints_their_losses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the plot, which needs matplotlib."""
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
    assert 1 < float(tied[1]) < 5
    assert int(tied[4]) == 2 * 4 * 2 * 1 * 8  # 2 (k, v) x 4 bytes x 2 layers x 1 key/value head x head_dim 8
    assert len(drawn) == 1
    runs = {folder.name for folder in (tmp_path / "out").iterdir() if folder.is_dir()}
    assert runs == {"output-tied-0", "output-untied-0", "residuals-without-0"}  # the default is trained once
    with pytest.raises(SystemExit):
        ablation.main([str(tmp_path / "corpus.txt"), "--groups", "weather"])


def test_the_gradients_benchmark_agrees_with_theory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The norm of LayerNorm's Jacobian is sqrt(D) / |x|. Adam's first update is the sign of the gradient."""
    (tmp_path / "corpus.txt").write_text(story(2000))
    arguments = [str(tmp_path / "corpus.txt"), "--width", "16", "--depths", "2", "--streams", "3"]
    importlib.import_module("gradients").main(arguments)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    assert [row[0] for row in rows if "layers" in row[0]] == ["pre-norm, 2 layers", "post-norm, 2 layers"]
    jacobians = [row for row in rows if len(row) == 4 and row[0] in ("64", "512")]
    assert len(jacobians) == 6
    for row in jacobians:
        assert float(row[2]) == pytest.approx(float(row[3]), rel=0.05)  # not exact: LayerNorm subtracts the mean of x
    variances = {row[0]: float(row[1]) for row in rows if len(row) == 3 and row[0] in ("1", "64")}
    assert variances["64"] < variances["1"] <= 4 / 3  # the largest sample variance of three values that are 1 or -1


def test_the_layers_benchmark_prints_its_three_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ["--widths", "8", "--lengths", "8", "--experts", "2", "3"]
    importlib.import_module("layers").main(["--rounds", "1", *sizes])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == (2 + 4) + (2 + 1) + (2 + 2)


def test_the_lengths_benchmark_evaluates_models_beyond_their_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.txt").write_text(story(2000))
    tiny = ("--layers", 1, "--heads", 2, "--width", 16, "--context", 16, "--steps", 1)
    positions = ("rope", "learned", "none", "relative", "sinusoidal")
    for position in positions:
        run_ok("train", tmp_path / "corpus.txt", "-o", tmp_path / position, "--position", position, *tiny)
    capsys.readouterr()
    importlib.import_module("lengths").main([str(tmp_path / name) for name in positions])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == list(positions)
    for name, *losses in rows:
        (result,) = records(run_ok("eval", "-m", tmp_path / name, "--json"))
        available = losses[:2] if name == "learned" else losses
        # After one step of training the loss hardly depends on the position.
        assert [float(loss) for loss in available] == pytest.approx([result["loss"]] * len(available), abs=0.1)
        assert losses[len(available) :] == ["-"] * (4 - len(available))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_finetuning_benchmark_compares_methods(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    finetuning = importlib.import_module("finetuning")
    dense = ("full", "LoRA, rank 8", "LoRA, rank 8, shared B")
    monkeypatch.setattr(finetuning, "DENSE", {name: finetuning.DENSE[name] for name in dense})
    monkeypatch.setattr(finetuning, "MIXED", {"router": f"{finetuning.LORA} --rank 2 --target router"})
    monkeypatch.setattr(finetuning, "TARGETS", ("attention",))
    monkeypatch.setattr(finetuning, "RATES", (1e-3,))
    monkeypatch.setattr(finetuning, "SEEDS", (0,))
    monkeypatch.setattr(finetuning, "RATE_FACTORS", (1, 100))
    for name, text in (("one.txt", story(6000)), ("two.txt", "no joy, no joy; no bed\n" * 200)):
        (tmp_path / name).write_text(text)
    tiny = "--layers 2 --heads 2 --width 16 --context 16 --batch-size 4"
    arguments = ["--options", tiny, "--base-steps", "30", "--steps", "25", "--experts", "--experts 2"]
    finetuning.main([str(tmp_path / "one.txt"), str(tmp_path / "two.txt"), *arguments])
    rows = [
        [cell.strip().replace(",", "") for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|") and "--" not in line
    ]
    names = ["dense base", "untuned", "full", "LoRA rank 8", "LoRA rank 8 shared B", "base with experts"]
    assert [row[0] for row in rows[:6]] == names
    full, lora, shared, router = rows[2], rows[3], rows[4], rows[7]
    outputs = 16 + 8 + 8 + 16  # of the q, k, v and o projections; one key/value head with head_dim 8
    assert int(lora[1]) == 2 * 8 * (4 * 16 + outputs)
    assert int(shared[1]) == int(lora[1]) - 8 * outputs
    assert int(router[1]) == 2 * 2 * (16 + 2)
    assert float(full[4]) < float(lora[4]) < float(rows[1][4])
    assert all(int(row[2]) > 50 for row in (full, lora, router))
    assert all(float(row[5]) != float(row[4]) for row in (full, lora, router))


def test_the_best_learning_rate_of_an_adapter_is_chosen_on_other_text_than_the_printed_loss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.txt").write_text(story(6000))
    (tmp_path / "two.txt").write_text("no joy, no joy; no bed\n" * 180 + "no bed, no joy\n" * 20)
    tiny = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--batch-size", "4", "--steps", "2"]
    run_ok("train", tmp_path / "one.txt", "-o", tmp_path / "base", "--tokenizer", "bpe", "--vocab-size", "300", *tiny)
    capsys.readouterr()
    rates = importlib.import_module("adapter_rates")
    out = tmp_path / "rates.jsonl"
    arguments = [str(tmp_path / "two.txt"), "--base", str(tmp_path / "base"), "--steps", "3", "--seeds", "0,1"]
    arguments += ["--kinds", "lora-2,bottleneck-16", "--rates", "1e-9,0.03", "--out", str(out)]
    rates.main(arguments)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|") and "--" not in line
    ]
    assert rows[0] == ["base", "adapter", "steps", "1e-09", "0.03", "best"]
    assert [row[:3] for row in rows[1:]] == [["base", "lora-2", "3"], ["base", "bottleneck-16", "3"]]
    for row in rows[1:]:
        assert float(row[4]) < float(row[3])
        assert row[5] == "0.03"
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(records) == 2 * 2 * 2
    assert all(record["val"] != record["test"] for record in records)
    rates.main(arguments)  # recorded runs are not repeated
    assert len(out.read_text().splitlines()) == len(records)


@pytest.mark.parametrize("engine", ["torch", pytest.param("llama.cpp", marks=pytest.mark.llamacpp)])
def test_the_startup_benchmark_prints_a_row_for_each_process_and_part(
    engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    startup = importlib.import_module("startup")
    if engine == "torch":
        monkeypatch.setattr(startup, "import_llama_cpp", lambda: None)
    startup.main([*SHAPE, "--vocab-size", "30"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == (2 + 4 if engine == "torch" else 2 + 7 + 2 + 6)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_memory_benchmark_prints_plausible_peaks(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("memory").main(["--megabytes", "0.3"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows[2:]] == ["char", "bpe"]
    assert all(50 < int(row[3].replace(",", "")) < 2000 for row in rows[2:])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_memory_benchmark_compares_the_estimate_with_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("memory").main(
        ["--models", "4x128", "--kinds", "adamw;lora, checkpointed", "--dtype", "fp32"]
    )
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[2].strip() for row in rows[2:]] == ["adamw", "lora, checkpointed"]
    assert all(0.7 < float(row[5]) < 1.3 for row in rows[2:])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_the_memory_benchmark_has_a_row_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ["--kinds", "adamw", "--dtype", "fp32"]
    importlib.import_module("memory").main(["--models", "4x128", *kinds, "--ranks", "2", "--parallel", "fsdp"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [row[2].strip() for row in rows[2:]] == [f"adamw, fsdp, rank {rank} of 2" for rank in (0, 1)]
    assert all(0.7 < float(row[5]) < 1.3 for row in rows[2:])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_a_measured_process_is_killed_with_its_children_at_the_time_limit() -> None:
    memory = importlib.import_module("memory")
    program = (
        "import subprocess; child = subprocess.Popen(['sleep', '100']); print(child.pid, flush=True); child.wait()"
    )
    command = [sys.executable, "-c", program]
    with memory.running(command, limit=5.0, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        assert process.wait(timeout=60) == -9
    deadline = time.monotonic() + 60
    while memory.memory_of(child, "VmRSS") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not memory.memory_of(child, "VmRSS")  # ended, or a zombie without memory


@pytest.mark.parametrize(("flag", "lengths"), [("--times", ["1s", "2s"]), ("--steps", ["3", "5"])])
def test_the_learning_benchmark_prints_a_row_for_each_text_preset_and_budget(
    flag: str, lengths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(story(6000))
    arguments = [flag, *lengths, "--presets", "modern", "gpt2", "--seeds", "1", "--options", "--size nano"]
    importlib.import_module("learning").main([str(tmp_path / "one.txt"), str(tmp_path / "two.txt"), *arguments])
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("| one", "| two"))
    ]
    assert [row[:3] for row in rows] == [
        [text, preset, length] for text in ("one.txt", "two.txt") for preset in ("modern", "gpt2") for length in lengths
    ]
    for *_, nats, bits in rows:  # characters are tokens of one byte
        assert float(bits.split()[0]) == pytest.approx(float(nats.split()[0]) / math.log(2), abs=2e-4)


def test_seeds_that_train_at_once_have_the_results_of_seeds_in_turn_and_of_commands_for_one_seed_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(story(6000))

    def losses(*arguments: str) -> str:
        words = ["--steps", "3", *arguments, "--options", "--size nano"]
        importlib.import_module("learning").main([str(tmp_path / "text.txt"), *words])
        (row,) = [line for line in capsys.readouterr().out.splitlines() if "| text.txt" in line]
        return row.split("|")[-3].strip()

    both = losses("--seeds", "2")
    assert losses("--seeds", "2", "--jobs", "2") == both
    ends = re.findall(r"[0-9.]+", both)[1:]  # the mean is the first
    assert sorted(losses("--seeds", "1", "--first-seed", seed) for seed in ("0", "1")) == ends
    with pytest.raises(SystemExit):
        importlib.import_module("learning").main([str(tmp_path / "text.txt"), "--jobs", "2"])


@pytest.mark.slow
def test_the_ranks_benchmark_prints_a_row_for_each_format() -> None:
    shape = ("--layers", "1", "--heads", "1", "--width", "8", "--context", "8", "--rounds", "1", "--rows", "4")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_child([sys.executable, *launch, str(ROOT / "benchmarks" / "ranks.py"), *shape])
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("|")][2:] == ["fp32", "bf16"], done


@pytest.mark.slow
def test_the_saving_benchmark_measures_saves_beside_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = importlib.import_module("saving")
    for name, value in {"WIDTH": 64, "CONTEXT": 8, "BATCH": 2}.items():
        monkeypatch.setattr(saving, name, value)
    monkeypatch.setattr(sys, "argv", ["saving.py", "--training", "--rounds", "1", "--gigabytes", "0.001"])
    saving.main()
    assert re.search(
        r"0\.00 GB per save, [\d.]+ s per step: a save holds training up by -?[\d.]+ s", capsys.readouterr().out
    )
