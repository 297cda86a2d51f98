"""The sampling transform on candidates is that on whole rows, with all other tokens ruled out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.errors import NonFiniteLogitsError
from outrider.core.mask import TokenMask
from outrider.core.sampling import SamplingParams, SamplingState
from tests.unit.core.test_sampling import END, V, histories, quarters, settings_drawn, tokens

C = 9


class Parity(TokenMask):
    """Rules out tokens that are as odd as the path is long."""

    def forbidden(self, path: Sequence[int]) -> npt.NDArray[np.bool_]:
        return (np.arange(V) + len(path)) % 2 == 1

    def commit(self, token: int) -> None: ...


def states(params: SamplingParams, prompt: Sequence[int], output: Sequence[int], masked: bool) -> SamplingState:
    state = SamplingState(params, V, prompt, end_ids=[END], mask=Parity() if masked else None)
    for token in output:
        state.commit(token)
    return state


def expected(state: SamplingState, ids: Sequence[int], values: Sequence[float], path: Sequence[int]) -> np.ndarray:
    """Log-probabilities of the candidates by the transform of whole rows; -inf if none is left."""
    full = torch.full((V,), -math.inf)
    full[list(ids)] = torch.tensor(values)
    try:
        return state.logprobs(full, path).numpy()[list(ids)]
    except NonFiniteLogitsError:
        return np.full(len(ids), -math.inf, np.float32)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), params=settings_drawn, prompt=histories, output=histories, masked=st.booleans())
def test_candidates_are_treated_as_whole_rows_are(data, params, prompt, output, masked) -> None:
    rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4))
    ids = [data.draw(st.lists(tokens, min_size=C, max_size=C, unique=True)) for _ in range(rows)]
    values = [data.draw(st.lists(quarters, min_size=C, max_size=C)) for _ in range(rows)]
    paths = [data.draw(st.lists(tokens, min_size=length, max_size=length)) for _ in range(rows)]
    state = states(params, prompt, output, masked)
    got = state.candidates.logprobs(
        np.array(ids), np.array(values, np.float32), np.array(paths, np.int64).reshape(rows, length)
    )
    for row in range(rows):
        want = expected(state, ids[row], values[row], paths[row])
        assert np.array_equal(np.isfinite(got[row]), np.isfinite(want))
        assert np.allclose(np.exp(got[row]), np.exp(want), atol=1e-6)


@pytest.mark.parametrize(
    ("params", "reads"),
    [
        ({}, False),
        ({"temperature": 0.5, "top_p": 0.9, "min_tokens": 3, "logit_bias": {1: 2.0}}, False),
        ({"frequency_penalty": 0.1}, True),
        ({"repetition_penalty": 1.1}, True),
    ],
)
def test_it_tells_whether_a_paths_tokens_matter(params: dict[str, object], reads: bool) -> None:
    assert SamplingState(SamplingParams(**params), V).candidates.reads_paths is reads  # type: ignore[arg-type]


def test_a_mask_reads_paths() -> None:
    assert SamplingState(SamplingParams(), V, mask=Parity()).candidates.reads_paths


def test_what_is_committed_is_seen() -> None:
    """The table of counts is laid out once and kept up to date."""
    state = SamplingState(SamplingParams(presence_penalty=1.0, temperature=1.0), V)
    ids, logits, path = np.arange(4)[None], np.zeros((1, 4), np.float32), np.empty((1, 0), np.int64)
    for token in (None, 2, 2, 5, 0):
        if token is not None:
            state.commit(token)
        fresh = SamplingState(state.params, V)
        for earlier in state._history.ids.repeat(state._history.counts.astype(int)):
            fresh.commit(int(earlier))
        assert np.array_equal(
            state.candidates.logprobs(ids, logits, path), fresh.candidates.logprobs(ids, logits, path)
        )
    assert state.candidates.adjusted(ids, logits, path).tolist() == [[-1.0, 0.0, -1.0, 0.0]]


def test_arguments_are_left_alone() -> None:
    params = SamplingParams(temperature=0.5, top_k=2, repetition_penalty=2.0, banned_token_ids=[1], logit_bias={0: 1.0})
    state = SamplingState(params, V, [2])
    logits = np.array([[1.0, 2.0, 3.0]], np.float32)
    state.candidates.logprobs(np.arange(3)[None], logits, np.array([[0]]))
    assert logits.tolist() == [[1.0, 2.0, 3.0]]
