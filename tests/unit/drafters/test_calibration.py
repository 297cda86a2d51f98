"""From scores to acceptance probabilities."""

from __future__ import annotations

import random

import pytest

from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.calibration import Calibrator, follow

TREE = DraftTree([5, 6, 7, 8], [ROOT, 0, ROOT, 2], [0.9, 0.8, 0.7, 0.6])
"""5-6 and 7-8."""


def test_an_unknown_drafter_is_taken_at_its_word() -> None:
    calibrator = Calibrator()
    assert calibrator.probability("x", 0.35, 1, request=0) == 0.35
    assert calibrator.path_probabilities(TREE, request=0) == pytest.approx([0.9, 0.72, 0.7, 0.42])


def test_it_learns_what_a_score_is_worth() -> None:
    calibrator, chance = Calibrator(), random.Random(0)
    for _ in range(2000):
        calibrator.record("proud", 0.9, 1, 0, accepted=chance.random() < 0.3)
        calibrator.record("modest", 0.2, 1, 0, accepted=chance.random() < 0.8)
    assert calibrator.probability("proud", 0.9, 1, 0) == pytest.approx(0.3, abs=0.15)
    assert calibrator.probability("modest", 0.2, 1, 0) == pytest.approx(0.8, abs=0.15)
    # Other scores and depths are other questions.
    assert calibrator.probability("proud", 0.5, 1, 0) == 0.5
    assert calibrator.probability("proud", 0.9, 8, 0) == 0.9


def test_old_evidence_fades() -> None:
    calibrator = Calibrator()
    for accepted in [True] * 300 + [False] * 300:
        calibrator.record("x", 0.5, 1, 0, accepted)
    assert calibrator.probability("x", 0.5, 1, 0) < 0.05


def test_other_requests_are_the_prior_and_a_request_its_own_judge() -> None:
    calibrator = Calibrator()
    for _ in range(200):
        calibrator.record("x", 0.5, 1, request=1, accepted=True)
    assert calibrator.probability("x", 0.5, 1, request=2) > 0.9
    for _ in range(50):
        calibrator.record("x", 0.5, 1, request=2, accepted=False)
    assert calibrator.probability("x", 0.5, 1, request=2) < 0.3
    assert calibrator.probability("x", 0.5, 1, request=1) > 0.7


def test_forgetting_a_request_keeps_what_it_taught() -> None:
    calibrator = Calibrator()
    for _ in range(200):
        calibrator.record("x", 0.5, 1, request=1, accepted=True)
    calibrator.forget(1)
    calibrator.forget(1)
    assert not calibrator._requests
    assert calibrator.probability("x", 0.5, 1, request=1) > 0.9


def _recorded(monkeypatch: pytest.MonkeyPatch, calibrator: Calibrator) -> list[tuple[float, int, bool]]:
    calls: list[tuple[float, int, bool]] = []

    def record(source: str, score: float, depth: int, request: int, accepted: bool) -> None:
        calls.append((score, depth, accepted))

    monkeypatch.setattr(calibrator, "record", record)
    return calls


def test_only_nodes_with_an_accepted_parent_tell_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrator = Calibrator()
    calls = _recorded(monkeypatch, calibrator)
    calibrator.observe(TREE, [2], request=0)
    assert calls == [(0.9, 1, False), (0.7, 1, True), (0.6, 2, False)]


def test_what_was_committed_judges_nodes_that_were_never_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrator = Calibrator()
    calls = _recorded(monkeypatch, calibrator)
    calibrator.observe_committed(TREE, [5, 9], request=0)
    assert calls == [(0.9, 1, True), (0.8, 2, False), (0.7, 1, False)]
    # Where the text ended, nobody knows what would have come next.
    calls.clear()
    calibrator.observe_committed(TREE, [5], request=0)
    assert calls == [(0.9, 1, True), (0.7, 1, False)]


def test_agreement_is_a_source_of_its_own() -> None:
    tree = DraftTree([5, 6], [ROOT, ROOT], [0.5, 0.5], sources=[("a",), ("a", "b")])
    calibrator = Calibrator()
    for _ in range(100):
        calibrator.observe(tree, [1], request=0)
    alone, agreed = calibrator.path_probabilities(tree, request=0)
    assert alone < 0.1 < 0.9 < agreed


def test_probabilities_stay_probabilities() -> None:
    calibrator = Calibrator()
    for score in (0.0, 0.05, 0.5, 1.0):
        for accepted in (True, False):
            for _ in range(100):
                calibrator.record("x", score, 3, 0, accepted)
                assert 0.0 <= calibrator.probability("x", score, 3, 0) <= 1.0


def test_follow_goes_along_with_the_tokens() -> None:
    assert follow(TREE, [7, 8, 9]) == [2, 3]
    assert follow(TREE, [5, 8]) == [0]
    assert follow(TREE, [9]) == []
    assert follow(TREE, []) == []
