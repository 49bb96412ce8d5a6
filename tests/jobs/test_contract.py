"""What every job keeps, with the settings that apply to it, alone and in pairs.

The validation loss is the job's formula, which is computed here in float64, one record at a time, from the records
themselves; what is evaluated is what training validated; and micro-batches, stops and how records share rows change
nothing. The pairs of settings are those of a covering array: in its rows, each two settings are on and off together.
"""

import contextlib
import itertools
import json
import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tinylm
from tests.shell import story
from tests.thread_ranks import in_ranks
from tinylm.adapters.adapter import without_adapters
from tinylm.config.jobs import JOBS, without_effect
from tinylm.config.training import Budget, TrainingConfig
from tinylm.errors import UsageError
from tinylm.jobs.masked.job import masked_evaluation_batches
from tinylm.models.model import Model
from tinylm.system.ranks import ONE_RANK, Ranks
from tinylm.training.events import Stepped
from tinylm.training.result import TrainingResult

SHAPE: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "context": 64}
FIXED: dict[str, Any] = {"steps": 4, "batch_size": 4, "eval_every": 2, "save_every": 2, "log_every": 1, "lr": 0.01}
FIXED |= {"seed": 1, "device": "cpu"}
# On, and off.
FACTORS: dict[str, tuple[Any, Any]] = {
    "dropout": (0.3, 0.0),
    "average": (0.2, 0.0),
    "label_smoothing": (0.2, 0.0),
    "class_weights": ("balanced", "none"),
    "pack": (True, False),
    "mtp_weight": (0.5, 0.0),
    "dtype": ("bf16", "fp32"),
    "lora": (True, False),
}
# Two of the subsets of three of five rows have a row in common, and each has one without the other; row 0 has neither.
COLUMNS = [*itertools.combinations(range(1, 6), 3)]
COVERING = [[row in column for column in COLUMNS] for row in range(6)]
TRAIN_TEXTS = ["a good day by the sea", "bad old cold home", "good man", "so bad a joy", "the good bed", "no bad boat"]
VAL_TEXTS = ["a good boat", "the bad sea", "so good"]


def lines(path: Path, records: list[Mapping[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, records)))


def pairs(texts: list[str]) -> list[Mapping[str, Any]]:
    return [{"source": text, "target": text[::-1]} for text in texts]


def chats(texts: list[str]) -> list[Mapping[str, Any]]:
    return [{"prompt": text, "completion": text.split()[-1]} for text in texts]


def preferences(texts: list[str]) -> list[Mapping[str, Any]]:
    return [{"prompt": text, "chosen": text.split()[0], "rejected": text.split()[-1] + "s"} for text in texts]


def labels(texts: list[str]) -> list[Mapping[str, Any]]:
    return [{"text": text, "label": "good" if "good" in text else "bad"} for text in texts]


