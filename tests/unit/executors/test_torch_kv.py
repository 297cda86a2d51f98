"""Pages: how they are dealt out, moved between and given back."""

from __future__ import annotations

import pytest
import torch

from outrider.core.errors import KVCacheFullError, UsageError
from outrider.executors.torch.kv import KVCache, SequenceKV

PAGE = 4


def cache_of(pages: int) -> KVCache:
    return KVCache(
        layers=2,
        kv_heads=1,
        head_dim=2,
        pages=pages,
        page_size=PAGE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def append(cache: KVCache, handle: int, values: list[float], parents: list[int] | None = None) -> None:
    """Pending rows (a chain, unless parents are given) whose keys and values in every layer are ``values``."""
    seq = cache[handle]
    start, first = seq.length + seq.pending, seq.pending
    cache.reserve([(seq, len(values))])
    for parent in parents or range(first - 1, first - 1 + len(values)):
        seq.parents.append(parent)
        seq.depths.append(0 if parent < 0 else seq.depths[parent] + 1)
    cache.data[:, :, :, cache.slots(seq, start, start + len(values))] = torch.tensor(values)[:, None]


def contents(cache: KVCache, handle: int) -> list[float]:
    """The committed values, which must be the same in all layers, keys and values."""
    seq = cache[handle]
    if not seq.length:
        return []
    read = cache.data[:, :, :, cache.slots(seq, 0, seq.length)]
    assert bool((read == read[:1, :1, :, :, :1]).all())
    return [float(value) for value in read[0, 0, 0, :, 0]]


def fragment(cache: KVCache) -> int:
    """Open a sequence in a cache in which every other page is taken."""
    handles = [cache.open() for _ in range(cache.num_pages)]
    for handle in handles:
        append(cache, handle, [0.0])
    for handle in handles:
        if cache[handle].pages[0] % 2 == 0:
            cache.close(handle)
    return cache.open()


def test_pages_of_one_sequence_lie_side_by_side() -> None:
    cache = cache_of(8)
    handle = cache.open()
    for i in range(30):
        append(cache, handle, [float(i)])
        cache.commit(cache[handle], [0])
    assert isinstance(cache.slots(cache[handle], 0, 30), slice)


def test_sequences_leave_each_other_room_to_grow() -> None:
    cache = cache_of(64)
    handles = [cache.open() for _ in range(4)]
    for handle in handles:
        append(cache, handle, [1.0] * 10)
    for i in range(40):
        for handle in handles:
            cache.commit(cache[handle], range(cache[handle].pending))
            append(cache, handle, [float(i)])
    assert all(isinstance(cache.slots(cache[handle], 0, 50), slice) for handle in handles)
    cache.check_integrity()


def test_scattered_pages_hold_a_sequence_too() -> None:
    cache = cache_of(10)
    handle = fragment(cache)
    append(cache, handle, [float(i) for i in range(10)])
    cache.commit(cache[handle], range(10))
    assert isinstance(cache.slots(cache[handle], 0, 10), torch.Tensor)
    assert contents(cache, handle) == [float(i) for i in range(10)]
    cache.check_integrity()


@pytest.mark.parametrize("scattered", [False, True])
def test_commit_moves_the_path_together(scattered: bool) -> None:
    cache = cache_of(12)
    handle = fragment(cache) if scattered else cache.open()
    append(cache, handle, [1.0, 2.0, 3.0])
    cache.commit(cache[handle], [0, 1, 2])
    # 4 -> 5 -> 7 -> 8 -> 10 -> 12; sources and destinations overlap, across pages
    append(cache, handle, [float(i) for i in range(4, 13)], [-1, 0, -1, 1, 3, 3, 4, 2, 6])
    cache.commit(cache[handle], [0, 1, 3, 4, 6, 8])
    assert contents(cache, handle) == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0, 8.0, 10.0, 12.0]
    assert cache[handle].pending == 0
    cache.check_integrity()


def test_a_path_in_order_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(8)
    handle = cache.open()
    append(cache, handle, [0.0, 1.0, 2.0, 3.0])
    monkeypatch.setattr(torch.Tensor, "index_select", lambda *_: pytest.fail("copied"))
    cache.commit(cache[handle], [0, 1, 2])
    assert contents(cache, handle) == [0.0, 1.0, 2.0]


