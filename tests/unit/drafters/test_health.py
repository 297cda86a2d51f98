"""When a drafter is said to draft in vain, and in which words."""

from __future__ import annotations

import logging

import pytest

from outrider.core.tree import DraftTree
from outrider.drafters.health import AcceptanceWatch


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING)
    return caplog


def feed(watch: AcceptanceWatch, rounds: int, useful: int = 0) -> None:
    """So many drafts, the first ``useful`` of them right."""
    for number in range(rounds):
        watch.count("lost", useful=number < useful)


@pytest.mark.parametrize("patience", [16, 200])
def test_one_that_is_never_right_is_named_once_and_not_before_its_time(
    said: pytest.LogCaptureFixture, patience: int
) -> None:
    watch = AcceptanceWatch(patience, ", and sits out")
    feed(watch, patience - 1)
    assert not said.records
    feed(watch, 500)
    (record,) = said.records
    assert f"drafter 'lost' has not been right once in {patience} drafts, and sits out: " in record.getMessage()
    assert "weights may not belong to this target" in record.getMessage()


def test_one_that_is_hardly_ever_right_is_named_too(said: pytest.LogCaptureFixture) -> None:
    feed(AcceptanceWatch(200), 200, useful=5)
    assert not said.records
    feed(AcceptanceWatch(200), 200, useful=4)
    assert "drafter 'lost' was right in only 4 of 200 drafts: " in said.records[0].getMessage()


def test_each_who_proposed_a_tree_is_judged_by_its_own_nodes(said: pytest.LogCaptureFixture) -> None:
    watch = AcceptanceWatch(10)
    tree = DraftTree([5, 6], [-1, -1], [0.5, 0.5], sources=[("right", "both"), ("wrong",)])
    for _ in range(10):
        watch.observe(tree, [0])
    assert [record.getMessage().split("'")[1] for record in said.records] == ["wrong"]
