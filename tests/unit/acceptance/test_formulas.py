"""The mathematics of acceptance, proved exactly on small vocabularies: sums over every outcome, no sampling."""

from __future__ import annotations

from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.acceptance import formulas

Tensor = torch.Tensor
EXACT = 1e-12


def dist(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def index(token: int) -> Tensor:
    return torch.tensor(token)


@st.composite
def distributions(draw: st.DrawFn, size: int = 4) -> Tensor:
    weights = draw(st.lists(st.sampled_from([0, 0, 1, 2, 3, 10, 1000]), min_size=size, max_size=size).filter(any))
    return dist(*weights) / sum(weights)


def one_draw(p: Tensor, q: Tensor) -> Tensor:
    """Law of the token that comes out when one token is drawn from q and judged."""
    law = torch.zeros_like(p)
    for x in range(len(p)):
        accepted = formulas.acceptance_probability(p[x], q[x])
        law[x] += q[x] * accepted
        law += q[x] * (1 - accepted) * formulas.residual(p, q)
    return law


class TestWorkedExamples:
    def test_two_tokens(self) -> None:
        p, q = dist(0.6, 0.4), dist(0.2, 0.8)
        assert formulas.acceptance_probability(p[1], q[1]) == 0.5
        assert formulas.residual(p, q).tolist() == [1, 0]
        assert torch.allclose(one_draw(p, q), p, atol=EXACT)

    def test_three_tokens(self) -> None:
        p, q = dist(0.2, 0.5, 0.3), dist(0.5, 0.3, 0.2)
        assert formulas.acceptance_probability(p[0], q[0]) == pytest.approx(0.4, abs=EXACT)
        assert torch.allclose(formulas.residual(p, q), dist(0, 2 / 3, 1 / 3), atol=EXACT)

    def test_the_paper_on_block_verification(self) -> None:
        """Sun et al., section 2: p = (1/3, 2/3), q = (2/3, 1/3) at both positions; 11/9 tokens kept, not 10/9."""
        p, q = dist(1 / 3, 2 / 3), dist(2 / 3, 1 / 3)
        kept = 0.0
        for x, y in product(range(2), repeat=2):
            first = formulas.block_weight(torch.tensor(1.0), p[x], q[x])
            second = formulas.block_weight(first, p[y], q[y])
            ends_at_one = (1 - second) * formulas.block_acceptance(first, p, q)
            kept += float(q[x] * q[y] * (2 * second + ends_at_one))
        assert kept == pytest.approx(11 / 9, abs=EXACT)


@settings(deadline=None)
@given(distributions(), distributions())
def test_one_draw_has_the_law_of_the_target(p: Tensor, q: Tensor) -> None:
    assert torch.allclose(one_draw(p, q), p, atol=EXACT)


@settings(deadline=None)
@given(distributions(), st.permutations(range(4)), st.integers(1, 3))
def test_chosen_tokens_leave_the_law_of_the_target(p: Tensor, order: list[int], k: int) -> None:
    law, reach, rest = torch.zeros_like(p), 1.0, p
    for x in order[:k]:
        point = formulas.point_mass(index(x), 4)
        accepted = formulas.acceptance_probability(rest[x], point[x])
        law[x] += reach * accepted
        reach, rest = reach * (1 - accepted), formulas.residual(rest, point)
    assert torch.allclose(law + reach * rest, p, atol=EXACT)


@settings(deadline=None)
@given(distributions(), distributions())
def test_two_draws_without_replacement_have_the_law_of_the_target(p: Tensor, q: Tensor) -> None:
    law = torch.zeros_like(p)
    for x, y in permutations(range(4), 2):
        left = formulas.without(q, index(x))
        drawn = q[x] * left[y]
        first = formulas.acceptance_probability(p[x], q[x])
        rest = formulas.residual(p, q)
        second = formulas.acceptance_probability(rest[y], left[y])
        law[x] += drawn * first
        law[y] += drawn * (1 - first) * second
        law += drawn * (1 - first) * (1 - second) * formulas.residual(rest, left)
    alone = q == 1
    if bool(alone.any()):  # q has one token only, so there is no second one to draw
        law = one_draw(p, q)
    assert torch.allclose(law, p, atol=EXACT)


@settings(deadline=None)
@given(
    distributions(3),
    distributions(3),
    st.lists(distributions(3), min_size=3, max_size=3),
    st.lists(distributions(3), min_size=3, max_size=3),
)
def test_a_block_of_two_has_the_law_of_the_target(p1: Tensor, q1: Tensor, p2: list[Tensor], q2: list[Tensor]) -> None:
    """Law of the first two tokens that come out, whatever part of the block is kept."""
    law = torch.zeros(3, 3, dtype=torch.float64)
    follow = torch.stack(p2)
    for x, y in product(range(3), repeat=2):
        drawn = q1[x] * q2[x][y]
        if not drawn:
            continue
        first = formulas.block_weight(torch.tensor(1.0, dtype=torch.float64), p1[x], q1[x])
        second = formulas.block_weight(first, p2[x][y], q2[x][y])
        one = (1 - second) * formulas.block_acceptance(first, p2[x], q2[x])
        none = 1 - second - one
        law[x, y] += drawn * second
        law[x] += (
            drawn * one * formulas.residual(first * p2[x], q2[x]) / _total(formulas.residual(first * p2[x], q2[x]))
        )
        law += drawn * none * formulas.residual(p1, q1).unsqueeze(1) * follow
    assert torch.allclose(law, p1.unsqueeze(1) * follow, atol=EXACT)


def _total(weights: Tensor) -> Tensor:
    return weights.sum().clamp(min=1e-300)


class TestEdges:
    def test_a_token_that_cannot_have_been_drawn_is_rejected(self) -> None:
        assert formulas.acceptance_probability(dist(0.5), dist(0.0)).item() == 0
        assert formulas.block_weight(dist(1.0), dist(0.5), dist(0.0)).item() == 0
        assert formulas.acceptance_probability(dist(0.0), dist(0.0)).item() == 0

    def test_equal_distributions_leave_p(self) -> None:
        p = dist(0.25, 0.75)
        assert torch.equal(formulas.residual(p, p), p)
        assert formulas.block_acceptance(torch.tensor(1.0), p, p) == 1

    def test_nothing_left_of_q(self) -> None:
        q = formulas.without(dist(0, 1.0, 0), index(1))
        assert q.tolist() == [0, 0, 0]
        assert formulas.residual(dist(0.5, 0.5, 0), q).tolist() == [0.5, 0.5, 0]

    def test_a_block_that_is_lost_stays_lost(self) -> None:
        assert formulas.block_acceptance(dist(0.0)[0], dist(0.5, 0.5), dist(1.0, 0)) == 0
        assert formulas.block_weight(dist(0.0), dist(1.0), dist(0.1)).item() == 0

    @pytest.mark.parametrize(
        ("u", "token"), [(0.0, 1), (0.249, 1), (0.25, 3), (0.999999, 3), (1 - 2**-24, 3), (1 - 2**-53, 3)]
    )
    def test_pick_falls_on_tokens_with_weight_only(self, u: float, token: int) -> None:
        assert formulas.pick(dist(0, 1, 0, 3, 0), torch.tensor(u, dtype=torch.float64)) == token

    def test_pick_never_runs_off_the_end(self) -> None:
        weights = torch.rand(200, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        weights[:, -3:] = 0
        picked = formulas.pick(weights, torch.full((200,), 1 - 2**-53, dtype=torch.float64))
        assert int(picked.max()) <= 996

    def test_typical_threshold(self) -> None:
        sure, unsure = dist(1.0, 0, 0, 0), dist(0.25, 0.25, 0.25, 0.25)
        assert formulas.typical_threshold(sure, 0.09, 0.3) == pytest.approx(0.09)
        assert formulas.typical_threshold(unsure, 0.09, 0.3) == pytest.approx(0.3 / 4)

    def test_leading_dimensions_do_not_mix(self) -> None:
        generator = torch.Generator().manual_seed(1)
        p, q = (torch.softmax(torch.randn(6, 5, generator=generator, dtype=torch.float64), -1) for _ in range(2))
        token, u = torch.randint(5, (6,), generator=generator), torch.rand(6, generator=generator, dtype=torch.float64)
        for i in range(6):
            assert torch.equal(formulas.residual(p, q)[i], formulas.residual(p[i], q[i]))
            assert torch.equal(formulas.without(q, token)[i], formulas.without(q[i], token[i]))
            assert torch.equal(formulas.point_mass(token, 5)[i], formulas.point_mass(token[i], 5))
            assert torch.equal(formulas.block_acceptance(u, p, q)[i], formulas.block_acceptance(u[i], p[i], q[i]))
            assert formulas.pick(p, u)[i] == formulas.pick(p[i], u[i])
