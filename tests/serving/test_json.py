"""JSON of a schema by the server, in both kinds of completions."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import tinylm
from tests.commands.test_serve import call, server
from tests.shell import story

ASCII = "\n" + "".join(map(chr, range(32, 127)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary is ASCII."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "text").write_text(ASCII * 9 + story(1000))
    options: dict[str, Any] = {"layers": 1, "heads": 2, "width": 8, "context": 256, "steps": 1, "tokenizer": "char"}
    return tinylm.train(folder / "text", folder / "run", **options).run


def test_the_server_holds_a_schema_in_completions_and_chats_or_refuses_it(model: Path) -> None:
    answers = [
        ({"type": "integer", "minimum": 7, "maximum": 8}, lambda value: value in (7, 8)),
        ({"type": "number", "minimum": 0.25, "maximum": 0.5, "multipleOf": 0.25}, lambda v: v in (0.25, 0.5)),
        ({"type": "string", "pattern": "^[ab]+$", "maxLength": 3}, lambda v: len(v) <= 3 and set(v) <= set("ab")),
        ({"type": "string", "format": "ipv4"}, lambda value: value.count(".") == 3),
    ]
    refused = [
        ({"type": "integr"}, "Invalid type"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, '["not"]'),
        ({"type": "string", "format": "nonsense"}, "Unknown format"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "greater than maximum"),
    ]
    doors = [
        ("/v1/completions", {"prompt": "a"}, lambda schema: {"json_schema": schema}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}},
        ),
    ]
    with server(model) as (_, address):
        for path, request, format in doors:
            for schema, is_valid in answers:
                status, answer, _ = call(address, path, {**request, **format(schema), "max_tokens": 100})
                choice = answer["choices"][0]
                text = choice["text"] if "text" in choice else choice["message"]["content"]
                assert status == 200 and is_valid(json.loads(text, parse_float=Decimal)), (path, schema, text)
            for schema, reason in refused:
                for stream in (False, True):
                    status, answer, _ = call(address, path, {**request, **format(schema), "stream": stream})
                    assert status == 400 and reason in answer["error"]["message"], (path, schema, answer)


def test_a_server_with_int8_weights_generates_json_with_the_weights_before_quantizing(model: Path) -> None:
    with server(model, "--quantize", "int8") as (_, address):
        request = {"prompt": "a", "json_schema": {"type": "boolean"}, "max_tokens": 10}
        status, answer, _ = call(address, "/v1/completions", request)
    assert status == 200 and answer["choices"][0]["text"] in ("true", "false")
