"""Progress, samples and timing of training commands."""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import tinylm
from tests.shell import records, run_ok, story
from tests.shell import tinylm as shell
from tests.variants import randomised, small
from tinylm.commands.console import Console
from tinylm.commands.training_display import TrainingDisplay
from tinylm.config.run import DataConfig, RunConfig, TokenizerConfig
from tinylm.config.training import Budget, TrainingConfig
from tinylm.errors import TinyLMError
from tinylm.reporter import counted
from tinylm.system.process_signals import Interrupted
from tinylm.system.ranks import Launch, Ranks
from tinylm.text.tokenizer import train_char
from tinylm.training.events import Evaluated, Logged, Sampled, Started, Stepped
from tinylm.training.result import TrainingResult
from tinylm.training.validation import generate_sample
from tinylm.transformer.build import build_model


def test_a_sample_during_training_changes_no_state_and_compiles_nothing() -> None:
    """Compiled layers would be recompiled for every length of the sample. Logits that are not finite give no sample."""
    tokenizer = train_char("abcdefghijk\n")
    shape = small(vocab_size=tokenizer.vocab_size, dropout=0.5)
    config = RunConfig.new(model=shape, tokenizer=TokenizerConfig(kind="char", sha256=tokenizer.sha256))
    model = randomised(build_model(shape)).train()
    expected = generate_sample(model, tokenizer, config, 40)
    for layer in model.layers:
        layer.compile(backend=Mock(side_effect=AssertionError("compiled")))
    before = torch.get_rng_state()
    assert generate_sample(model, tokenizer, config, 40) == expected
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    assert generate_sample(model, tokenizer, config, 4) is None


def test_one_is_singular_in_messages() -> None:
    counts = [counted(number, "step") for number in (0, 1, 2, 1469)]
    assert counts == ["0 steps", "1 step", "2 steps", "1,469 steps"]


@pytest.fixture
def started() -> Started:
    """A run on 100 tokens, of which a step has 20."""
    tokenizer = train_char("abc")
    shape = small(vocab_size=tokenizer.vocab_size)
    sizes = {"characters": 110, "bytes": 110, "documents": 1, "train_tokens": 100, "val_tokens": 10}
    data = DataConfig(corpus=("a.txt",), train_characters=100, fingerprint="f", **sizes)
    config = RunConfig.new(model=shape, tokenizer=TokenizerConfig(kind="char", sha256=tokenizer.sha256), data=data)
    return Started(Path("run"), config, build_model(shape), tokenizer, 5.0, None)


class Screen(Console):
    """A console that keeps the descriptions of progress, on a terminal or elsewhere."""

    def __init__(self, on_terminal: bool = False, quiet: bool = False) -> None:
        super().__init__(quiet)
        self.shown: list[str] = []
        self.moves = on_terminal

    @property
    def on_terminal(self) -> bool:
        return self.moves

    def progress(self) -> Any:
        return contextlib.nullcontext(lambda fraction, text: self.shown.append(text))


def test_progress_shows_best_loss_step_tokens_and_epochs(started: Started) -> None:
    """Regression: the loss of step 0 was shown as the current one until the end of a short run."""
    display = TrainingDisplay(console := Screen())
    display(started)
    display(Evaluated(0, 3.354, False, 0.1, tokens=100))
    display(Stepped(1, 0.01))
    display(Logged(10, 0.1, 1.2345, 1e-3, 1.0, 12345.6, 0.5, {}))
    display(Stepped(11, 0.11))
    display(Evaluated(300, 1.6072, True, 1.0))
    display(Stepped(301, 0.5))
    display(Evaluated(400, 1.7, False, 1.5))
    display(Stepped(401, 0.7))
    assert console.shown == [
        "20 tokens 0.20 epochs  step 1",
        "loss 1.234  220 tokens 2.20 epochs  step 11  12,346 tok/s",
        "best 1.607@300  loss 1.234  6.0k tokens 60.20 epochs  step 301  12,346 tok/s",
        "best 1.607@300  loss 1.234  8.0k tokens 80.20 epochs  step 401  val 1.700@400  12,346 tok/s",
    ]
    # The 9 scored tokens have 18 bytes: 1.6072 / ln 2 * 9 / 18 = 1.159 and 1.7 / ln 2 * 9 / 18 = 1.226.
    data = dataclasses.replace(started.config.data, val_bytes=18)
    training = TrainingConfig(budget=Budget(steps=9), batch_size=1, micro_batch=1, lr=1, min_lr=0, warmup=0)
    config = dataclasses.replace(started.config, data=data, training=training)
    display = TrainingDisplay(console := Screen())
    for of_run in (started.config, config):
        display(dataclasses.replace(started, config=of_run, best=(300, 1.6072)))
        display(Evaluated(400, 1.7, False, 1.5))
        display(Stepped(401, 0.7))
    assert console.shown == [
        "best 1.607@300  8.0k tokens 80.20 epochs  step 401  val 1.700@400",
        "best 1.159 bits/byte (1.607)@300  8.0k tokens 80.20 epochs  step 401  val 1.226 bits/byte (1.700)@400",
    ]


