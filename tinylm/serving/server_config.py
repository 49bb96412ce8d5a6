"""Settings of the server: the options of `tinylm serve`. Imports no engine."""

import contextlib
import ipaddress
from dataclasses import dataclass
from typing import Annotated

from tinylm.config.validation import Panel, Range, Setting, check_fields, require
from tinylm.errors import UsageError


@dataclass(frozen=True)
class ServerConfig:
    """Settings of the server. Raises UsageError for a value out of range, and for an open host without a key.

    host, port: the address to listen on; port 0 takes a free one.
    api_key: required of clients as a bearer token; `None` for none, which is possible on the loopback only.
    parallel: number of answers that llama.cpp generates at the same time; others wait. A request with `n` = 4 has four.
        Answers in JSON do not count: torch generates them beside these, one at a time.
    serving_context: tokens of a request and its answer; `None` for the model's context, at most 4,096.
    """

    host: Annotated[
        str,
        Setting("Address to listen on; 127.0.0.1 is for this machine only.", Panel.MACHINE, metavar="HOST"),
    ] = "127.0.0.1"
    port: Annotated[int, Setting("Port to listen on; 0 takes a free one.", Panel.MACHINE, Range(0, 65_535))] = 8080
    api_key: Annotated[
        str | None,
        Setting("Key that clients must send; better given as TINYLM_SERVE_API_KEY.", Panel.MACHINE, metavar="KEY"),
    ] = None
    parallel: Annotated[
        int,
        Setting(
            "Answers that are generated at the same time; those in JSON, one at a time beside them.",
            Panel.MACHINE,
            Range(1, 256),
        ),
    ] = 4
    serving_context: Annotated[
        int | None,
        Setting(
            "Tokens of a request and its answer (default: the model's context, at most 4096).",
            Panel.MACHINE,
            Range(1, 1 << 20),
        ),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        require(self.api_key != "", "`api_key` is empty; give a key, or leave it out.")
        if self.api_key is None and not is_loopback(self.host):
            raise UsageError(f"`host` {self.host} can be reached from other machines; give an `api_key` as well.")


def is_loopback(host: str) -> bool:
    """Whether a host is this machine: localhost, or a loopback address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
