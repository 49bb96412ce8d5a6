"""Reference: cross-entropy in float64 of the logits of one text at a time, by the models of reference_parts.py."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import reference_parts
from tests.variants import randomised, small
from tinylm.config.model import ModelConfig
from tinylm.config.training import Budget, TrainingConfig
from tinylm.jobs.labels.classifier import POOLING, Classification, classification_loss, label_logits
from tinylm.jobs.labels.corpus import LabelTokens
from tinylm.text.scored_tokens import CODES_PER_ID, FIRST, SCORED, ScoredRows
from tinylm.text.token_files import TokenFolder
from tinylm.text.tokenizer import train_char
from tinylm.transformer.build import build_model

LABELS = ("a", "b", "c", "d")
CONTEXT = 12


def random_texts(number: int = 9) -> LabelTokens:
    """Texts of 1 to 15 tokens, some longer than the context. The label d does not occur."""
    rng = np.random.default_rng(5)
    parts = []
    for _ in range(number):
        ids = [*rng.integers(1, 13, rng.integers(1, 16)), rng.integers(len(LABELS) - 1)]
        codes = CODES_PER_ID * np.array(ids, dtype=np.uint32)
        codes[0] |= FIRST
        codes[-1] |= SCORED
        parts.append(codes)
    return LabelTokens(np.concatenate(parts))


TEXTS = random_texts()


@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
@pytest.mark.parametrize("smoothing", [None, (0.1, 0.02, 0.08)])
@pytest.mark.parametrize("weights", [None, (0.5, 2.0, 1.25)])
def test_loss_and_accuracy_are_their_formulas(
    architecture: str, smoothing: tuple[float, ...] | None, weights: tuple[float, ...] | None
) -> None:
    """The logits of a decoder are those after the last token; of an encoder, the mean of those of all tokens, which
    are the logits of the mean vector, since the head is linear.
    """
    config = small(architecture=architecture, context=CONTEXT, tie=False, labels=LABELS)
    network = randomised(build_model(config), 1).double()
    assert network.output is not None and network.output.weight.shape == (4, 16)
    values = {name: value.detach().numpy() for name, value in network.state_dict().items()}
    losses, hits = [], []
    for index in range(len(TEXTS)):
        ids, _ = TEXTS.tokens(index)
        text, label = ids[:-1][:CONTEXT].tolist(), int(ids[-1])
        if architecture == "decoder":
            logits = reference_parts.decoder_logits_with_parts(values, config, text, table=np.float32)[-1]
        else:
            logits = reference_parts.encoder_logits(values, config, text, len(text), table=np.float32).mean(axis=0)
        log_p = logits - math.log(np.exp(logits).sum())
        target = np.array([*(smoothing or np.zeros(3)), 0.0])  # none of it on the label d
        target[label] += 1 - target.sum()
        losses.append(-(1 if weights is None else weights[label]) * (target * log_p).sum())
        hits.append(int(logits.argmax()) == label)
    batch = ScoredRows(TEXTS, CONTEXT, packed=False).batch(range(len(TEXTS)))
    given = [None if values is None else torch.tensor(values, dtype=torch.float64) for values in (weights, smoothing)]
    found = classification_loss(network, batch, POOLING[architecture], *given)
    assert found.n_targets == len(TEXTS)
    assert found.total.item() == pytest.approx(sum(losses), rel=1e-6)
    assert found.metrics["accuracy"].item() == pytest.approx(np.mean(hits))
    assert 0 < found.metrics["accuracy"] < 1


def balanced(codes: np.ndarray, **training: Any) -> tuple[Classification, ModelConfig]:
    """The task of an encoder on texts with balanced weights of labels, and the model's configuration."""
    config = small(architecture="encoder", context=CONTEXT, tie=False, labels=LABELS, vocab_size=100)
    settings = {"budget": Budget(steps=3), "batch_size": 9, "micro_batch": 9, "lr": 1e-3, "min_lr": 0.0, "warmup": 0.0}
    chosen = TrainingConfig(objective="classification", class_weights="balanced", **settings, **training)
    tokenizer = train_char("".join(map(chr, range(97, 120))))
    return Classification(TokenFolder(Path("unused"), codes, codes), tokenizer, config, chosen), config


def test_balanced_weights_give_every_label_the_same_weight_in_total() -> None:
    """Of labels that occur: the weighted counts are equal, and sum up to the number of texts."""
    task, config = balanced(np.asarray(TEXTS._codes))
    labels = [int(TEXTS.tokens(index)[0][-1]) for index in range(len(TEXTS))]
    network = build_model(config)
    assert network.output is not None
    torch.nn.init.zeros_(network.output.weight)  # each text has a loss of log(4) times its weight
    loss = task.objective(0.0)(network, task.batch(0))
    assert loss.total.item() == pytest.approx(len(labels) * math.log(4), rel=1e-5)
    alone = [index for index, label in enumerate(labels) if label == labels[0]]
    part = task.objective(0.0)(network, ScoredRows(TEXTS, CONTEXT, packed=False).batch(alone))
    assert part.total.item() == pytest.approx(len(labels) / len(set(labels)) * math.log(4), rel=1e-5)


def test_balanced_weights_and_smoothing_count_each_text_by_its_own_label_and_no_label_without_texts() -> None:
    """Six, two and one texts: the weights are those of scikit-learn's compute_class_weight("balanced"), 0.5, 1.5 and
    3.0. The best prediction for a text is its smoothed target, whatever the weights: its gradient is zero there.
    """
    rare = [0] * 6 + [1] * 2 + [2]
    codes = [CODES_PER_ID * np.array([5, label], np.uint32) + [FIRST, SCORED] for label in rare]
    tokens = np.concatenate(codes).astype(np.uint32)
    task, config = balanced(tokens, label_smoothing=0.3)
    network = randomised(build_model(config), 3).double()
    batch = ScoredRows(LabelTokens(tokens), CONTEXT, packed=False).batch([0, 6, 8])
    logits, _ = label_logits(network, batch, POOLING["encoder"])
    log_p = logits.detach().double().log_softmax(dim=1).numpy()
    targets = np.array([[0.8, 0.1, 0.1, 0], [0.1, 0.8, 0.1, 0], [0.1, 0.1, 0.8, 0]])
    expected = -(np.array([0.5, 1.5, 3.0])[:, None] * targets * log_p).sum()
    assert task.objective(0.0)(network, batch).total.item() == pytest.approx(expected, rel=1e-6)
    assert task.validation_objective(network, batch).total.item() == pytest.approx(
        -sum(log_p[row, row] for row in range(3)), rel=1e-6
    )


def test_all_parameters_of_an_encoder_have_the_gradient_of_the_formula() -> None:
    """By central differences along a random direction, with padding in the batch."""
    config = small(architecture="encoder", context=CONTEXT, tie=False, labels=LABELS)
    network = randomised(build_model(config), 2).double()
    batch = ScoredRows(TEXTS, CONTEXT, packed=False).batch(range(6))
    parameters = list(network.parameters())

    def total() -> torch.Tensor:
        return classification_loss(network, batch, POOLING["encoder"]).total

    gradients = torch.autograd.grad(total(), parameters)
    direction = [torch.randn_like(parameter) for parameter in parameters]
    values = []
    for step in (1e-3, -2e-3):
        with torch.no_grad():
            for parameter, d in zip(parameters, direction, strict=True):
                parameter += step * d
            values.append(total().item())
    slope = sum(float((g * d).sum()) for g, d in zip(gradients, direction, strict=True))
    assert slope == pytest.approx((values[0] - values[1]) / 2e-3, rel=1e-2)