def test_samples_are_shown_with_line_breaks(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: line breaks were printed as \\n. Elsewhere than on a terminal, and with --quiet, none is shown."""
    for on_terminal, quiet, lines in ((True, False, 3), (True, True, 0), (False, False, 0)):
        display = TrainingDisplay(Screen(on_terminal, quiet))
        for event in (started, Sampled(50, 2.1913, 1.0, "to be\nor `width` 3")):
            display(event)
        found = capsys.readouterr().err.splitlines()
        assert found == ["Sample at step 50, validation loss 2.191:", "to be", "or `width` 3"][:lines]


@pytest.mark.parametrize(("rank", "message"), [(0, "choose another `report`"), (1, "began")])
def test_errors_of_report_and_trackers_reach_all_ranks(
    rank: int, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    published: list[str] = []

    @contextlib.contextmanager
    def join(launch: Launch, reporter: object) -> Iterator[Ranks]:
        try:
            yield Ranks(launch)
        except TinyLMError as error:
            published.append(str(error))
            raise

    monkeypatch.setattr("tinylm.distributed.ranks.join_ranks", join)
    monkeypatch.setattr("tinylm.training.pipeline.train_or_resume", Mock(side_effect=TinyLMError("began")))
    for name, value in {"MASTER_ADDR": "x", "MASTER_PORT": 1, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, str(rank))
    shell("train", tmp_path / "text.txt", "--report", tmp_path / "missing" / "report.html")
    assert len(published) == 1 and message in published[0]


def trained(display: TrainingDisplay, folder: Path, **settings: Any) -> TrainingResult:
    """The result of a short run in a folder, while `display` shows it."""
    (folder / "text.txt").write_text(story(3000))
    shape = {"layers": 1, "heads": 2, "width": 16, "context": 16, "batch_size": 4}
    with display:
        return tinylm.train(folder / "text.txt", folder / "run", callbacks=[display], force=True, **shape, **settings)


def test_training_ends_with_a_sample_and_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    use = f'To use it: tinylm sample --model {run} --prompt "..."'
    title = "Sample of the saved weights:"
    for console in (Screen(quiet=True), Screen()):
        display = TrainingDisplay(console)
        display.show_result(trained(display, tmp_path, steps=5), "tinylm train")
        logged = capsys.readouterr()
        assert logged.out == f"{run}\n" and title not in logged.err and use not in logged.err
    display = TrainingDisplay(Screen(on_terminal=True))
    display.show_result(result := trained(display, tmp_path, steps=5), "tinylm train")
    shown = capsys.readouterr()
    sample = run_ok("sample", "--model", run, "--seed", 0, "-n", 120, "--engine", "torch").stdout
    assert shown.out == f"{run}\n" and shown.err.endswith(f"{title}\n{sample}{use}\n")
    (run / "model.safetensors").unlink()
    display.show_result(result, "tinylm train")
    failed = capsys.readouterr()
    assert failed.out == f"{run}\n" and failed.err.endswith(f"{use}\n") and title not in failed.err


def test_a_rank_that_got_no_events_shows_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = trained(TrainingDisplay(Screen()), tmp_path, steps=1)
    capsys.readouterr()
    TrainingDisplay(Screen()).show_result(result, "tinylm train")
    assert capsys.readouterr() == ("", "")


def test_the_last_lines_have_bits_per_byte_beside_those_of_baselines_and_only_on_plain_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For a long run: a short one leaves the baselines out."""
    nats = r"\d\.\d{4} nats per token"
    for architecture, loss in (("encoder", nats), ("decoder", rf"\d\.\d{{4}} bits per byte \({nats}\)")):
        display = TrainingDisplay(Screen())
        result = trained(display, tmp_path, architecture=architecture, val_fraction=0.1, steps=1)
        display.show_result(dataclasses.replace(result, seconds=1e6), "tinylm train")
        last_lines = capsys.readouterr().err.splitlines()[-2:]
        matches = [re.fullmatch(rf"Best validation loss: ({loss}), .*", line) for line in last_lines]
        (best,) = (match[1] for match in matches if match)
    (scored,) = records(run_ok("eval", "-m", tmp_path / "run", "--baselines", "--json"))
    others = ", ".join(f"{name} {scored['baselines'][name]:.4f}" for name in ("xz", "PPMd"))
    assert last_lines[1] == f"The same text in bits per byte: this model {best.split()[0]}, {others}."
    display.show_result(dataclasses.replace(result, seconds=1e6), "tinylm train")
    assert capsys.readouterr().err.splitlines()[-1] == last_lines[1]  # from the cache
    display.show_result(dataclasses.replace(result, seconds=0), "tinylm train")
    assert "The same text" not in capsys.readouterr().err


def test_a_signal_before_the_first_step_says_that_nothing_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Interrupted), TrainingDisplay(Screen()):
        raise Interrupted
    assert capsys.readouterr().err == "Stopped before the first step; nothing was written.\n"
