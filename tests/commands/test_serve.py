"""tinylm serve: the server's answers, and what it refuses."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tinylm
from tests.shell import assert_error, environment, story
from tests.shell import tinylm as shell
from tinylm.errors import UsageError
from tinylm.serving.server_config import ServerConfig

LIMIT = 60.0  # seconds until the server answers
CHAT = {"messages": [{"role": "user", "content": "the old man"}], "max_tokens": 5}
SCHEMA = {"enum": ["the old", "sea"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its vocabulary has the characters of JSON."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "text").write_text(story(4000) + '{"a": true, "b": [false]}\n')
    return tinylm.train(folder / "text", folder / "run", layers=1, heads=2, width=16, context=128, steps=5).run


@contextlib.contextmanager
def server(model: Path, *options: object, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running server and its address; killed at the end."""
    command = [sys.executable, "-m", "tinylm", "serve", "-m", str(model), "--port", "0", *map(str, options)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment() | variables, **pipes) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip().removeprefix("http://")
        finally:
            process.kill()


def test_the_address_is_json_with_json(model: Path) -> None:
    with server(model, "--json", "--quiet") as (_, line):
        assert call(json.loads(line)["url"].removeprefix("http://"), "/v1/models")[0] == 200


def call(address: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
    """The status, the answer and its headers. body: sent as JSON, unless it is text."""
    connection = http.client.HTTPConnection(address, timeout=LIMIT)
    text = body if isinstance(body, str | None) else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, text, headers)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    is_json = (response.getheader("Content-Type") or "").startswith("application/json")
    return response.status, json.loads(content) if is_json else content, dict(response.getheaders())


def test_a_base_model_completes_texts_and_survives_what_clients_send(model: Path) -> None:
    with server(model) as (process, address):
        request = {"prompt": "the old man", "max_tokens": 9, "temperature": 0}
        expected = tinylm.load(model).generate("the old man", max_tokens=9, temperature=0)
        status, answer, headers = call(address, "/v1/completions", request, Origin=f"http://{address}")
        assert call(address, "/v1/completions", request, Origin="http://elsewhere.example")[0] == 403
        assert call(address, "/v1/completions", request, Origin="null")[0] == 403
        status, answer, headers = call(address, "/v1/completions", request)
        assert (status, answer["choices"][0]["text"], answer["model"]) == (200, expected, "run")
        assert "Access-Control-Allow-Origin" not in headers
        _, events, _ = call(address, "/v1/completions", request | {"stream": True})
        parts = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
        assert "".join(part["choices"][0]["text"] for part in parts) == expected and len(parts) > 2
        seeded = [call(address, "/v1/completions", request | {"temperature": 1, "seed": 5})[1] for _ in range(2)]
        assert seeded[0]["choices"][0]["text"] == seeded[1]["choices"][0]["text"]
        logprobs = call(address, "/v1/completions", request | {"logprobs": 2, "echo": True})[1]["choices"][0][
            "logprobs"
        ]
        assert "".join(logprobs["tokens"]) == "the old man" + expected and logprobs["token_logprobs"][0] is None
        constrained = request | {"max_tokens": 60, "json_schema": SCHEMA}
        assert json.loads(call(address, "/v1/completions", constrained)[1]["choices"][0]["text"]) in SCHEMA["enum"]
        huge = request | {"repeat_penalty": 1.1, "repeat_last_n": 2**31 - 1}  # as much memory was reserved
        assert call(address, "/v1/completions", huge)[0] == 200
        lines = [call(address, "/v1/completions", request | {"prompt": f"the old{end}man"}) for end in ("\n", "\r\n")]
        assert lines[0][1]["choices"][0]["text"] == lines[1][1]["choices"][0]["text"]
        assert call(address, "/v1/models")[1]["data"][0]["id"] == "run"
        port = address.rpartition(":")[2]
        for host in (f"localhost:{port}", f"[::1]:{port}", "127.0.0.1"):
            assert call(address, "/v1/models", Host=host)[0] == 200, host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            f"127.0.0.1.evil.example:{port}",
            "",
            "[",
            "localhost.evil",
        ):
            for path in ("/", "/health", "/v1/models"):
                assert call(address, path, Host=host)[0] == 403, host
        assert "it continues what you write" in call(address, "/")[1]
        assert call(address, "/v1/chat/completions", CHAT)[0] == 200
        for body in (
            "{",
            request | {"prompt": "the " * 1000},
            request | {"grammar": "root ::= ("},
            {"prompt": {"a": 1}},
            '{"prompt": "a", "temperature": 1' + "0" * 400 + "}",
            request | {"samplers": ["top_k"]},
            {"prompt": "\ud800"},
            "[" * 100_000,
        ):
            status, answer, _ = call(address, "/v1/completions", body)
            assert status == 400 and answer["error"]["message"], body
        for path in (
            "/tools",
            "/cors-proxy?url=http://localhost",
            "/slots",
            "/metrics",
            "/models/load",
            "/../server.py",
        ):
            assert call(address, path)[0] == 404, path
        sender = http.client.HTTPConnection(address, timeout=LIMIT)
        sender.putrequest("POST", "/v1/completions")
        sender.putheader("Content-Length", str(1 << 40))
        sender.endheaders()
        assert sender.getresponse().status == 413
        sender.close()
        cut = http.client.HTTPConnection(address, timeout=LIMIT)
        cut.request("POST", "/v1/completions", json.dumps(request | {"max_tokens": 100, "stream": True}))
        cut.getresponse().read(20)
        cut.close()
        assert call(address, "/v1/completions", request)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == -signal.SIGTERM and process.stdout is not None and process.stdout.read() == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_while_clients_read_and_wait(model: Path, number: signal.Signals) -> None:
    with server(model) as (process, address), contextlib.ExitStack() as clients:
        connections = []
        for _ in range(150):
            client = http.client.HTTPConnection(address, timeout=LIMIT)
            clients.callback(client.close)
            request = {"prompt": "the old man", "max_tokens": 100, "n": 4, "stream": True, "logprobs": 50}
            client.request("POST", "/v1/completions", json.dumps(request))
            connections.append(client)
        assert connections[0].getresponse().status == 200
        process.send_signal(number)
        assert process.wait(LIMIT) == -number
        with pytest.raises((http.client.HTTPException, ConnectionError)):  # no answer, or a part of one
            connections[-1].getresponse().read()


