"""The transform from logits to log-probabilities, against a plain float64 version of its definition."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outrider.core.errors import NonFiniteLogitsError
from outrider.core.sampling import SamplingParams, SamplingState

V = 24
END = 3
NEAR = 1e-5


def row(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def reference(logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]):
    """Probabilities [V] by the definition, one step after another, or None if a threshold is too close to call."""
    x = np.array(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *output}:
        r = params.repetition_penalty
        x[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    x[list(params.banned_token_ids)] = -math.inf
    if len(output) < params.min_tokens:
        x[END] = -math.inf
    if params.temperature == 0:
        return np.eye(V)[int(x.argmax())]
    x = x / params.temperature
    if params.top_k:
        x[x < np.sort(x)[::-1][min(params.top_k, V) - 1]] = -math.inf
    probs = np.exp(x - x.max())
    probs /= probs.sum()
    if params.top_p < 1:
        ordered = np.sort(probs)[::-1]
        sums = ordered.cumsum()
        if np.abs(sums - params.top_p).min() < NEAR:
            return None
        probs[probs < ordered[int((sums >= params.top_p).argmax())] * (1 - 1e-12)] = 0
    if params.min_p > 0:
        if np.abs(probs / probs.max() - params.min_p).min() < NEAR and params.min_p < 1:
            return None
        probs[probs < params.min_p * probs.max() * (1 - 1e-12)] = 0
    return probs / probs.sum()


quarters = st.integers(-40, 40).map(lambda n: n / 4)
tokens = st.integers(0, V - 1)
histories = st.lists(tokens, max_size=8)
settings_drawn = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, V, 2 * V]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.25, 0.5, 2.0]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    logit_bias=st.dictionaries(tokens, quarters, max_size=3),
    banned_token_ids=st.lists(tokens, max_size=3),
    min_tokens=st.integers(0, 6),
)
logits_drawn = st.lists(st.one_of(quarters, st.just(-math.inf)), min_size=V, max_size=V)


@settings(max_examples=500, deadline=None)
@given(logits=logits_drawn, params=settings_drawn, prompt=histories, output=histories)
def test_the_transform_is_its_definition(logits, params, prompt, output) -> None:
    allowed = [
        x > -math.inf and i not in params.banned_token_ids and not (i == END and len(output) < params.min_tokens)
        for i, x in enumerate(logits)
    ]
    assume(any(allowed))
    expected = reference(logits, params, prompt, output)
    assume(expected is not None)
    state = SamplingState(params, V, prompt, end_ids=[END])
    for token in output:
        state.commit(token)
    got = state.logprobs(row(logits)).double().exp().numpy()
    assert set(np.flatnonzero(got)) == set(np.flatnonzero(expected))
    assert np.allclose(got, expected, atol=1e-6)
    assert got.sum() == pytest.approx(1, abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(quarters, min_size=V, max_size=V),
    params=settings_drawn,
    prompt=histories,
    output=histories,
    path=histories,
)
def test_a_path_counts_exactly_as_if_it_had_been_committed(logits, params, prompt, output, path) -> None:
    assume(len(set(params.banned_token_ids) | {END}) < V)
    drafted = SamplingState(params, V, prompt, end_ids=[END])
    plain = SamplingState(params, V, prompt, end_ids=[END])
    for token in output:
        drafted.commit(token)
        plain.commit(token)
    for token in path:
        plain.commit(token)
    values = row(logits)
    assert torch.equal(drafted.logprobs(values, path), plain.logprobs(values))
    assert drafted.argmax(values, path) == plain.argmax(values)
    assert torch.equal(drafted.adjusted(values, path), plain.adjusted(values))


def test_judging_a_path_records_nothing() -> None:
    params = SamplingParams(temperature=1, frequency_penalty=1, repetition_penalty=2, min_tokens=2)
    state = SamplingState(params, V, [1, 2], end_ids=[END])
    values = torch.arange(float(V))
    before = state.logprobs(values)
    state.logprobs(values, [5, 5, 6])
    assert torch.equal(state.logprobs(values), before)
    assert torch.equal(values, torch.arange(float(V)))
    assert (state.position, state.num_output_tokens) == (2, 0)


def test_position_counts_prompt_and_output() -> None:
    state = SamplingState(SamplingParams(), V, [1, 2, 3])
    assert state.position == 3
    state.commit(7)
    state.commit(7)
    assert (state.position, state.num_output_tokens) == (5, 2)


@pytest.mark.parametrize("size", [300, 20_000])
@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0, 40.0])
@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("top_k", [0, 7, 5000])
def test_large_vocabularies(size: int, spread: float, top_p: float, top_k: int) -> None:
    """The search for a threshold looks at ever more tokens until it is found; it must be found wherever it lies."""
    random = np.random.default_rng(size)
    x = (random.standard_normal(size) * spread).astype(np.float32)
    got = SamplingState(SamplingParams(temperature=1, top_p=top_p, top_k=top_k), size).logprobs(torch.from_numpy(x))
    wide = x.astype(np.float64)
    allowed = wide >= (np.sort(wide)[::-1][top_k - 1] if 0 < top_k < size else -math.inf)
    probs = np.where(allowed, np.exp(wide - wide.max()), 0)
    probs /= probs.sum()
    kept = np.flatnonzero(got.numpy() > -math.inf)
    inside = probs[kept].sum()
    assert inside >= top_p - NEAR
    least = probs[kept].min()
    assert inside - probs[probs == least].sum() < top_p + NEAR, "a smaller set would do"
    assert probs[kept].min() >= np.delete(probs, kept).max(initial=0), "not the most likely ones"


def test_ties_with_the_last_token_let_through_are_let_through() -> None:
    values = row([0.0, 3.0, 1.0, 1.0, 1.0, -2.0])
    for params in (SamplingParams(temperature=1, top_k=2), SamplingParams(temperature=1, top_p=0.75)):
        kept = SamplingState(params, 6).logprobs(values) > -math.inf
        assert kept.nonzero().flatten().tolist() == [1, 2, 3, 4]


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    values = row([0.0, 2.0, 2.0])
    state = SamplingState(SamplingParams(), 3)
    assert state.argmax(values) == 1
    assert state.logprobs(values).tolist() == [-math.inf, 0.0, -math.inf]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-45, 5e-324])
def test_the_coldest_temperatures_are_greedy_up_to_ties(temperature: float) -> None:
    state = SamplingState(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1), 4)
    assert state.logprobs(row([1.0, 3.0, 3.0, -math.inf])).exp().tolist() == [0, 0.5, 0.5, 0]


def test_the_hottest_temperature_is_uniform() -> None:
    state = SamplingState(SamplingParams(temperature=1e300), 4)
    assert torch.allclose(state.logprobs(row([1.0, 3.0, -9.0, -math.inf])).exp(), row([1 / 3, 1 / 3, 1 / 3, 0]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("more", [{}, {"banned_token_ids": [2]}, {"repetition_penalty": 1.5}, {"top_p": 0.5}])
def test_broken_logits_are_refused_wherever_they_are(temperature: float, broken: float, more: dict) -> None:
    """Also in a column that is ruled out: the model that returned it is broken, and other rows may be wrong unseen."""
    state = SamplingState(SamplingParams(temperature=temperature, **more), 4, [2])
    values = row([0.0, 1.0, broken, -math.inf])
    with pytest.raises(NonFiniteLogitsError, match="NaN or infinite"):
        state.logprobs(values)
    with pytest.raises(NonFiniteLogitsError, match="NaN or infinite"):
        state.argmax(values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_is_an_error(temperature: float) -> None:
    state = SamplingState(SamplingParams(temperature=temperature, banned_token_ids=[0, 1]), 3, end_ids=[2])
    assert state.argmax(row([1.0, 2.0, -5.0])) == 2
    state = SamplingState(
        SamplingParams(temperature=temperature, banned_token_ids=[0, 1], min_tokens=1), 3, end_ids=[2]
    )
    with pytest.raises(NonFiniteLogitsError, match="no token is left"):
        state.logprobs(row([1.0, 2.0, -5.0]))
    with pytest.raises(NonFiniteLogitsError):
        state.argmax(row([-math.inf] * 3))


def test_min_tokens_counts_tokens_on_the_path() -> None:
    state = SamplingState(SamplingParams(min_tokens=2, stop_token_ids=[5]), 6, [0], end_ids=[1])
    values = row([0, 9, 1, 0, 0, 8])
    assert state.argmax(values) == 2
    assert state.argmax(values, [4]) == 2
    assert state.argmax(values, [4, 4]) == 1
    state.commit(4)
    assert state.argmax(values) == 2
    assert state.argmax(values, [4]) == 1


def test_ignore_eos_leaves_the_end_token_alone() -> None:
    state = SamplingState(SamplingParams(min_tokens=5, ignore_eos=True), 3, end_ids=[1])
    assert state.argmax(row([0, 9, 1])) == 1


def test_argmax_of_the_raw_logits_is_claimed_only_where_it_holds() -> None:
    assert SamplingState(SamplingParams(top_k=5, top_p=0.5), 9).is_argmax
    for change in (
        {"temperature": 0.1},
        {"min_tokens": 1},
        {"logit_bias": {1: 1.0}},
        {"banned_token_ids": [1]},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
    ):
        assert not SamplingState(SamplingParams(**change), 9).is_argmax, change


@pytest.mark.parametrize("penalty", [1e300, 1e-300])
def test_penalties_beyond_float32_are_refused_or_saturate(penalty: float) -> None:
    state = SamplingState(SamplingParams(repetition_penalty=penalty), 3, [0, 1])
    if penalty > 1:
        assert state.argmax(row([9.0, 0.0, -1.0])) == 0
        assert state.argmax(row([-9.0, -1.0, -2.0])) == 2
    else:
        with pytest.raises(NonFiniteLogitsError, match="overflow"):
            state.argmax(row([9.0, 0.0, -1.0]))


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    for params in (
        SamplingParams(banned_token_ids=[8]),
        SamplingParams(logit_bias={8: 1.0}),
        SamplingParams(stop_token_ids=[8]),
    ):
        with pytest.raises(ValueError, match="vocabulary ends at 7"):
            SamplingState(params, 8)


def test_a_seed_is_drawn_once_and_told() -> None:
    states = [SamplingState(SamplingParams(), 4) for _ in range(8)]
    assert len({state.seed for state in states}) == 8
    assert all(0 <= state.seed < 2**64 for state in states)
    assert SamplingState(SamplingParams(seed=0), 4).seed == 0
