"""What tinylm sample does with an encoder: guesses for the masks in a prompt."""

from typing import TYPE_CHECKING

from tinylm.commands.model import OpenModel
from tinylm.commands.sampling import Request, known_part
from tinylm.console import Console
from tinylm.errors import UsageError

if TYPE_CHECKING:
    from tinylm.model.encoder import Encoder

CANDIDATES = 5
IDLE = (
    *("temperature", "top_p", "min_p", "repeat_penalty", "beams", "length_penalty"),
    *("max_tokens", "num_samples", "stop", "separator", "stream", "echo", "cache", "draft", "compile"),
)


def fill_masks(console: Console, network: "Encoder", opened: OpenModel, request: Request) -> int:
    """Print the prompt with each mask filled by the likeliest token; with --json, the candidates too.

    Returns how many masks there were.
    """
    from tinylm.inference.fill import guess
    from tinylm.text.tokenizer import MASK

    request.refuse(*IDLE, because="An encoder fills all masks at once, each with its likeliest guess")
    name, unknown = request.prompt.name, request.options.prompt.unknown
    text, tokenizer = request.prompt.text, opened.tokenizer
    if MASK not in text:
        raise UsageError(f"{name} has no {MASK} to fill; put one where a token is to be guessed.")
    parts = [known_part(console, part, tokenizer, unknown, name) for part in text.split(MASK)]
    if tokenizer.kind != "char":  # a word's token begins with the blank before it
        parts = [part.removesuffix(" ") for part in parts[:-1]] + parts[-1:]
    ids = [int(i) for i in tokenizer.encode(parts[0])]
    for part in parts[1:]:
        ids += [tokenizer.mask, *(int(i) for i in tokenizer.encode(part))]
    if len(ids) > network.context:
        raise UsageError(f"{name} has {len(ids)} tokens, and the model sees {network.context}; shorten it.")
    candidates = request.settings.top_k or CANDIDATES
    guesses = guess(network, ids, tokenizer.mask, candidates, never=[tokenizer.end_of_text])
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
    console.record(request.record(prompt=text, text=filled, masks=masks))
    return len(guesses)
