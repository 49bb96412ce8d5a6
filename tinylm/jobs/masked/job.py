"""The job of plain text with masked tokens, which an encoder predicts (Devlin et al. 2019)."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tinylm.config.model import ModelConfig
from tinylm.config.training import TrainingConfig
from tinylm.errors import UsageError
from tinylm.evaluation.loop import TextLosses
from tinylm.evaluation.result import Evaluation
from tinylm.jobs.job import Scoring, Task
from tinylm.jobs.text.job import TextJob
from tinylm.objectives.loss import LanguageModel, Loss, Objective, scored_loss
from tinylm.text.batches import Batch, Windows, evaluation_batches
from tinylm.text.token_files import TokenFolder, Tokens
from tinylm.text.tokenizer import MASK, Tokenizer
from tinylm.transformer.architectures import Encoder

TARGET_SHARE = 0.15  # share of the tokens that are targets
MASK_SHARE = 0.8  # share of the targets that are replaced by the mask token
RANDOM_SHARE = 0.1  # share of the targets that are replaced by a random token; the other targets are unchanged


def mask_tokens(
    ids: np.ndarray, rng: np.random.Generator, mask_id: int, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Select at least one target among `ids`, (...), and replace most targets by the mask token or random tokens.

    Returns the model's input, (...) of int64, and a boolean array, (...), that is True for targets. `ids` must not be
    empty.
    """
    selected = rng.random(ids.shape) < TARGET_SHARE
    if not selected.any():
        selected.flat[rng.integers(ids.size)] = True
    draw = rng.random(ids.shape)
    inputs = np.where(selected & (draw < MASK_SHARE), mask_id, ids)
    randomised = selected & (draw >= MASK_SHARE) & (draw < MASK_SHARE + RANDOM_SHARE)
    return np.where(randomised, rng.integers(0, vocab_size, ids.shape), inputs), selected


def masked_evaluation_batches(
    tokens: Tokens, context: int, rows: int, mask_id: int, vocab_size: int, max_tokens: int | None = None
) -> Iterator[Batch]:
    """Yield batches of at most `rows` masked windows that do not overlap. The masks do not depend on `rows`.

    With `max_tokens`, yields a fixed selection of evenly spaced windows with about that many tokens in total. The last
    token is in no window, as in `evaluation_batches`, where it is only a target.
    """
    number = 0
    for batch in evaluation_batches(tokens, context, rows, max_tokens=max_tokens):
        masked = []
        for row in batch.ids.numpy():
            masked.append(mask_tokens(row, np.random.Generator(np.random.PCG64([number])), mask_id, vocab_size))
            number += 1
        inputs, selected = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*masked, strict=True))
        yield Batch(inputs, batch.ids, selected)


def masked_token(model: LanguageModel, batch: Batch, smoothing: float = 0.0) -> Loss:
    """-sum over the masked positions of log p(token | corrupted window) (Devlin et al. 2019)."""
    return scored_loss(model, model(batch.ids), batch, smoothing)


class MaskedToken(Task):
    """Predict the tokens at masked positions from the corrupted window of `model.context` tokens."""

    validation_objective: Objective = staticmethod(masked_token)

    def __init__(self, tokens: TokenFolder, tokenizer: Tokenizer, model: ModelConfig, training: TrainingConfig) -> None:
        self._smoothing, self._seed = training.label_smoothing, training.seed
        self._val, self._context = tokens.val, model.context
        self._masking = {"mask_id": tokenizer.mask_id, "vocab_size": tokenizer.vocab_size}
        end = tokenizer.end_of_text_id
        self._windows = Windows(tokens.train, model.context, training.batch_size, training.seed, end)
        self.steps_per_epoch = len(tokens.train) / (training.batch_size * model.context)

    def objective(self, progress: float) -> Objective:
        return functools.partial(masked_token, smoothing=self._smoothing)

    def batch(self, number: int) -> Batch:
        ids = self._windows.batch(number).ids
        rng = np.random.Generator(np.random.PCG64([self._seed, number, self._masking["mask_id"]]))
        inputs, selected = mask_tokens(ids.numpy(), rng, **self._masking)
        return Batch(torch.from_numpy(inputs), ids, torch.from_numpy(selected))

    def validation_batches(self, rows: int, max_tokens: int) -> Iterator[Batch]:
        return masked_evaluation_batches(self._val, self._context, rows, **self._masking, max_tokens=max_tokens)


DEFAULT_CANDIDATES = 5


class MaskCandidate(NamedTuple):
    """The text of a token predicted for a mask, with the token's probability."""

    text: str
    probability: float


@dataclass(frozen=True)
class FilledPrompt:
    """A filled prompt.

    text: the prompt with each mask replaced by its most likely token. masks: the candidates for each mask, in the order
    of the masks, most likely first.
    """

    prompt: str
    text: str
    masks: list[list[MaskCandidate]]


