"""Llama 3's rotary scaling, which GGUF files hold as one factor a frequency."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.executors.torch.rope import rope_frequencies
from outrider.models.loader import load_model
from tests.support.models import random_model, write_gguf


def test_factors_in_a_gguf_give_the_frequencies_of_the_original(tmp_path: Path) -> None:
    model = random_model("llama3-rope", head_dim=64)
    loaded = load_model(str(write_gguf(model, tmp_path / "m.gguf")))
    assert loaded.config.rope_scaling is not None
    assert loaded.config.rope_scaling.kind == "factors"
    expected, _ = rope_frequencies(model.config)
    found, factor = rope_frequencies(loaded.config)
    assert factor == 1.0
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    plain, _ = rope_frequencies(random_model("llama", head_dim=64, rope_theta=5e5).config)
    assert (found / plain).min() < 0.2  # the scaling is there at all
