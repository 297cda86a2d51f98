"""Rotary position embedding (Su et al., "RoFormer", 2021) and the three ways to stretch it."""

from __future__ import annotations

import math

import torch

from outrider.core.errors import UnsupportedModelError
from outrider.models.config import ModelConfig, RopeScaling


class RotaryTable:
    """cos and sin of every position, in float32.

    cos, sin: [positions, head_dim], the angles of the first half of a head repeated for the second half; the first half
    of ``sin`` is negated, so that a rotation is ``x * cos + swap_halves(x) * sin``. YaRN's attention factor is part of
    both.
    """

    def __init__(self, config: ModelConfig, positions: int, device: torch.device) -> None:
        frequencies, factor = rope_frequencies(config)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the given positions [R], each [R, 1, head_dim]."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [R, heads, head_dim] by the angles of `RotaryTable.at`. Computed and returned in float32."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def rope_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair of dimensions [head_dim / 2], and the factor on cos and sin.

    Raises UnsupportedModelError for a scaling that is not known.
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    base = 1.0 / config.rope_theta ** (half / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return base, 1.0
    if scaling.kind == "linear":
        return base / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.kind == "yarn":
        factor = scaling.attention_factor
        return _yarn(base, scaling, config), 0.1 * math.log(scaling.factor) + 1.0 if factor is None else factor
    raise UnsupportedModelError(f"rope scaling {scaling.kind!r} is not supported (linear, llama3 and yarn are)")


def _llama3(base: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: slow frequencies are divided by the factor, fast ones kept, those between interpolated."""
    turns = scaling.original_max_position * base / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return base * keep + base / scaling.factor * (1 - keep)


def _yarn(base: torch.Tensor, scaling: RopeScaling, config: ModelConfig) -> torch.Tensor:
    """YaRN (Peng et al., 2023), section 3.2: a ramp over the dimensions, set by how often each one turns."""

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that turns this many times over the original context."""
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.head_dim - 1)
    ramp = (torch.arange(len(base), dtype=torch.float32) - low) / max(high - low, 1e-3)
    stretch = ramp.clamp(0, 1)
    return base * (1 - stretch) + base / scaling.factor * stretch
