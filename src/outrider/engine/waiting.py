"""Who waits, and in which order: by priority; those that had to make way; then clients take turns."""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine.request import Request


@dataclass
class _Line:
    """Requests of one priority. back: those that have run before, in the order in which they were first started.

    clients: the others of each client, oldest first; the client whose turn it is stands first.
    """

    back: list[Request] = field(default_factory=list)
    clients: dict[str, deque[Request]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.back) + sum(map(len, self.clients.values()))

    def add(self, request: Request) -> None:
        if request.turn is None:
            self.clients.setdefault(request.client, deque()).append(request)
        else:
            insort(self.back, request, key=lambda other: other.turn or 0)

    def first(self) -> Request:
        return self.back[0] if self.back else next(iter(self.clients.values()))[0]

    def pop(self) -> None:
        """Take the first one out. Its client's next one comes after one of each other client."""
        if self.back:
            del self.back[0]
            return
        client = next(iter(self.clients))
        own = self.clients.pop(client)
        own.popleft()
        if own:
            self.clients[client] = own

    def remove(self, request: Request) -> bool:
        if request in self.back:
            self.back.remove(request)
            return True
        own = self.clients.get(request.client, deque())
        if request not in own:
            return False
        own.remove(request)
        if not own:
            del self.clients[request.client]
        return True


class Waiting:
    """Requests that wait for a place in the batch.

    One client with many requests keeps another's waiting no longer than it takes to start one. Those that have run
    before come first, since they were started before all that have not.
    """

    def __init__(self) -> None:
        self._lines: dict[int, _Line] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    @property
    def first(self) -> Request | None:
        """The one that is to start next."""
        return self._lines[min(self._lines)].first() if self._lines else None

    def add(self, request: Request) -> None:
        """Let a request wait: behind older ones of its client, or where it was if it has run before."""
        self._lines.setdefault(request.priority, _Line()).add(request)

    def pop(self) -> None:
        """Take out the first one, which there has to be."""
        priority = min(self._lines)
        self._lines[priority].pop()
        self._drop_if_empty(priority)

    def remove(self, request: Request) -> bool:
        """Take a request out; whether it was there."""
        line = self._lines.get(request.priority)
        found = line is not None and line.remove(request)
        if found:
            self._drop_if_empty(request.priority)
        return found

    def _drop_if_empty(self, priority: int) -> None:
        if not self._lines[priority]:
            del self._lines[priority]
