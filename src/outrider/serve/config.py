"""What can be set about the server, as one frozen class; the command line has an option for every field."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.errors import ConfigError


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class ServerConfig:
    """Address, keys and limits of the server. Validated when built; raises ConfigError."""

    host: str = _option("127.0.0.1", "address to listen on; anything but the local machine should come with an api_key")
    port: int = _option(8000, "port to listen on; 0 takes a free one")
    api_key: str | Sequence[str] = _option(
        (), "a key that clients must send (may be given several times); OUTRIDER_API_KEY holds more, split by commas"
    )
    api_key_file: str | None = _option(None, "file with one key a line")
    served_model_name: str | Sequence[str] = _option(
        (), "name that requests call the model by (may be given several times); default: the name it was loaded by"
    )
    max_body_bytes: int = _option(8 << 20, "bytes of a request's body at most")
    max_prompt_tokens: int | None = _option(None, "tokens of a prompt at most; default: what the context holds")
    max_choices: int = _option(16, "answers that one HTTP request may ask for: prompts times n")
    max_concurrent_requests: int = _option(256, "answers waiting or running at most; beyond it clients get 429")
    max_requests_per_key: int | None = _option(
        None, "answers waiting or running for one API key at most; default: max_concurrent_requests"
    )
    min_priority: int = _option(0, "lowest priority that a request may ask for, 0 or less: lower ones are served first")
    request_timeout: float = _option(600.0, "seconds that an HTTP request may take")
    drain_timeout: float = _option(30.0, "seconds that running requests are given to finish after SIGTERM")
    cors_origin: str | Sequence[str] = _option(
        (), "web origin whose pages may call the server (may be given several times); default: none"
    )
    access_log: bool = _option(False, "write a line to standard error for every HTTP request")

    def __post_init__(self) -> None:
        for name in ("api_key", "served_model_name", "cors_origin"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
            if any(not isinstance(entry, str) or not entry for entry in getattr(self, name)):
                raise ConfigError(f"{name} holds an empty entry; leave it out")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be between 0 and 65535")
        if not self.host:
            raise ConfigError("host is empty; name an address, such as 127.0.0.1")
        at_least_one = ("max_body_bytes", "max_prompt_tokens", "max_choices", "max_concurrent_requests")
        for name in (*at_least_one, "max_requests_per_key"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"{name}={number} must be at least 1")
        if self.min_priority > 0:
            raise ConfigError(f"min_priority={self.min_priority} must be 0 or less: requests that ask for none have 0")
        for name in ("request_timeout", "drain_timeout"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf or (name == "request_timeout" and seconds == 0):
                raise ConfigError(f"{name}={seconds} must be a number of seconds")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