def test_rows_before_the_first_gap_stay() -> None:
    cache = cache_of(8)
    handle = cache.open()
    append(cache, handle, [0.0, 1.0, 9.0, 2.0], [-1, 0, 0, 1])
    moved = []
    original = torch.Tensor.index_select

    def spy(self: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
        moved.append(index.tolist())
        return original(self, dim, index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", spy)
        cache.commit(cache[handle], [0, 1, 3])
    assert moved == [[3]]
    assert contents(cache, handle) == [0.0, 1.0, 2.0]


def test_commit_and_truncate_give_pages_back() -> None:
    cache = cache_of(8)
    handle = cache.open()
    append(cache, handle, [float(i) for i in range(20)])
    assert cache.free_pages == 3
    cache.commit(cache[handle], range(5))
    assert cache.free_pages == 6
    cache.truncate(cache[handle], 4)
    assert cache.free_pages == 7
    cache.truncate(cache[handle], 0)
    assert cache.free_pages == 8
    cache.check_integrity()


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    cache = cache_of(4)
    first, second = cache.open(), cache.open()
    append(cache, first, [1.0] * 6)
    with pytest.raises(KVCacheFullError, match="2 free pages of 4 tokens, and 3 are needed"):
        cache.reserve([(cache[first], 3), (cache[second], 6)])
    assert (len(cache[first].pages), len(cache[second].pages), cache.free_pages) == (2, 0, 2)
    cache.reserve([(cache[first], 2), (cache[second], 8)])
    assert cache.free_pages == 0


def test_handles_are_not_used_again() -> None:
    cache = cache_of(4)
    first = cache.open()
    cache.close(first)
    assert cache.open() != first
    with pytest.raises(UsageError, match=f"sequence {first} is not open"):
        cache.close(first)


def share_the_last_page(cache: KVCache, seq: SequenceKV) -> None:
    cache._retained[seq.pages[-1]], cache._holders[seq.pages[-1]] = 1, 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda cache, seq: seq.pages.append(seq.pages[0]), "has 2 holders and counts 1"),
        (lambda cache, seq: seq.pages.pop(), "has 0 holders and counts 1"),
        (lambda cache, seq: cache._free.__setitem__(seq.pages[0], True), "wrongly marked"),
        (share_the_last_page, "shared page"),
        (lambda cache, seq: setattr(cache, "_num_free", 0), "counted wrongly"),
        (lambda cache, seq: setattr(seq, "length", 0), "needs"),
        (lambda cache, seq: seq.parents.__setitem__(1, 1), "has parent 1"),
        (lambda cache, seq: seq.depths.__setitem__(1, 0), "has depth 0"),
    ],
)
def test_the_integrity_check_sees(damage: object, message: str) -> None:
    cache = cache_of(8)
    handle = cache.open()
    append(cache, handle, [0.0] * 6)
    cache.commit(cache[handle], range(6))
    append(cache, handle, [0.0, 1.0])
    cache.check_integrity()
    assert callable(damage)
    damage(cache, cache[handle])
    with pytest.raises(AssertionError, match=message):
        cache.check_integrity()


def test_ancestry() -> None:
    seq = SequenceKV(parents=[-1, 0, 0, 2, -1], depths=[0, 1, 1, 2, 0])
    assert seq.ancestry(3) == [0, 2, 3]
    assert seq.ancestry(4) == [4]


def test_full_pages_are_shared_and_outlive_their_sequence() -> None:
    cache = cache_of(6)
    first = cache.open()
    append(cache, first, [float(i) for i in range(10)])
    cache.commit(cache[first], range(10))
    pages = cache.full_pages(cache[first])
    assert len(pages) == 2
    second = cache.open(pages)
    append(cache, second, [20.0])
    cache.commit(cache[second], [0])
    cache.check_integrity()
    assert contents(cache, second) == [*map(float, range(8)), 20.0]
    assert contents(cache, first) == [*map(float, range(10))]
    assert not cache.may_end_at(cache[second], 5)
    cache.retain(pages)
    cache.close(first)
    cache.close(second)
    cache.check_integrity()
    assert cache.free_pages == 4
    third = cache.open(pages[:1])
    assert contents(cache, third) == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(UsageError, match="not retained"):
        cache.release([pages[0], pages[0]])
    cache.release(pages)
    with pytest.raises(UsageError, match="not a full page"):
        cache.open(pages)
    cache.close(third)
    cache.check_integrity()
    assert cache.free_pages == 6
