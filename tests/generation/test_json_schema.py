"""JSON that a schema admits, whatever the model's logits are."""

import json
import math
import re
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tinylm
from tests.published import published
from tests.shell import assert_error, records, run_ok, story
from tests.shell import tinylm as shell
from tinylm.config.run import SpecialTokens
from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.generation_config import GenerationConfig
from tinylm.generation.json_grammar import json_grammar
from tinylm.generation.json_validation import JSONSchema, parse_exact_json
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
COMBINED = {"allOf": [{"anyOf": [{"minimum": number}, {"maximum": number}]} for number in range(30)]}
REFUSED: list[tuple[Any, str]] = [
    # Invalid schemas
    ({"type": "integr"}, '`type` at # is "integr"; it must be one or several of null'),
    ({"properties": {"a/b": {"minLength": -1}}}, "`minLength` at #/properties/a~1b is -1; it must be a whole number"),
    ({"items": {"minimum": "1"}}, "`minimum` at #/items"),
    ({"exclusiveMinimum": True}, "`exclusiveMinimum` at # is true; it must be a number"),
    ({"multipleOf": 0}, "a number above 0"),
    ({"anyOf": []}, "a list of schemas"),
    ({"items": 3}, "a schema is an object, true or false, but #/items is 3"),
    ({"$defs": {"unused": {"required": "a"}}}, "`required` at #/$defs/unused"),
    ({"minimum": math.inf}, "not finite"),
    ({"maximum": 10**400}, "more than 400 digits"),
    ({"minimum": Decimal("1e-999999999")}, "more than 400 digits"),
    ({"minimum": Decimal("NaN")}, "not finite"),
    ({"const": "\ud800"}, "half of a character"),
    ({"const": {1, 2}}, "JSON has no set"),
    # What no grammar says
    ({"type": "array", "uniqueItems": True}, "`uniqueItems` at # is not supported"),
    ({"properties": {"a": {"not": {}}}}, "`not` at #/properties/a is not supported"),
    ({"type": "array", "contains": {}, "x-guidance": {"lenient": True}}, "`contains` at #"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "`oneOf` at #"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "two different `pattern` meet at #"),
    ({"type": "string", "pattern": "(?=a)"}, "`pattern` at # is not supported: look-around"),
    ({"type": "string", "format": "nonsense"}, '`format` at # is "nonsense"; it must be one of date'),
    ({"type": "number", "multipleOf": 0.07}, "`multipleOf` at # needs a `minimum` and a `maximum`"),
    ({"patternProperties": {"a": {}, "b": {}}}, "several patterns"),
    ({"$ref": "http://example.org/schema"}, "example.org"),
    ({"$ref": "file:///etc/passwd"}, "passwd"),
    ({"$ref": "#/nowhere"}, "nowhere"),
    ({"$ref": "#"}, "`$ref` at # refers to itself"),
    ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, "leads to itself without end"),
    (
        {"$ref": "#/$defs/a", "$defs": {"a": {"required": ["a"], "$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "itself",
    ),
    # What nothing is valid by
    (False, "nothing is valid: the schema is false at #"),
    ({"type": "integer", "minimum": 7, "maximum": 5}, "`minimum` and `maximum` leave no number at #"),
    ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "leave no number"),
    ({"type": "integer", "multipleOf": 10, "minimum": 1, "maximum": 9}, "`multipleOf` leaves no number"),
    ({"enum": []}, "no value of `enum`"),
    ({"enum": ["a"], "type": "integer"}, "no value of `enum`"),
    ({"type": "string", "minLength": 2, "maxLength": 1}, "`minLength` is above `maxLength` at #"),
    ({"type": "object", "minProperties": 3, "maxProperties": 1}, "`minProperties` is above `maxProperties` at #"),
    ({"type": "array", "items": False, "minItems": 1}, "`minItems`"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, 'the required "a" has no valid value'),
    (
        {"type": "object", "maxProperties": 1, "required": ["a", "b"]},
        "as many names as `minProperties` and the required",
    ),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "no type in common"),
    ({"allOf": [{"items": [True]}, {"items": {"type": "null"}}]}, "two different `items` meet at #"),
    # What is too large
    ({"type": "string", "minLength": 10**12}, "`minLength` at # is above 100000"),
    (json.loads('{"items": ' * 500 + "{}" + "}" * 500), "nested too deeply"),
    ({"enum": [f"{number:050}" for number in range(30_000)]}, "too large"),
    (COMBINED, "meet at #"),
]
VALID: list[tuple[Any, list[str], list[str]]] = [  # JSON texts that a grammar has, and those that it has not
    ({"type": "integer"}, ["0", "-5", "123456789012345"], ["-0", "01", "1.0", "1234567890123456"]),
    ({"enum": [2**60 + 1]}, [str(2**60 + 1)], [str(2**60), str(2**60 + 2)]),
    ({"minimum": 10**30, "type": "integer"}, [str(10**30), str(10**31 + 7)], [str(10**30 - 1), "0"]),
    (
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
        ["0.1", "0.4999"],
        ["0", "0.0", "0.5", "0.50"],
    ),
    ({"type": "number", "maximum": -0.25}, ["-0.25", "-0.250", "-7", "-0.3"], ["-0.2", "-0", "0.3"]),
    (
        {"type": "number", "maximum": Decimal("-0.1000000000000000000000000000000000000001")},
        ["-0.1000000000000000000000000000000000000001"],
        ["-0.1"],
    ),
    ({"type": "number", "minimum": -0.0, "maximum": 0}, ["0", "0.0"], ["-0", "1"]),
    ({"type": "number", "multipleOf": 0.01}, ["1.25", "-7", "-0.10"], ["1.255", "0.1234"]),
    ({"type": "number", "multipleOf": 0.07, "minimum": 0, "maximum": 1}, ["0.07", "0.98", "0", "0.7"], ["0.08", "1"]),
    ({"type": "integer", "multipleOf": 2.5}, ["0", "-15", "5"], ["2", "-1"]),
    ({"type": ["string", "null"], "maxLength": 2}, ['"ab"', "null", '"é😀"', r'"\n\""'], ['"abc"', r'"\u0061"', "1"]),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ['"aaa"'], ['"aaaa"', ' "aaa"', '"A"', r'"\u0061"']),
    ({"type": "string", "pattern": ".", "maxLength": 1}, [r'"\t"', r'"\u007f"', r'"\""'], ['"ab"', r'"\n"']),
    ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2023-02-29"', '"2024-13-01"']),
    ({"type": "string", "format": "time"}, ['"23:59:59Z"'], ['"23:59:60Z"']),
    ({"items": {"const": 1}, "type": "array", "maxItems": 2}, ["[]", "[1]", "[1,1]", "[1, 1]"], ["[1,  1]", "[1,1,1]"]),
    (
        {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "items": False, "minItems": 1},
        ["[null]", "[null,true]"],
        ["[]", "[true]", "[null,true,1]"],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {"type": "null"}}, "required": ["b"]},
        ['{"a": [true], "b": null}', '{"b":null}'],
        ["{}", '{"a":1}', '{"b":null,"c":1}', '{"b":null,"b":null}', r'{"\u0062":null}', '{ "b":null}'],
    ),
    (
        {"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2, "maxProperties": 2},
        ['{"a":1,"b":2}', '{"b":1,"c":2}'],
        ['{"a":1}', '{"a":1,"b":2,"c":3}'],
    ),
    (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"const": 2}},
        ['{"a":1,"b":2}', '{"ab":2}', "{}"],
        ['{"a":2}', r'{"\u0061":2}', '{"b":1}'],
    ),
    ({"type": "object", "patternProperties": {"^x": {"const": 1}}}, ['{"x1":1}', "{}"], ['{"y":1}', '{"x":2}']),
    (
        {
            "$defs": {
                "n": {"properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "type": "object"}
            },
            "$ref": "#/$defs/n",
        },
        ["{}", '{"n":{"n":null}}'],
        ["null", '{"n":1}'],
    ),
    (
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}, "a": {"maximum": 3}}}],
            "$defs": {"a": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
        },
        ['{"a":3,"b":1}', '{"a":-3}'],
        ['{"a":4}', '{"b":1}', "3"],
    ),
    (
        {"oneOf": [{"properties": {"k": {"const": kind}}, "required": ["k"], "type": "object"} for kind in "xy"]},
        ['{"k":"x"}', '{"k":"y"}'],
        ['{"k":"z"}', "{}"],
    ),
]


