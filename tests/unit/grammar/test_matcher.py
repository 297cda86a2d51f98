"""A request's place in its grammar: masks depend on the text alone, and asking about drafts leaves no trace."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import NoTokenLeftError
from outrider.core.sampling import SamplingParams
from outrider.core.structured import StructuredOutputs
from outrider.grammar import mask_for
from outrider.grammar.matcher import GrammarMask
from tests.support.fakes import EOS, VOCAB
from tests.support.grammars import CHOICE, NESTED, REGEX, allowed, compiler, constrained_model, ids, mask

ENDS = {"</s>"}


def test_a_mask_is_what_may_come_next() -> None:
    own = mask(CHOICE)
    assert allowed(own) == {"y", "n"}
    assert allowed(own, ids("ye")) == {"s"}
    assert allowed(own, ids("yes")) == {" ", *ENDS}
    for token in ids("none of the"):
        own.commit(token)
    assert allowed(own) == {"m"}
    own.commit(*ids("m"))
    assert allowed(own) == ENDS


def test_nothing_follows_what_is_not_allowed_or_over() -> None:
    own = mask(CHOICE)
    for path in (ids("x"), ids("yex"), ids("yexs"), [*ids("yes"), EOS], [*ids("no"), EOS, *ids("n")], [0], [1], [EOS]):
        assert allowed(own, path) is None
    assert allowed(own, ids("ye")) == {"s"}


def test_committing_what_is_not_allowed_is_an_error() -> None:
    own = mask(CHOICE)
    with pytest.raises(RuntimeError, match="against the request's grammar"):
        own.commit(*ids("x"))
    own.commit(*ids("y"))
    assert allowed(own) == {"e"}


def test_a_grammar_that_grows_ever_slower_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    own = mask(CHOICE)
    monkeypatch.setattr("outrider.grammar.matcher.time.thread_time", lambda: next(clock) * 0.6)
    assert allowed(own) == {"y", "n"}
    monkeypatch.setattr("outrider.grammar.matcher.time.thread_time", lambda: next(clock) * 1.2)
    own.commit(*ids("y"))  # never from here: it would end the whole round
    with pytest.raises(NoTokenLeftError, match="unnest its repetitions"):
        own.forbidden([])


def test_many_slow_tokens_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is quick enough for itself."""
    clock = iter(range(1000))
    monkeypatch.setattr("outrider.grammar.matcher.time.thread_time", lambda: next(clock) * 0.11)
    own = mask(CHOICE)
    for _ in range(10):
        assert allowed(own) == {"y", "n"}
    assert own.forbidden([]) is not None
    with pytest.raises(NoTokenLeftError, match=r"1\.1 s more"):
        own.forbidden([])
    monkeypatch.setattr("outrider.grammar.matcher.time.thread_time", lambda: next(clock) * 0.009)
    quick = mask(CHOICE)
    for _ in range(400):
        quick.forbidden([])


def test_a_control_token_among_the_stop_tokens_may_end_the_text() -> None:
    assert allowed(mask(CHOICE, [1]), ids("no")) == {"<s>", "n", *ENDS}
    assert allowed(mask(CHOICE, ids("o")), ids("n")) == {"o"}


def test_a_first_space_that_the_text_drops_is_asked_for() -> None:
    own = mask_for(constrained_model(strips_space=True), SamplingParams(structured_outputs=CHOICE))
    assert isinstance(own, GrammarMask)
    assert allowed(own) == {" "}
    assert allowed(own, ids(" ")) == {"y", "n"}


def random_paths(spec: StructuredOutputs, choose: random.Random, committed: list[int], count: int) -> list[list[int]]:
    """Paths below ``committed`` as a drafter may propose them: mostly allowed, some going wrong, all depths mixed."""
    paths: list[list[int]] = []
    for _ in range(count):
        guide = fresh(spec, committed)
        path: list[int] = []
        for _ in range(choose.randint(0, 6)):
            forbidden = guide.forbidden(path)
            able = list(range(VOCAB)) if forbidden is None else np.flatnonzero(~forbidden).tolist()
            path.append(choose.choice(able) if choose.random() < 0.85 else choose.randrange(VOCAB))
        paths.append(path)
    return paths


def fresh(spec: StructuredOutputs, committed: list[int]) -> GrammarMask:
    own = mask(spec)
    for token in committed:
        own.commit(token)
    return own


@settings(max_examples=40, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10_000), spec=st.sampled_from([REGEX, NESTED, CHOICE]))
def test_drafts_leave_no_trace(seed: int, spec: StructuredOutputs) -> None:
    """After any number of questions about any paths, every answer is that of a mask which was asked nothing before."""
    choose = random.Random(seed)
    own = mask(spec)
    committed: list[int] = []
    while EOS not in committed and len(committed) < 15:
        for path in random_paths(spec, choose, committed, 4):
            assert allowed(own, path) == allowed(fresh(spec, committed), path)
        able = np.flatnonzero(~own.forbidden([])).tolist()  # type: ignore[operator]
        committed.append(choose.choice(able))
        own.commit(committed[-1])


class Forgetful(GrammarMask):
    """A twin that goes back one token too few."""

    def _walk_to(self, path: object) -> bool:
        if len(self._path) > 1:
            self._matcher.rollback(len(self._path) - 1)
            del self._path[1:]
        return super()._walk_to([*self._path, *path][: len(path)])  # type: ignore[misc, arg-type]


def test_a_trace_would_be_found() -> None:
    own = Forgetful(compiler().compile(CHOICE), compiler().vocabulary)
    own.forbidden(ids("no"))
    assert allowed(own, ids("ye")) != allowed(mask(CHOICE), ids("ye"))
