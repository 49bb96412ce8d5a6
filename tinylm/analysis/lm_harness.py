"""tinylm in lm-eval, the evaluation harness of EleutherAI: its tasks run on a model of tinylm.

    lm_eval run --model tinylm --model_args path=checkpoints/book --tasks TASK

lm-eval finds the model by the entry point of this package from the version on that reads `lm_eval.models`; for earlier
ones, this module is the same command: python -m tinylm.analysis.lm_harness run --model tinylm ...
"""

from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from tinylm.analysis.minimal_pairs import require_scoring, score_ends
from tinylm.config.validation import require
from tinylm.generation.prompts import start_tokens
from tinylm.models.load import load

Encoded = tuple[Any, list[int], list[int]]  # texts, and the ids of a context and of its continuation
MAX_NEW_TOKENS = 256  # of an answer, if the task names no limit


@register_model("tinylm")
class TinyLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no annotations
    """A decoder of tinylm as a model of lm-eval.

    path, device, dtype: as in `load`. adapter: a run or a folder of PEFT on the model. lm-eval passes the batch sizes,
    which have no effect, since batches are as large as in `tinylm eval`.

    Raises the errors of `load`, and UsageError for a model that is not a decoder of text.
    """

    def __init__(
        self,
        path: str,
        device: str | None = None,
        dtype: str = "auto",
        adapter: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        adapters = () if adapter is None else (adapter,)
        self.model = load(path, adapters=adapters, device=device or "auto", dtype=dtype)
        require_scoring(self.model, "lm-eval needs a decoder")
        self._start = start_tokens(self.model.tokenizer, self.model.data, [], self.model.context)

    @property
    def eot_token_id(self) -> int:
        """What stands before a text in training, the end of the one before."""
        return self._start[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text. Raises UsageError for characters that are not in the vocabulary."""
        return self.model.encode(string)

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation in nats, and whether it is the greedy one.

        A BOS token comes first if the texts of the model begin with one. Of a context and continuation that are too
        long together, the first tokens are left out. Raises UsageError for a continuation that is longer than the
        context of the model.
        """
        bos = self.model.tokenizer.bos_id
        return self._score(
            [(context if bos is None or context[:1] == [bos] else [bos, *context], end) for _, context, end in requests]
        )

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        limit = self.model.context
        longest = max((len(end) for _, end in pairs), default=0)
        fits = longest <= limit
        require(fits, f"A continuation of {longest} tokens is longer than the context of the model, {limit}.")
        texts = [([*context, *end][-(limit + 1) :], len(end)) for context, end in pairs]
        found: dict[int, tuple[float, bool]] = {}
        for indices, scores in score_ends(self.model, texts):
            found |= dict(zip(indices, scores, strict=True))
        return [found[index] for index in range(len(texts))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text in nats, in windows of the context that do not overlap."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.eot_token_id, self.model.context, 1)
            totals.append(sum(log_p for log_p, _ in self._score([*map(make_disjoint_window, windows)])))
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each text, or a sampled one if the task sets a temperature, up to a stop text."""
        texts = []
        for prompt, settings in (request.args for request in requests):
            text = self.model.generate(
                prompt,
                max_tokens=settings.get("max_gen_toks", MAX_NEW_TOKENS),
                temperature=settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0,
                stop=settings.get("until"),
                seed=0,
            )
            texts.append(str(text))
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
