"""API keys, and the tenant that a request belongs to."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from starlette.requests import Request

from outrider.core.errors import ConfigError
from outrider.serve.config import ServerConfig
from outrider.serve.errors import APIError

ENVIRONMENT = "OUTRIDER_API_KEY"


def load_keys(config: ServerConfig) -> tuple[str, ...]:
    """Every key that clients may use: from the configuration, its file and the environment; none: no key is needed.

    Raises ConfigError for a file that cannot be read or holds no key, and for a key that no header could carry.
    """
    keys = [*config.api_key]
    if config.api_key_file is not None:
        found = _read(config.api_key_file)
        if not found:
            raise ConfigError(f"{config.api_key_file}: holds no key; put one on each line")
        keys += found
    keys += [key.strip() for key in os.environ.get(ENVIRONMENT, "").split(",") if key.strip()]
    for key in keys:
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ConfigError("an API key must be printable ASCII without spaces")
    return tuple(dict.fromkeys(keys))


def _read(path: str) -> list[str]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the API keys ({error.__class__.__name__})") from None
    return [line.strip() for line in text.splitlines() if line.strip()]


class Keys:
    """Checks the key of a request, in a time that tells nothing of how much of it was right."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: Sequence[bytes] = [_digest(key.encode()) for key in keys]

    def check(self, request: Request) -> str:
        """The key that was sent; "" where none is needed. Raises APIError (401)."""
        kind, _, sent = request.headers.get("authorization", "").partition(" ")
        sent = sent.strip() if kind.lower() == "bearer" else ""
        if not self._digests:
            return ""
        digest = _digest(sent.encode("utf-8", "replace"))
        # Digests have one length, and none is left out after a match.
        if not sum([hmac.compare_digest(digest, known) for known in self._digests]):
            message = "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'"
            headers = {"WWW-Authenticate": "Bearer"}
            raise APIError(401, message, kind="authentication_error", code="invalid_api_key", headers=headers)
        return sent


def tenant_of(key: str, cache_salt: str | None) -> str:
    """Name under which drafters and caches keep what a client's requests said: the same for the same key and salt.

    The key's part comes first, as `outrider.core.tenants.owner_of` wants it. Both are digests, so that neither of the
    two can be read off the name.
    """
    return "/".join(_digest(part.encode("utf-8", "surrogatepass")).hex() for part in (key, cache_salt or ""))


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
