"""Rotary embedding: the properties that make it one. That scaled frequencies are right is held by the parity tests."""

from __future__ import annotations

import pytest
import torch

from outrider.core.errors import UnsupportedModelError
from outrider.executors.torch.rope import RotaryTable, rope_frequencies, rotate
from outrider.models.config import ModelConfig, RopeScaling
from tests.support.models import random_model

CPU = torch.device("cpu")


def config_of(**overrides: object) -> ModelConfig:
    return random_model("llama", **overrides).config


def rotated(x: torch.Tensor, position: int, config: ModelConfig) -> torch.Tensor:
    table = RotaryTable(config, 512, CPU)
    return rotate(x.view(1, 1, -1), *table.at(torch.tensor([position]))).view(-1)


def test_position_zero_is_left_alone() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(rotated(x, 0, config_of()), x)


def test_lengths_are_kept_and_products_depend_on_distance() -> None:
    q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(1))
    config = config_of()
    torch.testing.assert_close(rotated(q, 77, config).norm(), q.norm())
    products = [rotated(q, p + 5, config) @ rotated(k, p, config) for p in (0, 40, 300)]
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), atol=1e-4, rtol=0)
    assert abs(rotated(q, 6, config) @ rotated(k, 0, config) - products[0]) > 1e-2


def test_linear_scaling_stretches_positions() -> None:
    x = torch.randn(16, generator=torch.Generator().manual_seed(2))
    stretched = config_of(rope_scaling=RopeScaling("linear", 4.0))
    torch.testing.assert_close(rotated(x, 40, stretched), rotated(x, 10, config_of()))


def test_yarn_keeps_fast_dimensions_and_stretches_slow_ones() -> None:
    plain, _ = rope_frequencies(config_of())
    scaled, factor = rope_frequencies(config_of(rope_scaling=RopeScaling("yarn", 4.0, original_max_position=128)))
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 4)
    assert factor == pytest.approx(1.1386294)
    given = RopeScaling("yarn", 4.0, original_max_position=128, attention_factor=0.5)
    assert rope_frequencies(config_of(rope_scaling=given))[1] == 0.5


def test_unknown_scaling_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="rope scaling 'longrope' is not supported"):
        rope_frequencies(config_of(rope_scaling=RopeScaling("longrope", 2.0)))
