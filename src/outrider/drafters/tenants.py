"""State that outlives a request but belongs to one tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_TENANTS = 32
"""Tenants remembered at the same time; the one that was away longest is forgotten first."""


class TenantStore(Generic[T]):
    """One ``T`` per tenant, made by ``factory`` when first asked for. No call ever sees two tenants.

    Bounded: forgetting a tenant costs it a cold start, nothing else, so that even a live request's tenant may go.
    """

    def __init__(self, factory: Callable[[], T], limit: int = MAX_TENANTS) -> None:
        self._factory = factory
        self._limit = limit
        self._states: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._states)

    def get(self, tenant: str) -> T:
        """The tenant's state; makes the tenant the most recent one."""
        state = self._states.pop(tenant, None)
        if state is None:
            state = self._factory()
            if len(self._states) >= self._limit:
                del self._states[next(iter(self._states))]
        self._states[tenant] = state
        return state