RECORDS = {"pairs": pairs, "chat": chats, "preferences": preferences, "labels": labels}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of each kind, and a base of each architecture, with dropout and without."""
    home = tmp_path_factory.mktemp("contract")
    for data in {row.data for row in JOBS.values()}:
        (home / data).mkdir()
        for name, texts in (("train", TRAIN_TEXTS * 2), ("val", VAL_TEXTS)):
            if data == "text":
                (home / data / name).write_text(story(400) if name == "train" else story(900)[400:450])
            else:
                lines(home / data / name, RECORDS[data](texts))
    alphabet = "".join(sorted({*story(2000), *"".join(TRAIN_TEXTS), *"abcdefghijklmnopqrstuvwxyz\n"})) * 3
    (home / "alphabet").write_text(alphabet)
    parts = [alphabet[at : at + 15] for at in range(0, len(alphabet), 15)]
    lines(home / "all.jsonl", [{"prompt": part, "completion": part} for part in parts])
    lines(home / "pairs.jsonl", pairs([alphabet.replace("\n", "").strip()[:60]] * 3))
    for name, dropout in (("", 0.0), ("-dropout", 0.3)):
        shared = SHAPE | {"steps": 1, "tokenizer": "char", "dropout": dropout, "device": "cpu", "dtype": "fp32"}
        tinylm.train(home / "all.jsonl", out=home / f"decoder{name}", val_fraction=0.4, **shared)
        tinylm.train(home / "alphabet", out=home / f"encoder{name}", architecture="encoder", **shared)
        both = {"architecture": "encoder-decoder", "format": "pairs", "val_fraction": 0.4}
        tinylm.train(home / "pairs.jsonl", out=home / f"encoder-decoder{name}", **both, **shared)
    return home


def cases_of(objective: str) -> Iterator[dict[str, bool]]:
    """Which factors are on in each case, of those that apply to the job."""
    row = JOBS[objective]
    settings = {"lr": 0.1, "min_lr": 0.0, "warmup": 0.0, "batch_size": 1, "micro_batch": 1}
    config = TrainingConfig(objective=objective, budget=Budget(steps=1), **settings)
    others = without_effect(config, row)
    others |= {"lora"} if row.has_teachers else set()
    names = [name for name in FACTORS if name not in others]
    assert len(names) <= len(COLUMNS)
    seen = []
    for values in COVERING:
        case = dict(zip(names, values, strict=False))
        if case not in seen:
            seen.append(case)
            yield case


CASES = [
    (objective, architecture, case)
    for objective, row in JOBS.items()
    for architecture in row.architectures
    for case in cases_of(objective)
]


def train(
    home: Path, objective: str, architecture: str, case: dict[str, bool], out: Path, **others: Any
) -> TrainingResult:
    row = JOBS[objective]
    settings = FIXED | {name: FACTORS[name][0 if on else 1] for name, on in case.items() if name in FACTORS} | others
    settings["val_data"] = str(home / row.data / "val")
    is_lora, dropout = settings.pop("lora", False), settings.pop("dropout")
    text = home / row.data / "train"
    if row.data == "pairs":
        settings["format"] = "pairs"
    base = home / (architecture + ("-dropout" if dropout else ""))
    if is_lora:
        return tinylm.finetune_lora(text, model=base, out=out, dropout=dropout, rank=2, unknown="skip", **settings)
    if row.has_reference:
        return tinylm.train(text, out=out, init_from=base, unknown="skip", **settings)
    if row.has_teachers:
        settings |= {"teacher": home / "decoder", "unknown": "skip"}
    else:
        settings["tokenizer"] = "char"
    return tinylm.train(text, out=out, dropout=dropout, architecture=architecture, **SHAPE, **settings)


# The formulas: -log p of what counts, in float64, one record at a time.


def log_p(model: Model, *inputs: list[int]) -> Tensor:
    network = model.network
    return F.log_softmax(network.logits(network(*(torch.tensor([ids]) for ids in inputs)).hidden)[0], dim=-1)


def nats_of_text(model: Model, path: Path) -> Iterator[float]:
    ids = model.encode(path.read_text())
    found = log_p(model, ids[:-1])
    assert len(ids) <= SHAPE["context"] + 1
    yield from (-found[position, token].item() for position, token in enumerate(ids[1:]))


def nats_of_masks(model: Model, path: Path) -> Iterator[float]:
    tokens, tokenizer = np.array(model.encode(path.read_text())), model.tokenizer
    masks = masked_evaluation_batches(tokens, SHAPE["context"], 1, tokenizer.mask_id, tokenizer.vocab_size)
    for batch in masks:
        assert batch.mask is not None
        found = log_p(model, batch.ids[0].tolist())
        yield from (-found[at, batch.targets[0, at]].item() for at in batch.mask[0].nonzero()[:, 0])


def nats_of_pairs(model: Model, path: Path) -> Iterator[float]:
    end = model.tokenizer.end_of_text_id
    for record in map(json.loads, path.read_text().splitlines()):
        source, target = model.encode(record["source"]), model.encode(record["target"])
        found = log_p(model, [end, *target], [*source, end])
        yield from (-found[position, token].item() for position, token in enumerate([*target, end]))


def answer_nats(model: Model, prompt: str, answer: str) -> list[float]:
    """Of the tokens of an answer in ChatML, with its end token."""
    tokenizer = model.tokenizer
    start = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    before, scored = (tokenizer.encode_with_special(text)[0].tolist() for text in (start, f"{answer}<|im_end|>"))
    found = log_p(model, [*before, *scored])
    return [-found[len(before) + at - 1, token].item() for at, token in enumerate(scored)]


def nats_of_answers(model: Model, path: Path) -> Iterator[float]:
    for record in map(json.loads, path.read_text().splitlines()):
        yield from answer_nats(model, record["prompt"], record["completion"])


def losses_of_preferences(model: Model, reference: Callable[[], Any], path: Path) -> Iterator[float]:
    """-log sigmoid(0.1 (log p(chosen) / q(chosen) - log p(rejected) / q(rejected)))."""
    for record in map(json.loads, path.read_text().splitlines()):
        answers = (record["chosen"], record["rejected"])
        chosen, rejected = (sum(answer_nats(model, record["prompt"], answer)) for answer in answers)
        with reference() as other:
            base_chosen, base_rejected = (sum(answer_nats(other, record["prompt"], answer)) for answer in answers)
        margin = 0.1 * ((base_chosen - chosen) - (base_rejected - rejected))
        yield math.log1p(math.exp(-margin))


def nats_of_labels(model: Model, path: Path) -> Iterator[float]:
    for record in map(json.loads, path.read_text().splitlines()):
        ids = torch.tensor([model.encode(record["text"])])
        hidden = model.network(ids, lengths=torch.tensor([ids.shape[1]])).hidden[0]
        vector = hidden[-1] if model.architecture == "decoder" else hidden.mean(dim=0)
        found = F.log_softmax(model.network.logits(vector), dim=-1)
        yield -found[model.labels.index(record["label"])].item()


FORMULAS: dict[str, Callable[[Model, Path], Iterator[float]]] = {
    "next-token": nats_of_text,
    "distillation": nats_of_text,
    "masked-token": nats_of_masks,
    "sequence-to-sequence": nats_of_pairs,
    "chat": nats_of_answers,
    "classification": nats_of_labels,
}


def formula(objective: str, home: Path, result: TrainingResult, has_dropout: bool) -> float:
    """The mean loss of the saved weights on the validation records."""
    model, path = result.load(), home / JOBS[objective].data / "val"
    model.network.double()
    if not JOBS[objective].has_reference:
        return float(np.mean([*FORMULAS[objective](model, path)]))
    base = tinylm.load(home / ("decoder-dropout" if has_dropout else "decoder"))
    base.network.double()
    if result.is_adapter:
        reference: Callable[[], Any] = partial(without_adapter, model)
    else:
        reference = partial(contextlib.nullcontext, base)
    return float(np.mean([*losses_of_preferences(model, reference, path)]))


@contextlib.contextmanager
def without_adapter(model: Model) -> Iterator[Model]:
    with without_adapters(model.network):
        yield model


def weights(result: TrainingResult) -> dict[str, Tensor]:
    return result.load().network.state_dict()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """The ranks that training in this thread joins: those in `joined`, or none."""
    found = threading.local()
    monkeypatch.setattr("tinylm.training.api._no_other_training", contextlib.nullcontext)  # ranks are threads
    monkeypatch.setattr(
        "tinylm.training.api.join_ranks",
        lambda launch, reporter: contextlib.nullcontext(getattr(found, "joined", ONE_RANK)),
    )
    return found


def stop(event: Any) -> None:
    if isinstance(event, Stepped) and event.step == 2:
        signal.raise_signal(signal.SIGINT)


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(name for name, on in value.items() if on) or "plain"


@pytest.mark.parametrize(("objective", "architecture", "case"), CASES, ids=name_of)
def test_a_job_keeps_its_contract(
    objective: str, architecture: str, case: dict[str, bool], home: Path, tmp_path: Path, ranks: threading.local
) -> None:
    row, this = JOBS[objective], (home, objective, architecture, case)
    result = train(*this, tmp_path / "run")
    assert result.step == 4 and result.val_loss is not None
    kept = dict(zip(result.history.validation["step"], result.history.validation["val_loss"], strict=True))
    validated = kept[result.kept_step]

    # The loss is the formula, and what is evaluated is what training validated.
    rounding = 1e-2 if case["dtype"] else 1e-4
    assert formula(objective, home, result, case["dropout"]) == pytest.approx(validated, rel=rounding)
    evaluation = result.load().evaluate(home / row.data / "val", unknown="skip")
    if not row.has_reference:
        assert (evaluation.loss, evaluation.unit) == (pytest.approx(validated, rel=1e-5), row.unit)
    else:  # an evaluation needs no reference, and has the loss of the chosen answers
        assert evaluation.unit == "nats per token" and evaluation.pairs == len(VAL_TEXTS)
        assert result.history.training["loss"][0] == pytest.approx(math.log(2), rel=1e-6)  # the two models are one
        assert result.history.training["margin"][0] == result.history.validation["val_margin"][0] == 0

    # A stop changes nothing, and neither do micro-batches and ranks, but for the random numbers of dropout.
    stopped = train(*this, tmp_path / "stopped", callbacks=[stop])
    assert stopped.step == 2
    resume = tinylm.finetune_lora if case.get("lora") else tinylm.train
    resumed = resume(resume=tmp_path / "stopped")
    assert resumed.step == 4
    for name, value in weights(result).items():
        assert torch.equal(value, weights(resumed)[name]), name
    if not case["dropout"] and not case["dtype"]:
        parts = train(*this, tmp_path / "parts", micro_batch=1)

        def train_in(joined: Ranks) -> TrainingResult:
            ranks.joined = joined
            return train(*this, tmp_path / "ranks")

        one, other = in_ranks(2, train_in)
        assert (one.run, one.val_loss) == (other.run, other.val_loss)
        for name, value in weights(result).items():
            torch.testing.assert_close(weights(parts)[name], value, rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(weights(one)[name], value, rtol=1e-3, atol=1e-4)


def test_the_cases_have_each_two_settings_of_a_job_on_and_off_together() -> None:
    for job, found in itertools.groupby(CASES, key=lambda case: case[:2]):
        cases = [case for *_, case in found]
        for one, other in itertools.combinations(cases[0], 2):
            assert len({(case[one], case[other]) for case in cases}) == 4, (job, one, other)


def test_a_model_without_labels_reads_labelled_texts_alone_and_each_model_refuses_the_data_of_others(
    home: Path,
) -> None:
    """The loss of the texts of records with labels is that of the same texts in a file of lines of JSON."""
    labelled, plain = home / "labelled.jsonl", home / "texts.jsonl"
    lines(labelled, labels(VAL_TEXTS))
    lines(plain, [{"text": record["text"]} for record in labels(VAL_TEXTS)])
    for architecture in ("decoder", "encoder"):
        model = tinylm.load(home / architecture)
        alone = model.evaluate(plain, unknown="skip", format="jsonl").loss
        assert model.evaluate(labelled, unknown="skip").loss == alone
        with pytest.raises(UsageError, match='`format="labels"` does not fit the model, which takes plain text'):
            model.evaluate(labelled, format="labels")
    translator = tinylm.load(home / "encoder-decoder")
    with pytest.raises(UsageError, match='`format="chat"` does not fit the model, which takes pairs'):
        translator.evaluate(home / "chat" / "val", format="chat")
    with pytest.raises(UsageError, match='`architecture="encoder"` cannot learn from a `teacher`'):
        tinylm.train(home / "text" / "train", out=home / "x", teacher=home / "decoder", architecture="encoder")
