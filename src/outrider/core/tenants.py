"""State that outlives a request but belongs to one tenant, and who has to give some up when there is too much of it.

A tenant may be one of many of the same *owner*: those that differ in a salt alone, which whoever holds the API key
makes up. What is bounded is therefore shared out among owners, or one of them could push out what the others have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

DEFAULT_TENANT = "default"

MAX_TENANTS = 32
"""Tenants remembered at the same time."""


def owner_of(tenant: str) -> str:
    """Whose tenant it is: what stands before the first "/" of its name; all of a name without one."""
    return tenant.partition("/")[0]


class FairOrder(Generic[K]):
    """The order in which owners' entries are given up: first of the owner that holds most, what it used least recently.

    So an owner that holds no more than its equal share loses nothing to the others, whatever they add.
    """

    def __init__(self) -> None:
        self._owners: dict[K, str] = {}
        # Of each owner its entries and their weights, least recent first; the owner that was away longest first.
        self._entries: dict[str, dict[K, int]] = {}
        self._held: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, key: K) -> bool:
        return key in self._owners

    @property
    def weight(self) -> int:
        """Of all entries together."""
        return sum(self._held.values())

    def put(self, key: K, owner: str, weight: int = 1) -> None:
        """Add an entry as the most recent one, or make it that."""
        self.discard(key)
        entries = self._entries.pop(owner, {})
        entries[key] = weight
        self._entries[owner] = entries
        self._owners[key] = owner
        self._held[owner] = self._held.get(owner, 0) + weight

    def discard(self, key: K) -> None:
        """Take an entry out, if it is there."""
        owner = self._owners.pop(key, None)
        if owner is None:
            return
        self._held[owner] -= self._entries[owner].pop(key)
        if not self._entries[owner]:
            del self._entries[owner], self._held[owner]

    def first(self) -> K:
        """The entry to give up first; among owners that hold the same, of the one that was away longest.

        Raises ValueError if there is none.
        """
        owner = max(self._entries, key=self._held.__getitem__)
        return next(iter(self._entries[owner]))


class TenantStore(Generic[T]):
    """One ``T`` per tenant, made by ``factory`` when first asked for. No call ever sees two tenants.

    Bounded: beyond ``limit`` tenants one is forgotten, by `FairOrder`. Being forgotten costs a cold start, nothing
    else, so that even a live request's tenant may go.
    """

    def __init__(self, factory: Callable[[], T], limit: int = MAX_TENANTS) -> None:
        self._factory = factory
        self._limit = limit
        self._states: dict[str, T] = {}
        self._order: FairOrder[str] = FairOrder()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, tenant: str) -> T:
        """The tenant's state; makes the tenant the most recent one."""
        if tenant not in self._states:
            self._states[tenant] = self._factory()
        self._order.put(tenant, owner_of(tenant))
        if len(self._states) > self._limit:
            forgotten = self._order.first()
            self._order.discard(forgotten)
            del self._states[forgotten]
        return self._states[tenant]


class SharedStore(Generic[K, T]):
    """One ``T`` per key, made by ``factory`` when first asked for, and the same for all who ask for that key: for what
    says nothing of a tenant's texts but keeps, as in a `TenantStore`, what each tenant's have taught.

    It belongs to every owner that asked for it, and stays as long as one of them keeps it. Bounded: an owner keeps a
    key, and beyond ``limit`` of those one is given up, by `FairOrder`.
    """

    def __init__(self, factory: Callable[[K], T], limit: int) -> None:
        self._factory = factory
        self._limit = limit
        self._states: dict[K, T] = {}
        self._keepers: Counter[K] = Counter()
        self._order: FairOrder[tuple[str, K]] = FairOrder()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, key: K, owner: str) -> T:
        """What belongs to the key; makes it the owner's most recent one. Nothing is kept if ``factory`` raises."""
        state = self._states[key] if key in self._states else self._factory(key)
        self._states[key] = state
        self._keepers[key] += (owner, key) not in self._order
        self._order.put((owner, key), owner)
        if len(self._order) > self._limit:
            self._give_up(self._order.first())
        return state

    def _give_up(self, kept: tuple[str, K]) -> None:
        self._order.discard(kept)
        _, key = kept
        self._keepers[key] -= 1
        if not self._keepers[key]:
            del self._keepers[key], self._states[key]