def fill_mask(model: Encoder, tokenizer: Tokenizer, prompt: str, candidates: int, name: str) -> FilledPrompt:
    """Fill each `<mask>` of a prompt, independently of the other masks.

    candidates: number of candidates per mask; 0 for DEFAULT_CANDIDATES. name: name of the prompt in error messages.

    Raises UsageError for a prompt without a mask, longer than the context, or with unknown characters.
    """
    if MASK not in prompt:
        raise UsageError(f"{name} has no {MASK} to fill; put one where a token is to be predicted.")
    parts = prompt.split(MASK)
    if tokenizer.kind != "char":  # a word's token includes the space before the word and replaces that space
        parts = [part.removesuffix(" ") for part in parts[:-1]] + parts[-1:]
    ids = [int(i) for i in tokenizer.encode(parts[0])]
    for part in parts[1:]:
        ids += [tokenizer.mask_id, *(int(i) for i in tokenizer.encode(part))]
    if len(ids) > model.context:
        raise UsageError(f"{name} has {len(ids)} tokens, and the model's context is {model.context}; shorten it.")
    predictions = predict_masks(
        model, ids, tokenizer.mask_id, candidates or DEFAULT_CANDIDATES, exclude=[tokenizer.end_of_text_id]
    )
    most_likely = (candidates_of_mask[0][0] for candidates_of_mask in predictions)
    text = tokenizer.decode([next(most_likely) if token == tokenizer.mask_id else token for token in ids])
    masks = [
        [MaskCandidate(tokenizer.decode([token]), probability) for token, probability in candidates_of_mask]
        for candidates_of_mask in predictions
    ]
    return FilledPrompt(prompt, text, masks)


@torch.inference_mode()
def predict_masks(
    model: Encoder, ids: Sequence[int], mask_id: int, candidates: int, exclude: Sequence[int] = ()
) -> list[list[tuple[int, float]]]:
    """The `candidates` most likely tokens for each `mask_id` in `ids` (at most the context), in order, with their
    probabilities, the most likely first.

    The mask token and the ids in `exclude` are not predicted; the probabilities of all other tokens add up to 1.
    """
    positions = [position for position, token in enumerate(ids) if token == mask_id]
    inputs = torch.tensor([list(ids)], device=model.device)  # (1, T)
    logits = model.logits(model(inputs).hidden[0, positions]).float()  # (N, V) for N masks
    excluded = list({mask_id, *exclude})
    logits[:, excluded] = -torch.inf
    best = logits.softmax(dim=-1).topk(min(candidates, logits.shape[-1] - len(excluded)))  # (N, K)
    return [[*zip(*row, strict=True)] for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def evaluate_masked(scoring: Scoring) -> Evaluation:
    """Loss, perplexity and accuracy of the model on masked tokens of a text, with a confidence interval of the loss.

    Raises UsageError for fewer than 2 tokens.
    """
    tokens, tokenizer, context = scoring.text.codes, scoring.tokenizer, scoring.model.context
    if len(tokens) < 2:
        raise UsageError(
            f"The text has fewer than 2 tokens ({len(tokens)}), and a masked token needs another one; give more text."
        )
    rows = scoring.rows(context)
    batches = masked_evaluation_batches(tokens, context, rows, tokenizer.mask_id, tokenizer.vocab_size)
    losses, accuracy = masked_losses_and_accuracy(scoring, batches)
    result, blocks = losses.total, losses.blocks()
    of = "windows" if len(blocks.nats) == len(losses.nats) else "blocks of consecutive windows"
    return Evaluation(
        loss=result.loss,
        perplexity=result.perplexity,
        accuracy=accuracy,
        tokens=result.tokens,
        **blocks.interval(of, scoring.reporter),
    )


def masked_losses_and_accuracy(scoring: Scoring, batches: Iterable[Batch]) -> tuple[TextLosses, float]:
    """The losses of the masked tokens of each window, and the fraction of masked tokens whose logit is the largest."""
    correct = 0

    def losses_of(model: LanguageModel, batch: Batch) -> Tensor:
        nonlocal correct
        assert batch.mask is not None
        output, targets = model(batch.ids), batch.targets[batch.mask]  # (N,)
        logits = model.logits(output.hidden[batch.mask])  # (N, V)
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(precise, targets, reduction="none")
        # Counted last: a batch that runs out of memory above is repeated in parts, and must not be counted twice.
        correct += int((logits.argmax(dim=-1) == targets).sum())
        return losses

    losses = scoring.losses(batches, losses_of, None, "masked tokens")
    return losses, sum(scoring.ranks.gather(correct)) / losses.total.tokens


class MaskedJob(TextJob):
    """An encoder predicts masked tokens of a text."""

    task = MaskedToken
    evaluate = staticmethod(evaluate_masked)
    baselines = None
    fill_mask = staticmethod(fill_mask)


JOB = MaskedJob()
