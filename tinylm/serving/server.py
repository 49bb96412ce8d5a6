"""An OpenAI-compatible server: HTTP around `Completions`. Each connection has a thread."""

import contextlib
import hmac
import json
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from tinylm.errors import TinyLMError, UsageError
from tinylm.generation.conversion_cache import Conversion
from tinylm.generation.engine import Engine
from tinylm.kernels.process import share_heaps
from tinylm.serving.completions import Completions
from tinylm.serving.server_config import ServerConfig, is_loopback
from tinylm.text.chat_format import chat_format

MAX_CONTEXT = 4096  # tokens of a request, unless more are asked for: the cache takes memory for each
MAX_BODY = 1 << 24  # bytes of a request
MAX_THREADS = 2048  # of connections and their answers; more connections are closed
TIMEOUT = 60.0  # seconds that a client may take to send the next bytes, or to read some
PAGES = Path(__file__).parent


def start_server(name: str, model: Conversion, open_torch: Callable[[], Engine], config: ServerConfig) -> "Server":
    """A server that answers with a converted model, in threads of its own.

    name: the name of the model in answers. open_torch: opens the model in torch, which generates JSON.

    Raises UsageError for an address that cannot be used, and TinyLMError if llama.cpp does not start.
    """
    share_heaps()
    try:
        server = Server(config)
    except (OSError, UnicodeError, OverflowError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UsageError(
            f"Cannot listen on {config.host}, port {config.port}: {reason}. Choose another `port` (0: any) or `host`."
        ) from error
    tokenizer, context = model.open_tokenizer(), model.config.model.context
    slots = min(context, config.serving_context or MAX_CONTEXT)
    engine = model.open(tokenizer, samples=config.parallel, slots=slots)
    engine.close_socket()
    template = model.config.tokenizer.chat_template
    format = None if template is None else chat_format(template, tokenizer)
    if format is not None:
        format.template.compile()
    data = model.config.data
    server.completions = Completions(name, engine, tokenizer, data, slots, format, open_torch, config.parallel)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Server(ThreadingHTTPServer):
    """Listens from the start; answers once `completions` is set and `serve_forever` runs."""

    daemon_threads = True
    request_queue_size = 512
    completions: Completions

    def __init__(self, config: ServerConfig) -> None:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self.api_key = config.api_key
        super().__init__(address[:2], Handler)  # type: ignore[arg-type]  # IPv6 addresses have four entries

    def server_bind(self) -> None:
        """Bind, without asking for the name of the host as HTTPServer does."""
        TCPServer.server_bind(self)

    @property
    def listening_address(self) -> str:
        """The URL."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, unless there are too many."""
        if threading.active_count() > MAX_THREADS:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore that a client has cut its connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class RequestError(Exception):
    """A request with an answer other than 200."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "tinylm", ""
    timeout = TIMEOUT
    server: Server
    _has_unread_body = False

    def do_GET(self) -> None:
        """Answer a request without a body."""
        completions = self.server.completions
        page = PAGES / ("completion_page" if completions.format is None else "chat_page") / "index.html"
        self._answer(
            {
                "/": lambda: self._send(page.read_bytes(), "text/html; charset=utf-8"),
                "/health": lambda: self._send_json({"status": "ok"}),
                "/v1/models": lambda: self._send_json(completions.models()),
            }
        )

    def do_POST(self) -> None:
        """Answer a request with a body of JSON."""
        self._answer(
            {
                "/v1/completions": lambda: self._complete(is_chat=False),
                "/v1/chat/completions": lambda: self._complete(is_chat=True),
            }
        )

    def _answer(self, answers: dict[str, Callable[[], None]]) -> None:
        """Answer by path. An error is answered in OpenAI's form."""
        path = self.path.partition("?")[0]
        self._has_unread_body = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        try:
            if path not in answers:
                raise RequestError(HTTPStatus.NOT_FOUND, f"There is no {self.command} {path[:100]} here.")
            self._require_same_site()
            key = self.server.api_key
            given = self.headers.get("Authorization", "").removeprefix("Bearer ") or self.headers.get("X-Api-Key", "")
            is_open = key is None or path in ("/", "/health")
            if not (is_open or hmac.compare_digest(given.encode("latin-1"), str(key).encode())):
                raise RequestError(
                    HTTPStatus.UNAUTHORIZED, "The key is missing or wrong; send Authorization: Bearer KEY."
                )
            answers[path]()
        except RequestError as error:
            self._send_error(error.status, str(error))
        except UsageError as error:
            self._send_error(HTTPStatus.BAD_REQUEST, str(error))
        except TinyLMError as error:
            self._send_error(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except RecursionError:
            self._send_error(HTTPStatus.BAD_REQUEST, "The request is nested too deeply.")

    def _require_same_site(self) -> None:
        """Without a key, refuse a foreign Origin (other sites' pages) and a foreign Host (DNS rebinding)."""
        if self.server.api_key is not None:
            return
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        except ValueError:
            host = ""
        if not is_loopback(host) and host != self.server.server_address[0]:
            raise RequestError(
                HTTPStatus.FORBIDDEN, "The Host of the request is not this machine; use its address, or an API key."
            )
        origin = self.headers.get("Origin")
        if origin is not None and origin.partition("://")[2].lower() != self.headers.get("Host", "").lower():
            raise RequestError(HTTPStatus.FORBIDDEN, "Pages of other sites may not send requests; use an API key.")

    def _read_json(self) -> Any:
        length = self.headers.get("Content-Length", "")
        if not (length.isdecimal() and len(length) < 20):
            raise RequestError(HTTPStatus.LENGTH_REQUIRED, "The request has no Content-Length.")
        if int(length) > MAX_BODY:
            raise RequestError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The request has more than {MAX_BODY >> 20} MiB; send several."
            )
        body = self.rfile.read(int(length))
        self._has_unread_body = False
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"The request is not JSON: {error}.") from error

    def _complete(self, *, is_chat: bool) -> None:
        completions = self.server.completions
        request = completions.parse(self._read_json(), is_chat=is_chat)
        if not request.stream:
            chunks = []
            with contextlib.closing(completions.chunks(request)) as generated:
                for chunk in generated:
                    self._require_client()
                    chunks += [] if chunk is None else [chunk]
            self._send_json(completions.join(request, chunks))
            return
        with contextlib.closing(completions.events(request)) as events:
            self._send_events(events)

    def _send_events(self, events: Iterable[dict[str, Any] | None]) -> None:
        """Send a stream of events. An error before the first one is raised."""
        is_begun = False
        try:
            for event in events:
                self._require_client()
                if event is None:
                    continue
                if not is_begun:
                    self._begin(HTTPStatus.OK, "text/event-stream", length=None)
                    is_begun = True
                self._send_event(json.dumps(event))
        except TinyLMError as error:
            if not is_begun:
                raise
            self._send_event(json.dumps({"error": _problem(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))}))
        self._send_event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _send_event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _require_client(self) -> None:
        """Raise ConnectionError if the client has closed the connection."""
        reading = select.poll()  # `select.select` takes no more than 1,024 files
        reading.register(self.connection, select.POLLIN)
        if reading.poll(0) and not self.connection.recv(1, socket.MSG_PEEK):
            raise ConnectionAbortedError

    def _send_json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send(json.dumps(value).encode(), "application/json", status)

    def _send_error(self, status: HTTPStatus, message: str) -> None:
        self._send_json({"error": _problem(status, message)}, status)

    def _send(self, content: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin(status, kind, len(content))
        self.wfile.write(content)

    def _begin(self, status: HTTPStatus, kind: str, length: int | None) -> None:
        """Send the header. length: in bytes; `None` for chunks."""
        self.close_connection |= self._has_unread_body
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if length is None:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(length))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP as this server takes it."""
        self.close_connection = True
        status = HTTPStatus(code)
        self._send_json({"error": _problem(status, message or status.phrase)}, status)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _problem(status: HTTPStatus, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {"message": message, "type": kind, "code": int(status)}
