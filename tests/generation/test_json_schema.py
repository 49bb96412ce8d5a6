"""JSON that a schema admits, whatever the model's logits are."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
import torch

import tinylm
from tests.published import published
from tests.shell import CHILD_LIMIT, assert_error, environment, records, run_ok, story
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
CLOSED = {"type": "object", "additionalProperties": False}
NAME, AGE = {"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = {**CLOSED, "properties": {"name": NAME, "age": AGE}, "required": ["name", "age"]}
NODE = {**CLOSED, "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
KINDS = [{**CLOSED, "properties": {"k": {"const": k}, k: AGE}, "required": ["k", k]} for k in "xy"]
Case = tuple[dict[str, Any], Callable[[Any], bool]]  # a schema, and whether a value is valid by it


def is_age(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 99


def is_node(value: Any) -> bool:
    return value is None or value == {} or (value.keys() == {"n"} and is_node(value["n"]))


USUAL: list[Case] = [
    (PERSON, lambda v: list(v) == ["name", "age"] and len(v["name"]) <= 5 and is_age(v["age"])),
    ({**CLOSED, "properties": {"a": {"type": "null"}, "b": AGE}, "required": ["b"]}, lambda v: {*v} | {"a"} == {*"ab"}),
    ({"type": "object", "additionalProperties": AGE, "maxProperties": 2}, lambda v: all(map(is_age, v.values()))),
    (
        {**CLOSED, "patternProperties": {"^x[0-9]$": AGE}, "maxProperties": 2},
        lambda v: all(re.match("x[0-9]$", n) for n in v),
    ),
    ({"type": "array", "items": AGE, "minItems": 2, "maxItems": 3}, lambda v: len(v) in (2, 3) and all(map(is_age, v))),
    (
        {"type": "array", "prefixItems": [NAME, {"type": "boolean"}], "items": False, "minItems": 2},
        lambda v: v[1] in (0, 1),
    ),
    ({"enum": ["a", 'quote"', "\n", 7, None, [True]]}, lambda v: v in ["a", 'quote"', "\n", 7, None, [True]]),
    ({"const": {"a": [1.5, "\x01"]}}, lambda v: v == {"a": [1.5, "\x01"]}),
    ({"type": ["string", "null"], "minLength": 2, "maxLength": 4}, lambda v: v is None or 2 <= len(v) <= 4),
    ({"type": "string", "pattern": r"^[a-c]{2,4}\d$"}, lambda v: bool(re.fullmatch("[a-c]{2,4}[0-9]", v))),
    ({"type": "string", "format": "date", "pattern": "-0[13-9]-"}, lambda v: bool(date.fromisoformat(v))),
    ({"type": "string", "format": "ipv4"}, lambda v: ip_address(v).version == 4),
    ({"type": "string", "format": "uuid"}, lambda v: bool(UUID(v))),
    ({"type": "number", "minimum": -90, "maximum": 90}, lambda v: -90 <= v <= 90),
    ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, lambda v: 0 < v < 1),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 10}, lambda v: type(v) is int and 1 <= v <= 10),
    ({"type": "integer", "multipleOf": 5, "minimum": 1, "maximum": 99}, lambda v: v % 5 == 0 and 5 <= v <= 95),
    ({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 9}, lambda v: v * 4 % 1 == 0 and v <= 9),
    ({"$defs": {"n": NODE}, "$ref": "#/$defs/n"}, is_node),
    ({"allOf": [AGE, {"minimum": 90}]}, lambda v: 90 <= v <= 99),
    ({"anyOf": [NAME, AGE]}, lambda v: is_age(v) or len(v) <= 5),
    ({"oneOf": KINDS}, lambda v: v["k"] in ("x", "y") and v.keys() == {"k", v["k"]} and is_age(v[v["k"]])),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "integr"}, "Invalid type: integr"),
    ({"properties": {"a": {"minLength": -1}}}, "Expected positive integer for 'minLength', got -1"),
    ({"items": 3}, "schema must be an object or boolean"),
    ({"minimum": float("inf")}, "Out of range float"),
    ({"const": {1, 2}}, "set is not JSON serializable"),
    ({"const": "\ud800"}, "hex escape"),
    ({"enum": [2**53]}, "9007199254740992 is not below 2**53"),
    ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
    ({"properties": {"a": {"not": {}}}}, 'Unimplemented keys: ["not"]'),
    ({"contains": {}, "x-guidance": {"lenient": True}}, 'Unimplemented keys: ["contains"]'),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf constraints are not supported."),
    ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ({"type": "string", "format": "nonsense"}, "Unknown format: nonsense"),
    ({"$ref": "file:///etc/passwd"}, "retriever does not fetch"),
    ({"$ref": "#/nowhere"}, "'/nowhere' does not exist"),
    ({"type": "integer", "minimum": 7, "maximum": 5}, "minimum (7) is greater than maximum (5)"),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "required property 'a' is unsatisfiable"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "incompatible types"),
    ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, "circular references"),
]
ATTACKS: list[tuple[dict[str, Any], str]] = [
    (json.loads('{"items": ' * 500 + "{}" + "}" * 500), "recursion limit"),
    ({"enum": ["a" * 1_000_001]}, "more than 1,000,000 characters"),
    ({"type": "string", "minLength": 10**12}, "invalid"),
    ({"properties": {str(number): {"type": "null"} for number in range(20_000)}}, "schema too large"),
    ({"allOf": [{"anyOf": [{"minimum": n}, {"maximum": n}]} for n in range(30)]}, "schema too large"),
    ({"allOf": [{"pattern": f".*{chr(97 + n)}.{{{n + 5}}}x"} for n in range(20)]}, "more than 12 patterns"),
    ({"pattern": "a", "anyOf": [{"pattern": f"b{n}"} for n in range(20)]}, "more than 12 patterns"),
    ({"patternProperties": {f"^a{n}x.*{n}$": {} for n in range(400)}}, "more than 100 patterns"),
    ({"anyOf": [{"multipleOf": number} for number in (99_991, 99_989)]}, "common multiple of `multipleOf` is above"),
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
    """Samples with random logits."""
    config = GenerationConfig(json_schema=schema, **{"max_tokens": 3000, "num_samples": 3, **settings})
    engine = TorchEngine(Noise(tokenizer.vocab_size, seed), tokenizer)
    return Continuation(engine, tokenizer, [EncodedPrompt("", [1], [1])], config, 0).run()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_sample_of_a_usual_schema_is_valid_json(name: str) -> None:
    for schema, is_valid in USUAL:
        for sample in samples(TOKENIZERS[name](), schema, num_samples=20):
            assert is_valid(json.loads(sample.text)), (schema, sample.text)
            assert sample.finish_reason == "end"
            assert not re.search(r"\s\s|[^,:]\s|\s$", re.sub(r'"([^"\\]|\\.)*"', "0", sample.text)), sample.text


@pytest.mark.parametrize("name", ["llama2", "qwen2"])
def test_published_tokenizers_write_json(name: str) -> None:
    tokenizer = Tokenizer.parse(json.dumps(published()[name]), SpecialTokens(), Path(name))
    for sample in samples(tokenizer, PERSON):
        assert USUAL[0][1](json.loads(sample.text))


def test_log_probabilities_are_those_of_the_model_and_seeds_repeat_a_sample() -> None:
    tokenizer = TOKENIZERS["characters"]()
    first, second = (samples(tokenizer, PERSON, seed=2, logprobs=1, temperature=0.5) for _ in range(2))
    assert [sample.text for sample in first] == [sample.text for sample in second]
    best = first[0].logprobs[0]["top"][0]  # of all tokens: JSON begins with {
    assert first[0].text[0] == "{" and best["token"] != "{" and best["logprob"] > first[0].logprobs[0]["logprob"]


def test_a_schema_that_is_not_supported_is_an_error_that_says_why_within_seconds() -> None:
    wrong, start = [], time.monotonic()
    for schema, reason in REFUSED + ATTACKS:
        try:
            GenerationConfig(json_schema=schema)
            wrong.append(f"{str(schema)[:80]} is accepted")
        except UsageError as error:
            if not str(error).startswith("`json_schema` cannot be used: ") or reason not in str(error):
                wrong.append(f"{str(schema)[:80]}: {error}")
    assert not wrong, "\n".join(wrong)
    assert time.monotonic() - start < 20
    with pytest.raises(UsageError, match="`stop` would cut"):
        GenerationConfig(stop=("a",), json_schema=PERSON)


def test_a_schema_is_checked_without_torch() -> None:
    """As a server does that runs llama.cpp."""
    code = "import sys\nfrom tinylm.generation.generation_config import GenerationConfig as Config\n"
    code += f"Config(json_schema={PERSON})\nassert 'llguidance' in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=CHILD_LIMIT, env=environment())


def test_json_that_cannot_be_completed_is_an_error() -> None:
    with pytest.raises(TinyLMError, match="not complete after 9 tokens: raise `max_tokens`"):
        samples(TOKENIZERS["characters"](), PERSON, max_tokens=9)
    for schema in (PERSON, {"enum": ["é"]}, {"$ref": "#"}):
        with pytest.raises(UsageError, match="has no token with which the JSON"):
            samples(train_char('abc"'), schema)
    with pytest.raises(UsageError, match="`json_schema` cannot be used: it is too complex"):
        samples(TOKENIZERS["characters"](), {"type": "string", "pattern": "^((((a{100}){100}){100}){100})$"})
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
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