def test_a_chat_model_has_a_page_and_a_key_is_required_if_one_is_given(model: Path, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    chat = tmp_path / "chat"
    tinylm.export_model(model, to="hf", out=chat)
    (chat / "chat_template.jinja").write_text(template)
    with server(chat, TINYLM_SERVE_API_KEY="secret") as (process, address):
        for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"}), ("/v1/models", None)):
            assert call(address, path, body)[0] == 401
            assert call(address, path, body, Authorization="Bearer secret")[0] == 200
        assert "<h1>Chat</h1>" in call(address, "/")[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == -signal.SIGINT
        assert process.stderr is not None and "secret" not in process.stderr.read()


def test_what_cannot_be_served_is_an_error_before_the_model_is_opened(model: Path) -> None:
    for host in ("0.0.0.0", "192.0.2.1", "::", "example.org"):
        with pytest.raises(UsageError, match="can be reached from other machines; give an `api_key`"):
            ServerConfig(host=host)
    for host in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        ServerConfig(host=host)
    with pytest.raises(UsageError, match="`api_key` is empty"):
        ServerConfig(api_key="")
    assert_error(shell("serve", "-m", model, "--host", "0.0.0.0"), 2, "give an --api-key as well")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert_error(shell("serve", "-m", model, "--port", port), 2, f"port {port}: ", "Choose another --port")


def test_a_model_that_llama_cpp_cannot_run_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(story(4000))
    options: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "context": 32, "steps": 1, "position": "relative"}
    run = tinylm.train(tmp_path / "text", tmp_path / "relative", **options).run
    result = shell("serve", "-m", run, "--port", 0)
    assert result.exit_code == 2 and "relative" in result.stderr, result.output


@pytest.mark.slow
def test_the_second_start_imports_no_torch(model: Path) -> None:
    """Only the converted file is opened."""
    with server(model):
        pass
    time.sleep(2.5)  # a record exists only for files that have not changed for two seconds
    with server(model):
        pass
    with server(model) as (process, _):
        maps = Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text()
    assert os.environ.get("TINYLM_SERVE_API_KEY") is None
