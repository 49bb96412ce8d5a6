"""tinylm train with --resume, and with --init-from."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.shell import FILES, TINY, assert_error, copied, records, run_ok, snapshot, story, tinylm
from tinylm.run_directory.directory import RunDirectory
from tinylm.run_directory.loading import load_model, read_config
from tinylm.run_directory.lock import lock_run


@pytest.mark.usefixtures("shelf_cache")
def test_resuming_may_change_budget_and_intervals_and_records_them(run: Path, here: Path) -> None:
    path = copied(run, here / "again")
    before = snapshot(path)
    result = tinylm("train", "--resume", path, "--time", "0.000001s")
    assert_error(result, 2, "its --time of 0.000001s is the total", "--time")
    assert snapshot(path) == before
    changed = ("--steps", 204, "--eval-every", 2, "--save-every", 3, "--log-every", 1, "--patience", 9)
    run_ok("train", "--resume", path, *changed, env={"TINYLM_TRAIN_DEVICE": "cpu", "TINYLM_TRAIN_LAYERS": "7"})
    training = read_config(path).training
    assert training is not None
    assert (training.budget.steps, training.eval_every, training.save_every, training.patience) == (204, 2, 3, 9)
    assert (training.batch_size, training.log_every) == (4, 1)


def test_a_run_that_another_process_is_writing_is_locked(run: Path, corpus: Path, here: Path) -> None:
    path = copied(run, here / "run")
    before = snapshot(path)
    with lock_run(path):
        for options in ((corpus, "--out", path, "--force", *TINY), ("--resume", path)):
            assert_error(tinylm("train", *options, "--steps", 300), 2, f"Another process is writing {path}", "--out")
    assert snapshot(path) == before
    assert [entry.name for entry in here.iterdir() if entry.name.startswith(".")] == []


def test_resuming_needs_the_corpus_only_if_the_cache_was_deleted(here: Path, corpus: Path) -> None:
    run_ok("train", corpus, "--steps", 1, *TINY)
    resume = ("train", "--resume", "checkpoints/corpus", "--steps")
    text = corpus.read_text()
    corpus.write_text("xyz" * 500)
    said = run_ok(*resume, 2).stderr
    assert "Resuming checkpoints/corpus at step 1, on the text as it was when the run began." in said
    assert_error(tinylm(*resume, 3, corpus), 2, "corpus.txt is not the text that checkpoints/corpus was trained on")
    corpus.unlink()
    run_ok(*resume, 3)
    shutil.rmtree(os.environ["TINYLM_CACHE"])
    assert_error(tinylm(*resume, 4), 1, "is no longer in the cache; name its training text", "corpus.txt")
    (here / "moved.txt").write_text(text)
    run_ok(*resume, 4, "moved.txt")


def test_a_run_trained_on_standard_input_keeps_its_tokens_and_can_be_resumed(here: Path) -> None:
    text = story(1500)
    assert run_ok("train", "-", "--steps", 1, *TINY, stdin=text).stdout == "checkpoints/stdin\n"
    path = here / "checkpoints/stdin"
    assert {entry.name for entry in path.iterdir()} == FILES | {"tokens"}
    assert not (Path(os.environ["TINYLM_CACHE"]) / "tokens").exists()
    moved = path.rename(here / "moved")
    run_ok("train", "--resume", moved, "--steps", 2)
    shutil.rmtree(moved / "tokens")
    assert_error(tinylm("train", "--resume", moved, "--steps", 3), 1, "is no longer in the cache", "standard input")


def test_init_from_takes_weights_shape_tokenizer_and_schedule_of_a_run(run: Path, corpus: Path, here: Path) -> None:
    before = snapshot(run)
    options = ("--steps", 1, "--batch-size", 4, "--lr", "1e-20", "--dtype", "fp32")
    run_ok("train", corpus, "--init-from", run, *options)
    old, old_config, old_tokenizer, _ = load_model(run)
    new, new_config, new_tokenizer, _ = load_model(here / "checkpoints/corpus")
    assert new_config.model == old_config.model
    assert new_tokenizer.sha256 == old_tokenizer.sha256
    for name, tensor in old.state_dict().items():
        assert tensor.allclose(new.state_dict()[name], rtol=0, atol=1e-12), name
    assert snapshot(run) == before
    run_ok("train", corpus, "--steps", 1, "--preset", "gpt2", *TINY, "--out", "first")
    run_ok("train", corpus, "--steps", 1, "--init-from", "first", "--out", "second")
    training = read_config(here / "second").training
    assert training is not None and training.schedule == "cosine"


def test_extend_vocab_adds_new_characters_to_the_model(run: Path, here: Path) -> None:
    """Known characters keep their ids and weights; the weights of new ones start as the mean of the old ones."""
    (here / "new.txt").write_text("the old man said λόγος\n" * 60)
    options = ("--init-from", run, "--extend-vocab", "--out", "new", "--batch-size", 4)
    result = run_ok("train", "new.txt", *options, "--steps", 1, "--lr", 1e-30, "--weight-decay", 0)
    assert "Added to the vocabulary: 'γ' (U+03B3)" in result.stderr
    old, _, old_tokenizer, _ = load_model(run)
    new, config, tokenizer, _ = load_model(here / "new")
    assert config.model.vocab_size == tokenizer.vocab_size == old_tokenizer.vocab_size + 5
    text = "the old man"
    assert tokenizer.encode(text).tolist() == old_tokenizer.encode(text).tolist()
    assert tokenizer.decode(tokenizer.encode("λόγος")) == "λόγος"
    weight = old.embedding.weight
    torch.testing.assert_close(new.embedding.weight[: len(weight)], weight)
    torch.testing.assert_close(new.embedding.weight[len(weight) :], weight.mean(0).expand(5, -1))
    assert run_ok("sample", "-m", "new", "-p", "λό", "-n", 3).stdout.startswith("λό")
    run_ok("train", "--resume", "new", "--steps", 2)


def test_the_last_evaluation_is_part_of_the_last_save(corpus: Path, here: Path) -> None:
    """Regression: the save once preceded the evaluation at the last step, and a resumed run lost its best weights."""
    options = ("--steps", 6, "--save-every", 3, "--eval-every", 4, *TINY, "--lr", 0.01, "--json")
    last = records(run_ok("train", corpus, *options))[-1]
    run = here / "checkpoints/corpus"
    state = RunDirectory(run).load_last(read_config(run)).state
    best = (last["best_step"], last["best_val_loss"])
    assert (state["last_eval_step"], state["best_step"], state["best_loss"]) == (6, *best)
