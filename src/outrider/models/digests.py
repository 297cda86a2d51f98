"""The sha256 of model files, each computed once.

A digest is remembered in the cache together with the file's size, time of change and inode, and counts for as long as
these stay the same. For a file that was checked when it was fetched, that check is the digest.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from outrider.models.aliases import ALIASES
from outrider.models.cache import cache_dir, write_atomically
from outrider.models.fetch import checked_digest


def file_digest(path: Path) -> str:
    """sha256 of a file's content, as hexadecimal digits. Raises OSError if the file cannot be read."""
    path = path.resolve()
    for alias in ALIASES.values():
        known = checked_digest(alias, path)
        if known is not None:
            return known
    identity = _identity(path)
    note = cache_dir() / "digests" / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
    known = _remembered(note, identity)
    if known is not None:
        return known
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # What changed while it was read has a digest of neither state; it is of no use to anyone, and is not kept.
    if _identity(path) == identity:
        with suppress(OSError):  # without the note, the file is read again the next time
            note.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(note, json.dumps({**identity, "sha256": digest}).encode())
    return digest


def _identity(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"path": str(path), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "inode": stat.st_ino}


def _remembered(note: Path, identity: dict[str, Any]) -> str | None:
    try:
        found = json.loads(note.read_bytes())
        digest: str = found.pop("sha256")
        return digest if found == identity else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
