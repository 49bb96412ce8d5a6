"""JSON that a schema admits, whatever the model's logits are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tinylm
from tests.published import published
from tests.shell import assert_error, records, run_ok, story
from tests.shell import tinylm as shell
from tinylm.config.run import SpecialTokens
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.prompts import EncodedPrompt
from tinylm.generation.text_generator import Continuation, Sample
from tinylm.generation.torch_engine import TorchEngine
from tinylm.text.tokenizer import Tokenizer, train_bpe, train_char

ASCII = "\n" + "".join(map(chr, range(32, 127)))
TOKENIZERS = {
    "characters": lambda: train_char(ASCII),
    "byte pairs": lambda: train_bpe(['{"name": "Ann", "items": [1, 22, 333]}, "é"'] * 9, 300),
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REFUSED: list[tuple[Any, str]] = [
    ({"type": "integr"}, "Invalid type"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"not": {}}, "not"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ({"$ref": "http://example.org/schema"}, "example.org"),
    ({"$ref": "file:///etc/passwd"}, "passwd"),
    ({"$ref": "#/nowhere"}, "nowhere"),
    ({"type": "string", "pattern": "(?=a)"}, "regex"),
    ({"type": "string", "format": "nonsense"}, "nonsense"),
    ({"type": "integer", "minimum": 7, "maximum": 5}, "greater than"),
    ({"enum": []}, "Unsatisfiable"),
    ({"type": "array", "contains": {}, "x-guidance": {"lenient": True}}, "contains"),
    ({"type": "string", "minLength": 10**12}, "regex"),
    (json.loads('{"items": ' * 500 + "{}" + "}" * 500), "recursion"),
    ({"enum": [f"{number:050}" for number in range(100_000)]}, "too big"),
]


class Noise:
    """A model whose logits are random numbers. Implements `NextTokenModel`."""

    context = 16

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._size, self._random = vocab_size + 3, np.random.default_rng(seed)

    def make_cache(self, batch: int, length: int, starts: Any = None) -> Any:
        return [batch]

    def last_logits(self, ids: Any, cache: Any) -> Any:
        return self._random.normal(scale=3, size=(cache[0], self._size)).astype(np.float32)


def samples(tokenizer: Tokenizer, schema: Any, seed: int = 0, **settings: Any) -> list[Sample]:
    """Three samples with random logits."""
    config = GenerationConfig(json_schema=schema, num_samples=3, **{"max_tokens": 3000, **settings})
    engine = TorchEngine(Noise(tokenizer.vocab_size, seed), tokenizer)
    return Continuation(engine, tokenizer, [EncodedPrompt("", [1], [1])], config, 0).run()


def values() -> st.SearchStrategy[tuple[dict[str, Any], Callable[[Any], bool]]]:
    """Schemas, each with the function that says whether a value is admitted."""
    leaves = st.one_of(
        st.tuples(st.integers(-300, 300), st.integers(0, 50)).map(
            lambda ends: (
                {"type": "integer", "minimum": ends[0], "maximum": ends[0] + ends[1]},
                lambda value: type(value) is int and ends[0] <= value <= ends[0] + ends[1],
            )
        ),
        st.integers(0, 4).map(
            lambda size: (
                {"type": "string", "maxLength": size},
                lambda value: isinstance(value, str) and len(value) <= size,
            )
        ),
        st.lists(st.sampled_from(["a", "b c", 7, None, True, 'quote"', "\n"]), min_size=1).map(
            lambda values: ({"enum": values}, lambda value: any(value is one or value == one for one in values))
        ),
    )

    def extended(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        lists = st.tuples(inner, st.integers(0, 3)).map(
            lambda item: (
                {"type": "array", "items": item[0][0], "minItems": item[1], "maxItems": item[1] + 1},
                lambda value: (
                    isinstance(value, list) and len(value) - item[1] in (0, 1) and all(map(item[0][1], value))
                ),
            )
        )
        objects = st.dictionaries(st.sampled_from(["a", "b", "long name"]), inner, min_size=1).map(
            lambda items: (
                {
                    "type": "object",
                    "properties": {name: schema for name, (schema, _) in items.items()},
                    "required": list(items),
                    "additionalProperties": False,
                },
                lambda value: (
                    set(value) == set(items) and all(admits(value[name]) for name, (_, admits) in items.items())
                ),
            )
        )
        return st.one_of(lists, objects)

    return st.recursive(leaves, extended, max_leaves=4)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(case=values(), seed=st.integers(0, 1000))
def test_every_sample_is_json_that_the_schema_admits(
    name: str, case: tuple[dict[str, Any], Callable[[Any], bool]], seed: int
) -> None:
    schema, admits = case
    for sample in samples(TOKENIZERS[name](), schema, seed):
        assert admits(json.loads(sample.text)), sample.text
        assert sample.finish_reason == "end"


@pytest.mark.parametrize("name", ["llama2", "qwen2"])
def test_published_tokenizers_write_json(name: str) -> None:
    tokenizer = Tokenizer.parse(json.dumps(published()[name]), SpecialTokens(), Path(name))
    for sample in samples(tokenizer, PERSON):
        person = json.loads(sample.text)
        assert list(person) == ["name", "age"] and len(person["name"]) <= 5 and 0 <= person["age"] <= 99


def test_log_probabilities_are_those_of_the_model_and_seeds_repeat_a_sample() -> None:
    tokenizer = TOKENIZERS["characters"]()
    first, second = (samples(tokenizer, PERSON, seed=2, logprobs=1, temperature=0.5) for _ in range(2))
    assert [sample.text for sample in first] == [sample.text for sample in second]
    best = first[0].logprobs[0]["top"][0]  # of all tokens: JSON begins with {
    assert first[0].text[0] == "{" and best["token"] != "{" and best["logprob"] > first[0].logprobs[0]["logprob"]


def test_a_schema_that_is_not_supported_is_an_error_that_says_why() -> None:
    wrong = []
    for schema, reason in REFUSED:
        try:
            GenerationConfig(json_schema=schema)
            wrong.append(f"{str(schema)[:80]} is accepted")
        except UsageError as error:
            if not str(error).startswith("`json_schema` cannot be used: ") or reason not in str(error):
                wrong.append(f"{str(schema)[:80]}: {error}")
    assert not wrong, "\n".join(wrong)
    with pytest.raises(UsageError, match="`stop` would cut"):
        GenerationConfig(stop=("a",), json_schema=PERSON)


def test_json_that_cannot_be_completed_is_an_error() -> None:
    with pytest.raises(TinyLMError, match="not complete after 9 tokens: raise `max_tokens`"):
        samples(TOKENIZERS["characters"](), PERSON, max_tokens=9)
    for schema in (PERSON, {"enum": ["é"]}):
        with pytest.raises(UsageError, match="has no token with which the JSON"):
            samples(train_char('abc"'), schema)
    endless = {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}, "$ref": "#/$defs/a"}
    with pytest.raises(TinyLMError, match="not complete after 500 tokens"):
        samples(TOKENIZERS["characters"](), endless, max_tokens=500)
    for name in ("bert", "words"):
        tokenizer = Tokenizer.parse(json.dumps(published()[name]), SpecialTokens(), Path(name))
        with pytest.raises(UsageError, match="not possible with this model's tokenizer: can't determine decoder"):
            samples(tokenizer, PERSON)


def test_the_command_prints_json_alone(tmp_path: Path) -> None:
    (tmp_path / "text").write_text(ASCII * 9 + story(1000))
    run = tinylm.train(tmp_path / "text", tmp_path / "run", layers=1, heads=2, width=8, context=16, steps=1).run
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(PERSON))
    arguments = ["sample", "-m", run, "--json-schema", schema, "-n", 3000]
    for _ in range(2):  # of which the first may convert the model
        lines = run_ok(*arguments, "-N", 2, "A person:").stdout
        decoder, first = json.JSONDecoder(), lines.lstrip()
        value, end = decoder.raw_decode(first)
        assert set(value) == set(json.loads(first[end:])) == {"name", "age"}
    prompts = "\n".join(json.dumps({"prompt": "a", "json_schema": {"enum": [i]}}) for i in (1, 22))
    found = records(run_ok("sample", "-m", run, "-f", "-", "--format", "jsonl", "--json", stdin=prompts))
    assert [one["text"] for one in found] == ["1", "22"]
    assert json.loads(tinylm.load(run).generate("a", json_schema={"const": [True]})) == [True]
    result = shell(*arguments, "--engine", "llama.cpp", "a")
    assert_error(result, 2, "--json-schema needs --engine torch")
    assert "Converting" not in result.stderr
    assert_error(shell(*arguments, "--stop", "a", "a"), 2, "--stop would cut the JSON")
    assert_error(shell(*arguments, "-n", 3, "a"), 1, "raise --max-tokens")
    prompts = '{"prompt": "a"}\n{"prompt": "a", "json_schema": {"type": "text"}}'
    result = shell("sample", "-m", run, "-f", "-", "--format", "jsonl", stdin=prompts)
    assert_error(result, 2, "line 2", "Invalid type: text")  # and no text of line 1
    for content, reason in (("[1]", "is not a JSON object"), ("{", "is not JSON"), ("[" * 10**5, "is not JSON")):
        schema.write_text(content)
        assert_error(shell(*arguments, "a"), 2, str(schema), reason)
    schema.unlink()
    assert_error(shell(*arguments, "a"), 2, f"Cannot read --json-schema {schema}: No such file")
