"""Stop rules, token by token."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.errors import SamplingParamsError
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.engine.stops import OutputStream, _Beginning
from tests.support.fakes import EOS, VOCAB, WordTokenizer

TOKENIZER = WordTokenizer()


def stream(max_tokens: int = 100, **params: object) -> OutputStream:
    state = SamplingState(SamplingParams(**params), VOCAB, [5], [EOS])  # type: ignore[arg-type]
    return OutputStream(state, max_tokens, TOKENIZER)  # type: ignore[arg-type]


def feed(output: OutputStream, text: str) -> int:
    """Push characters until a rule stops them; returns how many were taken."""
    for taken, token in enumerate(TOKENIZER.encode(text), start=1):
        if not output.push(token):
            return taken
    return len(text)


def test_eos_ends_and_is_not_text() -> None:
    output = stream()
    feed(output, "ab")
    assert not output.push(EOS)
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", None)
    assert output.token_ids[-1] == EOS


def test_ignore_eos_goes_on() -> None:
    assert stream(ignore_eos=True).push(EOS)


def test_stop_token_is_named() -> None:
    output = stream(stop_token_ids=[7])
    assert not output.push(7)
    assert (output.finish_reason, output.stop_reason) == ("stop", 7)


def test_stop_string_across_tokens_is_cut() -> None:
    output = stream(stop=["cde"])
    assert feed(output, "abcdefg") == 5
    assert (output.text, output.stop_reason) == ("ab", "cde")


def test_stop_string_can_be_kept() -> None:
    output = stream(stop="cd", include_stop_str_in_output=True)
    feed(output, "abcdef")
    assert output.text == "abcd"


def test_first_stop_string_wins() -> None:
    output = stream(stop=["bcd", "bc"])
    feed(output, "abcd")
    assert (output.text, output.stop_reason) == ("a", "bc")


def test_length_and_stop_on_the_same_token_is_a_stop() -> None:
    output = stream(max_tokens=3, stop=["c"])
    assert feed(output, "abc") == 3
    assert (output.finish_reason, output.text) == ("stop", "ab")


def test_stop_before_length_wins() -> None:
    output = stream(max_tokens=2, stop=["c"])
    assert feed(output, "abc") == 2
    assert (output.finish_reason, output.text) == ("length", "ab")


def test_min_tokens_delays_stop_strings() -> None:
    output = stream(stop=["b"], min_tokens=3)
    assert feed(output, "abab") == 4
    assert output.text == "aba"


def test_a_stop_string_that_min_tokens_held_off_is_not_found_later() -> None:
    output = stream(stop=["ab", "much longer"], min_tokens=3)
    feed(output, "abcdef")
    assert (output.text, output.finish_reason) == ("abcdef", None)


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    output = stream(stop=["cde"])
    feed(output, "abcd")
    assert output.take_text() == "ab"
    feed(output, "x")
    assert output.take_text() == "cdx"


def test_abort_shows_what_was_held_back() -> None:
    output = stream(stop=["cde"])
    feed(output, "abcd")
    output.take_text()
    output.abort()
    assert (output.take_text(), output.finish_reason) == ("cd", "aborted")


def test_stop_string_without_a_tokenizer_is_refused() -> None:
    state = SamplingState(SamplingParams(stop="x"), VOCAB, [5], [EOS])
    with pytest.raises(SamplingParamsError, match="stop_token_ids"):
        OutputStream(state, 10, None)


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 30),
    st.booleans(),
)
def test_agrees_with_searching_the_whole_text(text: str, stops: list[str], max_tokens: int, keep: bool) -> None:
    """Pieces add up to the text, and the text is what a search over ever longer prefixes finds."""
    output = stream(max_tokens=max_tokens, stop=stops, include_stop_str_in_output=keep)
    pieces = ""
    for token in TOKENIZER.encode(text):
        goes_on = output.push(token)
        pieces += output.take_text()
        if not goes_on:
            break
    expected, reason = text[:max_tokens], "length" if len(text) >= max_tokens else None
    for end in range(1, min(len(text), max_tokens) + 1):
        hits = [(text[:end].find(s), s) for s in stops if s in text[:end]]
        if hits:
            at, stop = min(hits, key=lambda hit: hit[0])
            expected, reason = text[: at + len(stop) if keep else at], "stop"
            break
    assert output.finish_reason == reason
    assert output.text == expected
    if reason is not None:
        assert pieces == expected


@given(
    st.text("ab", min_size=1, max_size=12),
    st.lists(st.text("ab", max_size=6), max_size=12),
)
def test_the_beginning_of_a_stop_string_is_found_as_by_trying_every_length(stop: str, pieces: list[str]) -> None:
    beginning, text = _Beginning(stop), ""
    for piece in pieces:
        beginning.push(piece)
        text += piece
        lengths = (n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n]))
        assert beginning.length == next(lengths, 0)


def test_a_long_stop_string_costs_no_more_than_a_short_one() -> None:
    text, stop = "a" * 200_000, "a" * 100_000 + "b"
    beginning = _Beginning(stop)
    began = time.process_time()
    for start in range(0, len(text), 4):
        beginning.push(text[start : start + 4])
    assert beginning.length == 100_000
    assert time.process_time() - began < 2
