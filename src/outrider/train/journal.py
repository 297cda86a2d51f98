"""Conversations in a JSONL file as they are written, which a killed run leaves in a state to go on from."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from outrider.core.errors import UsageError
from outrider.models.cache import write_atomically
from outrider.train.disk import check_room
from outrider.train.filters import question_key
from outrider.train.records import Message, to_line

_LINE_ROOM = 1 << 20
"""Bytes that must be free on the disk for one more conversation."""


class Journal:
    """A JSONL file of conversations with ascending ``id``, and beside it ``NAME.state.json``, the state of the work.

    next: number of the first conversation that is not settled, kept or dropped. kept: how many are in the file.
    dropped: reason -> how many were not taken.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Opens what an earlier run left; its last line is removed if it is broken.

        settings: what the texts depend on. Raises UsageError if the file was made with others, or is no journal.
        """
        self.path = path
        self._state_path = path.with_suffix(".state.json")
        self._settings = dict(settings)
        self.next = self.kept = 0
        self.dropped: Counter[str] = Counter()
        self._seen: set[str] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._resume()
        self._note()  # before the file is there: one without a state would count as somebody else's
        self._file = path.open("ab")

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def keep(self, number: int, messages: tuple[Message, ...], **more: Any) -> bool:
        """Write a conversation, unless one that asks the same is there already. Numbers must ascend.

        Raises DiskFullError if the disk is nearly full.
        """
        key = question_key(messages)
        if key in self._seen:
            self.drop(number, "asks what another one asks")
            return False
        check_room(self.path.parent, _LINE_ROOM)
        self._file.write(to_line(messages, id=number, **more).encode())
        self._file.flush()
        os.fsync(self._file.fileno())  # the state must never be ahead of the file
        self._seen.add(key)
        self.kept += 1
        self._settle(number)
        return True

    def drop(self, number: int, reason: str) -> None:
        """Note that a conversation is not taken."""
        self.dropped[reason] += 1
        self._settle(number)

    def _settle(self, number: int) -> None:
        self.next = number + 1
        self._note()

    def _note(self) -> None:
        record = {"settings": self._settings, "next": self.next, "dropped": dict(self.dropped)}
        write_atomically(self._state_path, json.dumps(record, ensure_ascii=False, indent=1).encode())

    def _resume(self) -> None:
        state = self._read_state()
        if not self.path.exists():
            return
        if state.get("settings") != self._settings:
            raise UsageError(f"{self.path} {self._difference(state)}; give another --out, or remove the file")
        self._read_lines()
        if state["next"] >= self.next:
            self.next, self.dropped = state["next"], Counter(state["dropped"])

    def _read_lines(self) -> None:
        whole = 0
        with self.path.open("rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    self._seen.add(question_key(record["messages"]))
                    self.next = record["id"] + 1
                except (ValueError, TypeError, KeyError):
                    raise UsageError(f"{self.path} holds lines that were not written by this command") from None
                self.kept += 1
                whole += len(line)
        os.truncate(self.path, whole)

    def _read_state(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, TypeError, KeyError):
            state = json.loads(self._state_path.read_bytes())
            if isinstance(state["next"], int) and isinstance(state["dropped"], dict):
                return dict(state)
        return {}

    def _difference(self, state: Mapping[str, Any]) -> str:
        old = state.get("settings")
        if not isinstance(old, dict):
            return "was not written by this command"
        changed = [name for name in self._settings if old.get(name) != self._settings[name]]
        return f"was made with other settings ({', '.join(changed) or 'of an earlier version'})"
