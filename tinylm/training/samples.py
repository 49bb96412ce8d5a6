"""The texts that are sampled during training, after evaluations."""

import functools
import math
import time
from collections.abc import Callable

from tinylm.config.run import RunConfig
from tinylm.errors import TinyLMError, memory_errors
from tinylm.generation.generation_config import SamplingConfig
from tinylm.generation.prompts import start_tokens
from tinylm.generation.torch_engine import Sampler, generate
from tinylm.kernels.graphs import force_eager
from tinylm.machine.device import autocast
from tinylm.text.decoding import decode_after
from tinylm.text.tokenizer import Tokenizer
from tinylm.training.events import Evaluated
from tinylm.training.parallel import is_sharded
from tinylm.transformer.architectures import Decoder, Transformer
from tinylm.transformer.build import count_parameters

TOKENS = 120  # per sample
MIN_SECONDS = 5.0  # of training before the first sample
SECONDS_PER_PARAMETER = 1e-9  # and per token: expected time of the first sample, an overestimate on most machines
MAX_SHARE = 0.01  # of the training time that samples may take
MAX_BUDGET_SHARE = 0.02  # of a time budget that one sample may take: the last one is sampled after the last evaluation
MIN_GROWTH = 0.02  # interval between samples as a fraction of the training time: at most about 500 samples in a day


class RunSampler:
    """Samples after evaluations, at intervals that bound the number of samples and the time they take.

    generate: as `generate_sample`. now: the clock
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        config: RunConfig,
        generate: Callable[..., str | None] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model, self._tokenizer, self._config = model, tokenizer, config
        self._generate, self._now = generate or functools.partial(generate_sample, now=now), now
        expected = TOKENS * SECONDS_PER_PARAMETER * count_parameters(model)["total"]
        self._next = now() + max(MIN_SECONDS, expected / MAX_SHARE)  # time of the next sample
        budget = None if config.training is None else config.training.budget.time
        self._max_seconds = math.inf if budget is None else MAX_BUDGET_SHARE * budget

    def sample_if_due(self, evaluated: Evaluated) -> str | None:
        """A sample; `None` before the first step, after a stop, before the time of the next sample, and as
        `generate_sample`.
        """
        start = self._now()
        if evaluated.tokens is not None or start < self._next:
            return None
        text = self._generate(self._model, self._tokenizer, self._config, TOKENS, self._max_seconds)
        cost = self._now() - start
        self._next = start + max(cost / MAX_SHARE, MIN_GROWTH * evaluated.seconds)
        return text


def generate_sample(
    model: Transformer,
    tokenizer: Tokenizer,
    config: RunConfig,
    tokens: int = TOKENS,
    seconds: float = math.inf,
    now: Callable[[], float] = time.monotonic,
) -> str | None:
    """A sample of at most `tokens` tokens without a prompt; the random number generators of training do not advance.

    It ends after `seconds`, with the token that is then being generated.

    `None` for models other than decoders of plain text, and for sharded models; also if memory runs
    out and for logits that are not finite, since a sample must not end the training run.
    """
    is_other = config.data is not None and not config.data.is_plain_text
    if not isinstance(model, Decoder) or is_sharded(model) or is_other:
        return None
    dtype = "fp32" if config.runtime is None else config.runtime.dtype  # a frozen base has 16-bit weights
    was_training = model.training
    model.eval()
    sampler = Sampler(SamplingConfig(), 1, tokenizer.vocab_size)
    sampler.start(seed=0)
    start = start_tokens(tokenizer, config.data, [], model.context)
    end, ids = now() + seconds, []
    try:
        with memory_errors(), force_eager(), autocast(model.device.type, dtype):
            for (token,), _ in generate(model, [start], sampler, tokens, kept_id=tokenizer.start_id):
                ids.append(token)
                if now() >= end:
                    break
    except (MemoryError, TinyLMError):  # the latter for logits that are not finite: the next evaluation diverges
        return None
    finally:
        model.train(was_training)
    return decode_after(tokenizer, start, ids)
