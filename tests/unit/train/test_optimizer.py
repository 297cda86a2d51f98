"""How far parameters move: the learning rate over a run, and gradients that are cut to a length."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from outrider.train.config import TrainConfig
from outrider.train.optimizer import Optimizers

UPDATES = 200


def rates(updates: int, **changes: float) -> list[float]:
    config = TrainConfig(**changes)  # type: ignore[arg-type]
    return [config.rate(update, updates) for update in range(updates)]


def test_the_rate_rises_in_a_line_and_then_falls_by_a_cosine() -> None:
    found = rates(UPDATES, warm_up=0.1)
    assert found.index(max(found)) == 20
    assert max(found) == 1.0
    steps = [after - before for before, after in pairwise(found)]
    assert steps[:20] == pytest.approx([1 / 21] * 20)
    assert all(step < 0 for step in steps[20:])
    assert steps.index(min(steps)) == pytest.approx(20 + 90, abs=1)
    assert found[110] == pytest.approx(0.05 + 0.95 / 2)
    assert 0.05 <= found[-1] < 0.051


def test_without_a_warm_up_the_first_update_is_at_the_peak() -> None:
    found = rates(UPDATES, warm_up=0.0)
    assert found[0] == 1.0
    assert found == sorted(found, reverse=True)
    assert 0.05 <= found[-1] < 0.051


@pytest.mark.parametrize("warm_up", [0.0, 0.03, 0.9])
@pytest.mark.parametrize("updates", [1, 2, 3])
def test_few_updates_learn_something_too(updates: int, warm_up: float) -> None:
    assert all(0.05 <= rate <= 1.0 for rate in rates(updates, warm_up=warm_up))


class Weights(nn.Module):
    """A matrix, which Muon moves, and a vector, which AdamW moves."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(1)
            self.matrix = nn.Parameter(torch.randn(6, 4))
            self.vector = nn.Parameter(torch.randn(6))


def moved(*scales: float, clip: float) -> torch.Tensor:
    """Where the weights are after an update for each scale, by gradients of that norm in one direction or another."""
    weights = Weights()
    optimizers = Optimizers(weights)
    for number, scale in enumerate(scales):
        generator = torch.Generator().manual_seed(number)
        gradients = [torch.randn(parameter.shape, generator=generator) for parameter in weights.parameters()]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        for parameter, gradient in zip(weights.parameters(), gradients, strict=True):
            parameter.grad = gradient * (scale / norm)
        optimizers.step(0.01, clip)
        assert all(parameter.grad is None for parameter in weights.parameters())
    return torch.cat([parameter.detach().flatten() for parameter in weights.parameters()])


def test_a_gradient_is_cut_to_the_length_that_is_allowed() -> None:
    """In two updates, since the first of AdamW and all of Muon's go as far whatever the gradient's length is."""
    expected = moved(0.5, 0.1, clip=0.5)
    torch.testing.assert_close(moved(50.0, 0.1, clip=0.5), expected, rtol=1e-4, atol=1e-6)
    assert (moved(50.0, 0.1, clip=1e9) - expected).abs().max() > 1e-4


def test_a_shorter_gradient_stays_as_it_is() -> None:
    assert torch.equal(moved(0.4, 0.1, clip=0.5), moved(0.4, 0.1, clip=1e9))


class Decayed(nn.Module):
    """One parameter of each kind: a matrix inside, an output matrix, and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.vector = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6))
        self.lm_head = nn.Linear(4, 6, bias=False)
        nn.init.ones_(self.lm_head.weight)


def test_matrices_decay_and_vectors_do_not() -> None:
    weights = Decayed()
    optimizers = Optimizers(weights, weight_decay=0.5)
    for parameter in weights.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers.step(rate=0.1, clip=1.0)
    assert weights.inside.tolist() == [[pytest.approx(1 - 0.1 * 0.5)] * 4] * 6
    assert weights.lm_head.weight.tolist() == [[pytest.approx(1 - 0.15 * 0.1 * 0.5)] * 4] * 6
    assert weights.vector.tolist() == [1.0] * 6