class Noise:
    """A model whose logits are random numbers. Implements `NextTokenModel`."""

    context = 16

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._size, self._random = vocab_size + 3, np.random.default_rng(seed)

    def make_cache(self, batch: int, length: int, starts: Any = None) -> Any:
        return [batch]

    def last_logits(self, ids: Any, cache: Any) -> Any:
        return torch.from_numpy(self._random.normal(scale=3, size=(cache[0], self._size)).astype(np.float32))


def samples(tokenizer: Tokenizer, schema: Any, seed: int = 0, **settings: Any) -> list[Sample]:
    """Three samples with random logits."""
    config = GenerationConfig(json_schema=schema, num_samples=3, **{"max_tokens": 3000, **settings})
    engine = TorchEngine(Noise(tokenizer.vocab_size, seed), tokenizer)
    return Continuation(engine, tokenizer, [EncodedPrompt("", [1], [1])], config, 0).run()


Case = tuple[dict[str, Any], Callable[[Any], bool]]  # a schema, and whether a value is valid by it


def exact(text: str) -> Any:
    """The value of a JSON text with exact numbers, in which no name repeats."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), text
        return dict(pairs)

    return json.loads(text, parse_float=Decimal, object_pairs_hook=distinct)


def numbers() -> st.SearchStrategy[Case]:
    """Integers and decimals between bounds, which may be excluded and above 2**53, and multiples."""
    ends = st.one_of(
        st.integers(-300, 300), st.integers(-(10**25), 10**25), st.decimals(-3, 3, places=2).map(lambda x: x + 0)
    )

    def case(low: Any, width: Any, is_open: tuple[bool, bool], is_integer: bool, step: Any) -> Case:
        high = low + width + (2 if is_integer else 0)
        names = ["exclusiveMinimum" if is_open[0] else "minimum", "exclusiveMaximum" if is_open[1] else "maximum"]
        schema = {"type": "integer" if is_integer else "number", names[0]: low, names[1]: high}

        def admits(value: Any) -> bool:
            is_number = type(value) is int or (type(value) is Decimal and not is_integer)
            is_above = value > low if is_open[0] else value >= low
            is_below = value < high if is_open[1] else value <= high
            return is_number and is_above and is_below and (not step or Fraction(value) % Fraction(step) == 0)

        return (schema | {"multipleOf": step} if step else schema), admits

    widths = st.one_of(st.integers(1, 50), st.sampled_from([Decimal("0.5"), Decimal("0.01"), 10**9]))
    bounded = st.builds(case, ends, widths, st.tuples(st.booleans(), st.booleans()), st.booleans(), st.none())
    steps = st.sampled_from([1, 2, Decimal("0.5"), Decimal("0.25"), Decimal("0.01")])
    multiples = st.builds(case, st.integers(-99, 99), st.just(9), st.just((False, True)), st.booleans(), steps)
    return st.one_of(bounded, multiples)


def strings() -> st.SearchStrategy[Case]:
    def is_date(value: Any) -> bool:
        return isinstance(value, str) and bool(date.fromisoformat(value))

    return st.one_of(
        st.integers(0, 4).map(
            lambda size: (
                {"type": "string", "maxLength": size},
                lambda value: isinstance(value, str) and len(value) <= size,
            )
        ),
        st.sampled_from(["^[a-c]{2,4}$", "^(x|yz)+$", r"^\d\w$"]).map(
            lambda pattern: (
                {"type": "string", "pattern": pattern, "maxLength": 4},
                lambda value: isinstance(value, str) and len(value) < 5 and bool(re.search(pattern, value, re.ASCII)),
            )
        ),
        st.just(({"type": "string", "format": "date", "pattern": "^[1-9]"}, is_date)),
    )


def values() -> st.SearchStrategy[Case]:
    enums = st.lists(st.sampled_from(["a", "b c", 7, 2**60 + 1, None, True, 'quote"', "\n"]), min_size=1).map(
        lambda values: ({"enum": values}, lambda value: any(value is one or value == one for one in values))
    )

    def lists(item: Case, least: int) -> Case:
        schema, admits = item
        return (
            {"type": "array", "items": schema, "minItems": least, "maxItems": least + 1},
            lambda value: isinstance(value, list) and len(value) - least in (0, 1) and all(map(admits, value)),
        )

    def objects(items: dict[str, Case], required: set[str], spare: int) -> Case:
        required, most = required & items.keys(), len(items) - spare
        schema = {"type": "object", "properties": {name: schema for name, (schema, _) in items.items()}}
        limits = {"required": sorted(required)} if spare else {"minProperties": most, "maxProperties": most}

        def admits(value: Any) -> bool:
            names = value.keys() if isinstance(value, dict) else {""}
            has_names = (required <= names) if spare else len(names) == most
            return has_names and names <= items.keys() and all(items[name][1](value[name]) for name in names)

        return {**schema, **limits}, admits

    def maps(item: Case, least: int) -> Case:
        schema, admits = item
        return (
            {"type": "object", "additionalProperties": schema, "minProperties": least, "maxProperties": 3},
            lambda value: isinstance(value, dict) and least <= len(value) <= 3 and all(map(admits, value.values())),
        )

    def choices(a: Case, b: Case) -> Case:
        return {"anyOf": [a[0], b[0]]}, lambda value: any(_is_valid(one[1], value) for one in (a, b))

    def extended(inner: st.SearchStrategy[Case]) -> st.SearchStrategy[Case]:
        names = st.sampled_from(["a", "b", "long name"])
        return st.one_of(
            st.builds(lists, inner, st.integers(0, 3)),
            st.builds(objects, st.dictionaries(names, inner, min_size=1), st.sets(names), st.integers(0, 1)),
            st.builds(maps, inner, st.integers(0, 3)),
            st.builds(choices, inner, inner),
        )

    return st.recursive(st.one_of(numbers(), strings(), enums), extended, max_leaves=4)


def _is_valid(admits: Callable[[Any], bool], value: Any) -> bool:
    try:
        return admits(value)
    except (TypeError, ValueError):  # a value of another type
        return False


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=20)
@given(case=values(), seed=st.integers(0, 1000))
def test_every_sample_is_json_that_the_schema_admits(name: str, case: Case, seed: int) -> None:
    schema, admits = case
    for sample in samples(TOKENIZERS[name](), schema, seed):
        assert _is_valid(admits, exact(sample.text)), sample.text
        assert sample.finish_reason == "end"
        assert not re.search(r"\s\s|[^,:]\s|\s$", re.sub(r'"([^"\\]|\\.)*"', "0", sample.text)), sample.text


def test_a_grammar_has_the_json_that_is_valid_in_one_spelling() -> None:
    tokens = llguidance.LLTokenizer("byte")
    wrong = []
    for schema, admitted, refused in VALID:
        compiled = JSONSchema(schema)
        grammar = json_grammar(compiled)
        for text in (*admitted, *refused):
            matcher, content = llguidance.LLMatcher(tokens, grammar), list(text.encode())
            found = matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting()
            if found != (text in admitted):
                wrong.append(f"{schema}: {text}")
            if text in admitted and not compiled.is_valid(parse_exact_json(text), compiled.root):
                wrong.append(f"{schema} is said to refuse {text}")
    assert not wrong, "\n".join(wrong)


def test_values_are_compared_exactly_with_the_schema() -> None:
    for schema, valid, invalid in (
        ({"const": 2**60}, [2**60, Decimal(2**60)], [2**60 + 1, True]),
        ({"const": 1}, [1, Decimal("1.0")], [True, "1"]),
        ({"type": "integer"}, [Decimal("2.0")], [Decimal("2.5"), False]),
        ({"multipleOf": 0.01}, [Decimal("19.99"), "no number"], [Decimal("19.995")]),
        ({"exclusiveMaximum": 0.3}, [Decimal("0.29999999999999999999")], [Decimal("0.3")]),
        ({"maxLength": 1}, ["😀", 12], ["ab"]),
        ({"oneOf": [{"minimum": 3}, {"maximum": 5}]}, [1, 9], [4]),
        ({"type": "object", "minProperties": 1, "properties": {"a": {"type": "null"}}}, [{"a": None}, {"b": 1}], [{}]),
        ({"additionalProperties": False, "patternProperties": {"^x": {}}}, [{"x1": 1}], [{"1x": 1}]),
        ({"prefixItems": [True, {"type": "null"}], "items": False}, [[], [1], [1, None]], [[1, 2], [1, None, 3]]),
    ):
        compiled = JSONSchema(schema)
        assert all(compiled.is_valid(value, compiled.root) for value in valid), schema
        assert not any(compiled.is_valid(value, compiled.root) for value in invalid), schema
    for text in ('{"a": 1, "a": 2}', r'{"b": 1, "\u0062": 1}', "NaN", "[" * 10**5):
        with pytest.raises(ValueError):
            parse_exact_json(text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_names_that_a_schema_leaves_open_differ(name: str) -> None:
    three = {"additionalProperties": {"type": "null"}, "minProperties": 3, "maxProperties": 3, "type": "object"}
    words = {"patternProperties": {"^[ab]+$": {"const": 1}}, "minProperties": 3, "maxProperties": 3, "type": "object"}
    for schema in (three, words, {"type": "array", "items": words, "minItems": 2, "maxItems": 2}):
        for sample in samples(TOKENIZERS[name](), schema):
            value = exact(sample.text)
            assert all(len(one) == 3 for one in (value if isinstance(value, list) else [value]))
    digits = {"type": "object", "patternProperties": {"^[0-4]$": {"const": 1}}, "minProperties": 6}
    with pytest.raises(TinyLMError, match="would repeat a name"):
        samples(TOKENIZERS[name](), digits)


def test_a_text_that_is_not_valid_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = json_grammar(JSONSchema({"type": "integer"}))
    monkeypatch.setattr("tinylm.generation.json_schema.json_grammar", lambda schema: grammar)
    with pytest.raises(TinyLMError, match="The generated JSON is not valid by `json_schema`"):
        samples(TOKENIZERS["characters"](), {"type": "string"})


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
    itself = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    endless = {"$defs": {"a": itself}, "$ref": "#/$defs/a"}
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
    assert_error(result, 2, "line 2", '`type` at # is "text"')  # and no text of line 1
    big = {"type": "object", "required": ["id"], "properties": {"id": {"enum": [1234567890123456789]}}}
    schema.write_text(json.dumps(big))
    assert exact(run_ok(*arguments, "--no-echo", "a").stdout) == {"id": 1234567890123456789}
    schema.write_text('{"const": 0.12345678901234567890}')
    assert run_ok(*arguments, "--no-echo", "a").stdout.strip() == "0.12345678901234567890"
    for content, reason in (
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
        ("[" * 10**5, "is not JSON"),
        ('{"type": "null", "type": "string"}', "is not JSON: a name occurs twice"),
    ):
        schema.write_text(content)
        assert_error(shell(*arguments, "a"), 2, str(schema), reason)
    schema.unlink()
    assert_error(shell(*arguments, "a"), 2, f"Cannot read --json-schema {schema}: No such file")


def test_a_schema_whose_combinations_multiply_is_refused_in_seconds() -> None:
    names = [f"p{number}" for number in range(9)]
    node = {"type": "object", "required": names, "properties": {name: {"$ref": "#/$defs/a"} for name in names}}
    doubled = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(50)} | {"d50": {}}
    x_is_doubled = {"enum": [{"x": 1}], "properties": {"x": {"$ref": "#/$defs/d0"}}}
    for schema in (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": node}},
        {**x_is_doubled, "$defs": doubled},
    ):
        with pytest.raises(UsageError, match="combines too many schemas"):
            json_grammar(JSONSchema(schema))
