"""State by tenant, and the order in which owners give up what they hold."""

from __future__ import annotations

import pytest

from outrider.core.tenants import FairOrder, SharedStore, TenantStore, owner_of


def test_each_tenant_has_its_own_and_keeps_it() -> None:
    store: TenantStore[list[int]] = TenantStore(list)
    store.get("a").append(1)
    assert store.get("b") == []
    assert store.get("a") == [1]


def test_the_tenant_away_longest_is_forgotten_first() -> None:
    for names in (("a", "b", "c"), ("key/a", "key/b", "key/c")):
        store: TenantStore[list[int]] = TenantStore(list, limit=2)
        store.get(names[0]).append(1)
        store.get(names[1]).append(2)
        store.get(names[0])
        store.get(names[2])
        assert len(store) == 2
        assert store.get(names[0]) == [1]
        assert store.get(names[1]) == []


def test_an_owner_cannot_push_out_what_others_have() -> None:
    store: TenantStore[list[int]] = TenantStore(list, limit=8)
    for salt in range(4):
        store.get(f"b/{salt}").append(salt)
    for salt in range(40):
        store.get(f"a/{salt}").append(salt)
    assert len(store) == 8
    assert [store.get(f"b/{salt}") for salt in range(4)] == [[0], [1], [2], [3]]
    assert [store.get(f"a/{salt}") for salt in range(36, 40)] == [[36], [37], [38], [39]]
    assert store.get("c/0") == []
    assert len(store) == 8


def test_the_owner_is_what_stands_before_the_salt() -> None:
    assert [owner_of(name) for name in ("key/salt", "key/", "key/a/b", "key", "")] == ["key", "key", "key", "key", ""]


def test_who_holds_most_gives_up_first() -> None:
    order: FairOrder[int] = FairOrder()
    for key, owner, weight in ((1, "a", 5), (2, "b", 3), (3, "b", 3), (4, "c", 1)):
        order.put(key, owner, weight)
    order.put(2, "b", 3)
    gone = []
    while len(order):
        gone.append(order.first())
        order.discard(gone[-1])
        assert gone[-1] not in order
    assert gone == [3, 1, 2, 4]
    assert order.weight == 0
    order.discard(4)
    with pytest.raises(ValueError, match="empty"):
        order.first()


def test_among_equals_the_one_away_longest_gives_up_first() -> None:
    order: FairOrder[str] = FairOrder()
    for owner in "abc":
        order.put(owner, owner)
    order.put("a", "a")
    assert order.first() == "b"


def test_an_entry_put_again_has_its_new_weight() -> None:
    order: FairOrder[int] = FairOrder()
    order.put(1, "a", 5)
    order.put(1, "a", 2)
    order.put(2, "b", 3)
    assert (order.weight, order.first()) == (5, 2)


def test_what_two_asked_for_is_the_same_and_stays_as_long_as_one_keeps_it() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key.upper()

    store = SharedStore(make, limit=4)
    for owner, key in (("a", "x"), ("b", "x"), ("a", "x")):
        assert store.get(key, owner) == "X"
    for key in ("1", "2", "3", "4"):  # the first key that A gives up is the one that B keeps
        store.get(key, "a")
    store.get("x", "b")
    assert made == ["x", "1", "2", "3", "4"]
    for key in ("5", "6", "7"):
        store.get(key, "b")
    store.get("x", "a")
    assert made[-1] == "x", "given up by both"


def test_shared_things_are_given_up_by_the_owner_that_keeps_most() -> None:
    made: list[str] = []
    store = SharedStore(lambda key: made.append(key), limit=8)
    for key in ("x", "y"):
        store.get(key, "b")
    for number in range(100):
        store.get(str(number), "a")
    for key in ("x", "y"):
        store.get(key, "b")
    assert (made.count("x"), made.count("y"), len(store)) == (1, 1, 8)


def test_what_cannot_be_made_is_not_kept() -> None:
    def refuse(key: str) -> str:
        raise LookupError(key)

    store = SharedStore(refuse, limit=2)
    for number in range(9):
        with pytest.raises(LookupError):
            store.get(str(number), "a")
    assert len(store) == 0
