"""What is taken of a model's own texts, and what is not."""

from __future__ import annotations

import random

import pytest

from outrider.train.filters import ends_in_a_loop, fault, question_key, repeats_itself

RANDOM = random.Random(1).sample(range(1000), 400)


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        (RANDOM, "fine", None),
        ([], "", "empty"),
        (RANDOM[:9], " \n ", "empty"),
        (RANDOM[:3], "Hm.", "too short"),
        (RANDOM[:4], "Well, so it is.", None),
        (RANDOM[:9], "caf\ufffd", "broken characters"),
        (RANDOM + RANDOM[:10] * 4, "on and on", "repeats itself"),
        ([*RANDOM[:50], 1001] * 2 + [*RANDOM[:50], 1002] * 2, "verse and refrain", "repeats itself"),
    ],
)
def test_faults(tokens: list[int], text: str, expected: str | None) -> None:
    assert fault(tokens, text) == expected


@pytest.mark.parametrize("period", [1, 2, 7, 8, 33, 64])
def test_loops_of_any_period_are_found_at_the_end(period: int) -> None:
    turns = max(4, -(-32 // period))
    assert ends_in_a_loop(RANDOM[:30] + RANDOM[100 : 100 + period] * turns)
    assert not ends_in_a_loop(RANDOM[:30] + RANDOM[100 : 100 + period] * (turns - 1))
    assert not ends_in_a_loop([*RANDOM[:30], *RANDOM[100 : 100 + period] * turns, 1001])


def test_lists_and_code_are_no_repetition() -> None:
    lines = [token for i in range(40) for token in (1, 2, 3, i, 5)]
    assert not repeats_itself(lines)
    assert not ends_in_a_loop(lines)


def test_equal_questions_have_one_key() -> None:
    def key(*said: tuple[str, str]) -> str:
        return question_key([{"role": role, "content": text} for role, text in said])

    asked = key(("user", "What is it?"), ("assistant", "This."))
    assert asked == key(("system", "Be brief."), ("user", " what IS\nit"), ("assistant", "That."))
    assert asked != key(("user", "What is it?"), ("assistant", "This."), ("user", "Why?"))
    assert key(("user", "??")) != key(("user", "!!"))
