"""Special tokens and chat template of a Hugging Face folder, in both directions.

Functions that read raise OSError, and ValueError with a reason that completes the sentence "Cannot import FOLDER: ".
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tinylm.config.run import SpecialTokens
from tinylm.errors import UsageError
from tinylm.formats.safetensors_files import inside
from tinylm.system.files import parse_unicode_json, read_text
from tinylm.text.tokenizer_errors import short_repr
from tinylm.text.tokenizer_file import TokenizerSpec, token_ids

TOKENIZER_CONFIG, TOKEN_MAP, GENERATION_CONFIG = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
)
CHAT_TEMPLATE = "chat_template.jinja"
MAX_CONFIG_BYTES = 1 << 24  # tokenizer_config.json of Gemma repeats its 6,000 added tokens
MAX_TEMPLATE_BYTES = 1 << 20  # of a file; characters of a template within tokenizer_config.json
MAX_END_TOKENS = 64


def read_object(folder: Path, name: str) -> dict[str, Any]:
    """The JSON object in a file of the folder; an empty one if there is no such file."""
    if not os.path.lexists(folder / name):
        return {}
    try:
        value = parse_unicode_json(read_text(inside(folder, name), MAX_CONFIG_BYTES))
    except ValueError as error:
        raise ValueError(f"{name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object")
    return value


def read_special_tokens(folder: Path, config: Mapping[str, Any], tokenizer: TokenizerSpec) -> SpecialTokens:
    """The special tokens that tokenizer_config.json and special_tokens_map.json name. config: content of config.json.

    If the two files name no EOS token, its id is read from generation_config.json or `config`. If they name no BOS and
    no padding token either, the ids of those are also read there. The EOS tokens of generation_config.json or, if it
    has none, of `config` end generation as well. Raises ValueError if no file has an EOS token.
    """
    settings, names = read_object(folder, TOKENIZER_CONFIG), read_object(folder, TOKEN_MAP)
    generation = read_object(folder, GENERATION_CONFIG)
    ids = token_ids(tokenizer)
    tokens = {i: token for token, i in ids.items()}
    named = {kind: _named(kind, (settings, names), ids) for kind in ("bos", "eos", "pad")}
    if named["eos"] is None:
        for kind in ("eos",) if any(named.values()) else tuple(named):
            found = _tokens(generation, config, f"{kind}_token_id", tokens)
            named[kind] = found[0] if found else None
    end_of_text, bos = named["eos"], named["bos"]
    if end_of_text is None:
        raise ValueError("it names no end-of-text token (eos_token in tokenizer_config.json)")
    ends = [end_of_text, *_tokens(generation, config, "eos_token_id", tokens)]
    add_bos = bos is not None and _adds_bos(settings, tokenizer, bos)
    try:
        return SpecialTokens(
            end_of_text=end_of_text, bos=bos, eos=tuple(dict.fromkeys(ends)), pad=named["pad"], add_bos=add_bos
        )
    except UsageError as error:
        raise ValueError(f"its special tokens cannot be used: {error}".replace("`", "").rstrip(".")) from error


def _named(kind: str, sources: Iterable[Mapping[str, Any]], ids: Mapping[str, int]) -> str | None:
    """The token from the field `{kind}_token` of the first source that has one; `None` if there is none."""
    for source in sources:
        if token := _content(source.get(f"{kind}_token"), f"{kind}_token"):
            if token not in ids:
                raise ValueError(f"its {kind}_token {short_repr(token)} is not in its tokenizer.json")
            return token
    return None


def _content(value: Any, name: str) -> str | None:
    """The text of a token that is stored as a string or as an object with `content`; `None` for null."""
    content = value.get("content") if isinstance(value, dict) else value
    if content is not None and not isinstance(content, str):
        raise ValueError(f"its {name} is {short_repr(value)}, which is not a token")
    return content


def _tokens(
    generation: Mapping[str, Any], config: Mapping[str, Any], name: str, tokens: Mapping[int, str]
) -> list[str]:
    """The tokens for the ids in the field `name` of generation_config.json or, if it is absent there, of config.json.

    Ids without a token are left out: transformers' default ids may exceed a small vocabulary.
    """
    value = config.get(name) if generation.get(name) is None else generation[name]
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > MAX_END_TOKENS or not all(type(i) is int for i in ids):
        raise ValueError(
            f"its {name} is {short_repr(value)}; it must be a token id or a list of up to {MAX_END_TOKENS}"
        )
    return [tokens[i] for i in ids if i in tokens]


def _adds_bos(settings: Mapping[str, Any], tokenizer: TokenizerSpec, bos: str) -> bool:
    value = settings.get("add_bos_token")
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"add_bos_token of {TOKENIZER_CONFIG} is {short_repr(value)}; it must be true or false")
    return begins_with(tokenizer, bos) if value is None else value


def begins_with(tokenizer: TokenizerSpec, token: str) -> bool:
    """Whether the post-processor of a tokenizer.json has a template that adds the token before each text."""
    return any(
        step["type"] == "TemplateProcessing" and list(map(_token_of, step.get("single", [])))[:1] == [token]
        for step in _post_processors(tokenizer)
    )


def _token_of(item: dict[str, Any]) -> Any:
    return item.get("SpecialToken", {}).get("id")


def _post_processors(tokenizer: TokenizerSpec) -> list[dict[str, Any]]:
    step = tokenizer["post_processor"]
    if step is None:
        return []
    return step["processors"] if step["type"] == "Sequence" else [step]


def read_chat_template(folder: Path) -> str | None:
    """The chat template: chat_template.jinja, else `chat_template` of tokenizer_config.json, else `None`.

    Of a list of templates in tokenizer_config.json, the one named default.
    """
    if os.path.lexists(folder / CHAT_TEMPLATE):
        return read_text(inside(folder, CHAT_TEMPLATE), MAX_TEMPLATE_BYTES)
    value = read_object(folder, TOKENIZER_CONFIG).get("chat_template")
    if isinstance(value, list):
        named = (item for item in value if isinstance(item, dict) and item.get("name") == "default")
        value = next(named, {}).get("template")
    if value is not None and not isinstance(value, str):
        raise ValueError(f"chat_template of {TOKENIZER_CONFIG} is {short_repr(value)}; it must be a string")
    if value is not None and len(value) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"its chat template has more than {MAX_TEMPLATE_BYTES} characters")
    return value


def tokenizer_for_export(tokenizer: TokenizerSpec, special: SpecialTokens) -> str:
    """The text of a tokenizer.json whose post-processor adds the BOS token if and only if `special.add_bos` is set."""
    if special.bos is None or begins_with(tokenizer, special.bos) == special.add_bos:
        return json.dumps(tokenizer, ensure_ascii=False)
    steps = [step for step in _post_processors(tokenizer) if step["type"] != "TemplateProcessing"]
    if special.add_bos:
        steps.append(_bos_template(special.bos, token_ids(tokenizer)[special.bos]))
    processor = {"type": "Sequence", "processors": steps} if steps else None
    return json.dumps({**tokenizer, "post_processor": processor}, ensure_ascii=False)


def _bos_template(bos: str, bos_id: int) -> dict[str, Any]:
    first, second = ({"SpecialToken": {"id": bos, "type_id": i}} for i in (0, 1))
    text, other = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, second, other],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def tokenizer_config(special: SpecialTokens, context: int) -> dict[str, Any]:
    """The content of tokenizer_config.json. context: context length in tokens."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special.bos,
        "eos_token": special.end_of_text,
        "pad_token": special.pad,
        "add_bos_token": special.add_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }


def token_id_fields(special: SpecialTokens, ids: Mapping[str, int]) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` (a list for several) and `pad_token_id` of config.json; `None` for no token."""
    ends = [ids[token] for token in special.eos or (special.end_of_text,)]
    return {
        "bos_token_id": None if special.bos is None else ids[special.bos],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": None if special.pad is None else ids[special.pad],
    }
