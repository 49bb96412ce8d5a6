"""What tinylm eval does with an encoder-decoder: how likely the targets are, and how near to them what it writes."""

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tinylm.commands.model import OpenModel
from tinylm.commands.options import one_of, option
from tinylm.commands.reading import TextToScore, tokens_to_score
from tinylm.commands.sampling import TARGETS, SearchOptions
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.model.encoder_decoder import EncoderDecoder

NEEDED = "BLEU and chrF need sacrebleu: pip install sacrebleu"
BLEU_TOKENIZERS = ("13a", "none", "intl", "char", "zh")


@dataclass(frozen=True)
class BleuOptions:
    bleu_tokenize: Annotated[
        str | None,
        option("Tokenizer of sacrebleu (default: 13a); none for tokenised text.", TARGETS, one_of(BLEU_TOKENIZERS)),
    ] = None


def evaluate_pairs(
    console: Console,
    opened: OpenModel,
    network: "EncoderDecoder",
    pairs: TextToScore,
    dtype: str,
    batch_size: int | None,
    searching: SearchOptions,
    bleu: BleuOptions,
) -> dict[str, Any]:
    """Loss and perplexity of the targets, exact matches of those found, and BLEU and chrF where sacrebleu is there."""
    from tinylm.device import DTYPES
    from tinylm.evaluation import evaluate, rows_at_once
    from tinylm.inference.translate import find_targets
    from tinylm.objective import sequence_to_sequence
    from tinylm.text.pairs import PairTokens, evaluation_pairs

    if bleu.bleu_tokenize is not None and bleu.bleu_tokenize not in BLEU_TOKENIZERS:
        raise UsageError(f"--bleu-tokenize is {bleu.bleu_tokenize!r}; it must be one of: {', '.join(BLEU_TOKENIZERS)}.")
    if bleu.bleu_tokenize is not None and importlib.util.find_spec("sacrebleu") is None:
        raise UsageError(f"{NEEDED}; leave out --bleu-tokenize, or install it.")
    search = searching.search()
    tokens = tokens_to_score(console, opened, pairs, "pairs")
    found = PairTokens(tokens, opened.tokenizer.end_of_text)
    fitting = found.fitting(network.context)
    if len(fitting) < len(found):
        console.warn(
            f"{len(found) - len(fitting)} of {len(found)} pairs do not fit the model's context of {network.context}: "
            "they have no part in the loss, and their sources are cut."
        )
    if not len(fitting):
        raise UsageError(f"No pair fits the model's context of {network.context} tokens; give shorter ones.")
    batches = evaluation_pairs(found, network.context, batch_size or rows_at_once(network.context))
    total = int((found.lengths[fitting, 1] + 1).sum())
    with console.counting("scoring", total, "tokens") as advance:
        score = evaluate(network, sequence_to_sequence, batches, dtype, advance)

    decode = opened.tokenizer.decode
    references = [decode(found.target(index)) for index in range(len(found))]
    sources = [found.source(index)[: network.context - 1].tolist() for index in range(len(found))]
    written: list[str] = []
    network.to(DTYPES[dtype])
    with console.counting("writing", len(found), "targets") as advance:
        for target in find_targets(network, sources, opened.tokenizer.end_of_text, search, network.context):
            written.append(decode(target.tokens))
            advance(1)
    result: dict[str, Any] = {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "exact_match": sum(a == b for a, b in zip(written, references, strict=True)) / len(found),
    }
    if importlib.util.find_spec("sacrebleu") is None:
        console.note(f"{NEEDED}.")
    else:
        import sacrebleu

        tokenize = bleu.bleu_tokenize or "13a"
        result["bleu"] = sacrebleu.corpus_bleu(written, [references], tokenize=tokenize, force=True).score
        result["chrf"] = sacrebleu.corpus_chrf(written, [references]).score
    return {**result, "tokens": score.tokens, "pairs": len(found)}
