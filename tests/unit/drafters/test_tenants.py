"""State by tenant."""

from __future__ import annotations

from outrider.drafters.tenants import TenantStore


def test_each_tenant_has_its_own_and_keeps_it() -> None:
    store: TenantStore[list[int]] = TenantStore(list)
    store.get("a").append(1)
    assert store.get("b") == []
    assert store.get("a") == [1]


def test_the_tenant_away_longest_is_forgotten_first() -> None:
    store: TenantStore[list[int]] = TenantStore(list, limit=2)
    store.get("a").append(1)
    store.get("b").append(2)
    store.get("a")
    store.get("c")
    assert len(store) == 2
    assert store.get("a") == [1]
    assert store.get("b") == []
