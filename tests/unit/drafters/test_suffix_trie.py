"""The suffix trie against counting by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.suffix_trie import SuffixTrie

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=25), min_size=1, max_size=4)


def _build(texts: Sequence[Sequence[int]], depth: int, *, open_last: bool = False) -> SuffixTrie:
    trie = SuffixTrie(depth)
    for number, text in enumerate(texts):
        for token in text:
            trie.append(token)
        if not (open_last and number == len(texts) - 1):
            trie.end_text()
    return trie


def _followers(texts: Sequence[Sequence[int]], context: tuple[int, ...]) -> Counter[int]:
    """What follows ``context`` in the texts, counted the slow way; never across a border."""
    n = len(context)
    return Counter(text[at + n] for text in texts for at in range(len(text) - n) if tuple(text[at : at + n]) == context)


def _check(trie: SuffixTrie, texts: Sequence[Sequence[int]], depth: int, context: Sequence[int]) -> None:
    known = [n for n in range(1, min(len(context), depth - 1) + 1) if _followers(texts, tuple(context[-n:]))]
    found = trie.find(context)
    if not known:
        assert found is None
        return
    assert found is not None
    cursor, length = found
    assert length == max(known)
    expected = _followers(texts, tuple(context[-length:]))
    assert Counter({token: count for token, count, _ in trie.followers(cursor)}) == expected
    assert trie.followed(cursor) == expected.total()


@given(TEXTS, st.integers(2, 6), st.booleans(), st.lists(st.integers(0, 2), max_size=8))
def test_counts_are_those_of_the_texts(texts: list[list[int]], depth: int, open_last: bool, context: list[int]) -> None:
    trie = _build(texts, depth, open_last=open_last)
    assert trie.num_tokens == sum(map(len, texts))
    _check(trie, texts, depth, context)
    for text in texts:
        _check(trie, texts, depth, text)


@given(TEXTS, st.integers(2, 6), st.integers(1, 4), st.lists(st.integers(0, 2), max_size=8))
def test_forgetting_takes_back_what_a_text_added(
    texts: list[list[int]], depth: int, forgotten: int, context: list[int]
) -> None:
    trie = _build(texts, depth)
    left = texts[min(forgotten, len(texts)) :]
    for _ in range(len(texts) - len(left)):
        trie.forget_oldest()
    assert (trie.num_texts, trie.num_tokens) == (len(left), sum(map(len, left)))
    for query in (context, *texts):
        _check(trie, left, depth, query)
    for text in texts:
        for token in text:
            trie.append(token)
        trie.end_text()
    for query in (context, *texts):
        _check(trie, [*left, *texts], depth, query)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.lists(st.integers(0, 2), max_size=6))
def test_a_leaf_can_be_followed_to_the_end_of_its_text_and_no_further(text: list[int], context: list[int]) -> None:
    trie = _build([text, [0, 1, 2]], depth=4)
    found = trie.find(context)
    steps = 0
    while found is not None:
        followers = list(trie.followers(found[0]))
        if len(followers) != 1:
            break
        found = followers[0][2], 0
        steps += 1
    assert steps <= max(len(text), 3)


def test_forgetting_everything_leaves_nothing() -> None:
    trie = _build([[1, 2, 1, 2, 1], [2, 1, 2]], depth=4)
    trie.forget_oldest()
    trie.forget_oldest()
    assert trie.find([1, 2]) is None
    assert trie.find([1]) is None
