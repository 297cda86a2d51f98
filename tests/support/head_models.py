"""Small random models of learned drafters: one of each way to take in a feature."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from outrider.models.config import Fusion
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from tests.support.models import random_model

HEADS: dict[str, dict[str, Any]] = {
    "eagle": {"fusion": Fusion("project", norms=False, bias=True), "first_norm": False, "final_norm": False},
    "eagle3": {"fusion": Fusion("attend"), "first_norm": False, "logits_size": 48},
    "mtp": {"fusion": Fusion("project")},
    "norm-first": {"fusion": Fusion("attend", norm_before_residual=True), "first_norm": False},
    "two-blocks": {"fusion": Fusion("attend"), "first_norm": False, "num_layers": 2, "qkv_bias": True},
}
"""The methods' models, EAGLE-3's with the other residual stream, and with a block behind the one that takes in the
feature."""


def head_model(kind: str, *, seed: int = 0, without: Collection[str] = (), **overrides: Any) -> Model:
    """A model of a key of HEADS; see `random_model`. without: tensors that its weights lack."""
    model = random_model("llama", seed=seed, **({"num_layers": 1} | HEADS[kind] | overrides))
    kept = {name: model.weights.tensor(name, torch.float32) for name in model.weights.names() if name not in without}
    return replace(model, name=kind, weights=TensorWeights(kept))


def features(rows: int, size: int, seed: int = 1) -> torch.Tensor:
    """Random features [rows, size]."""
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
