"""How often heads' candidates have been right."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.drafters.head_accuracy import HeadAccuracy

SCORES = np.array([0.65, 0.25, 0.05])


def test_a_head_is_taken_at_its_word_at_first() -> None:
    assert HeadAccuracy(1, 2, 3).chances(0, 1, SCORES).tolist() == pytest.approx(SCORES.tolist())


def test_what_was_stated_comes_before_that() -> None:
    accuracy = HeadAccuracy(2, 2, 3, {0: [[0.5, 0.1], [0.4, 0.3, 0.2, 0.1]]})
    assert accuracy.chances(0, 0, SCORES).tolist() == pytest.approx([0.5, 0.1, 0.05])
    assert accuracy.chances(0, 1, SCORES).tolist() == pytest.approx([0.4, 0.3, 0.2])
    assert accuracy.chances(1, 1, SCORES).tolist() == pytest.approx(SCORES.tolist())
    for _ in range(4):
        accuracy.record(0, 1, SCORES, np.array([True, False, False]))
    first, second, third = accuracy.chances(0, 1, SCORES)
    assert first == pytest.approx((4 * 0.4 + 4) / 8, rel=0.01)
    assert (second, third) == pytest.approx((4 * 0.3 / 8, 4 * 0.2 / 8), rel=0.01)


def test_what_was_right_is_learned_by_kind_head_rank_and_score() -> None:
    accuracy = HeadAccuracy(2, 2, 3)
    for _ in range(400):
        accuracy.record(0, 1, SCORES, np.array([False, True, False]))
    first, second, third = accuracy.chances(0, 1, SCORES)
    assert first < 0.02 < 0.98 < second
    assert third < 0.01
    for kind, head in ((0, 0), (1, 1)):
        assert accuracy.chances(kind, head, SCORES).tolist() == pytest.approx(SCORES.tolist())
    unsure = np.array([0.45, 0.35])
    assert accuracy.chances(0, 1, unsure).tolist() == pytest.approx(unsure.tolist())


def test_old_evidence_fades() -> None:
    accuracy = HeadAccuracy(1, 1, 1)
    for right in [True] * 1000 + [False] * 300:
        accuracy.record(0, 0, SCORES[:1], np.array([right]))
    assert accuracy.chances(0, 0, SCORES[:1])[0] < 0.3
