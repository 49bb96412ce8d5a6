"""What tinylm sample does with an encoder: guesses for the masks in a prompt."""

from typing import TYPE_CHECKING

from tinylm.commands.model import OpenModel
from tinylm.commands.sampling import ChoiceOptions, LengthOptions, PromptOptions, known_part
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.model.encoder import Encoder

CANDIDATES = 5


def fill_masks(
    console: Console,
    network: "Encoder",
    opened: OpenModel,
    text: str,
    prompt: PromptOptions,
    choice: ChoiceOptions,
    length: LengthOptions,
) -> int:
    """Print the prompt with each mask filled by the likeliest token; with --json, the candidates too.

    Returns how many masks there were.
    """
    from tinylm.inference.fill import guess
    from tinylm.text.tokenizer import MASK

    if length.stream:
        raise UsageError("--stream is for models that write from left to right; an encoder fills all masks at once.")
    if choice.beams is not None or length.num_samples > 1 or length.stop or (choice.temperature or 0) > 0:
        raise UsageError(
            "An encoder gives its likeliest guesses; leave out --beams, --num-samples, --stop and --temperature."
        )
    tokenizer = opened.tokenizer
    if MASK not in text:
        raise UsageError(f"The prompt has no {MASK} to fill; put one where a token is to be guessed.")
    parts = [known_part(console, part, tokenizer, prompt.unknown) for part in text.split(MASK)]
    if tokenizer.kind != "char":  # a word's token begins with the blank before it
        parts = [part.removesuffix(" ") for part in parts[:-1]] + parts[-1:]
    ids = [int(i) for i in tokenizer.encode(parts[0])]
    for part in parts[1:]:
        ids += [tokenizer.mask, *(int(i) for i in tokenizer.encode(part))]
    if len(ids) > network.context:
        raise UsageError(f"The prompt has {len(ids)} tokens, and the model sees {network.context}; shorten it.")
    guesses = guess(network, ids, tokenizer.mask, choice.top_k or CANDIDATES)
    fillings = iter(guesses)
    filled = tokenizer.decode([next(fillings).tokens[0] if token == tokenizer.mask else token for token in ids])
    if not console.as_json:
        console.result(filled)
        return len(guesses)
    masks = [
        [
            {"text": tokenizer.decode([token]), "probability": probability}
            for token, probability in zip(*one, strict=True)
        ]
        for one in guesses
    ]
    console.record({"prompt": text, "text": filled, "masks": masks})
    return len(guesses)
