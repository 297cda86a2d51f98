"""Small random heads of every method, and the comparison of two of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from outrider.heads.eagle3 import usual_layers
from outrider.heads.head import FEATURES, Head
from outrider.models.config import EMBEDDING, OUTPUT, Fusion, ModelConfig, weight_shapes

TARGET = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=32,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position=256,
    tie_embeddings=True,
    eos_token_ids=(2,),
    bos_token_id=1,
)
"""The target of the heads here, unless they are made for another one."""

DRAFT_IDS = torch.tensor([0, 2, 3, 5, 7, 11, 13, 17, 40, 41, 95])
ACCURACIES = (0.75, 0.5)
RANKED = ((0.75, 0.125), (0.5, 0.25), (0.25, 0.125))
"""Of Medusa's heads, by rank."""

_MODELS: dict[str, dict[str, Any]] = {
    "eagle": {"fusion": Fusion("project", norms=False, bias=True), "first_norm": False, "final_norm": False},
    "eagle3": {"fusion": Fusion("attend"), "first_norm": False, "final_norm": True},
    "mtp": {"fusion": Fusion("project", norms=True), "first_norm": True, "final_norm": True},
}


def random_head(
    method: str,
    target: ModelConfig = TARGET,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    draft_ids: torch.Tensor | None = None,
    own_output: bool = False,
    own_embedding: bool = False,
    **changes: Any,
) -> Head:
    """A head with seeded weights. own_output, own_embedding: it has matrices of its own for them.

    changes: fields of its ModelConfig; for Medusa, ``num_heads`` and ``num_blocks``.
    """
    generator = torch.Generator().manual_seed(seed)
    if method == "medusa":
        return _random_medusa(target, generator, dtype, draft_ids, own_output, **changes)
    config = replace(
        target, num_layers=1, tie_embeddings=False, logits_size=None if draft_ids is None else len(draft_ids)
    )
    config = replace(config, **(_MODELS[method] | {"family": "llama"} | changes))
    shapes = dict(weight_shapes(config))
    if not own_output:
        del shapes[OUTPUT]
    if not own_embedding:
        del shapes[EMBEDDING]
    layers: tuple[int, ...] = (target.num_layers,)
    if method == "eagle3":
        layers = usual_layers(target.num_layers)
        shapes[FEATURES] = (config.hidden_size, len(layers) * target.hidden_size)
    return Head(
        method=method,
        hidden_size=target.hidden_size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        feature_layers=layers,
        normed=method != "eagle3",
        tensors={name: _random(name, shape, generator).to(dtype) for name, shape in shapes.items()},
        draft_ids=draft_ids,
        config=config,
        accept_by_depth=ACCURACIES,
    )


def _random_medusa(
    target: ModelConfig,
    generator: torch.Generator,
    dtype: torch.dtype,
    draft_ids: torch.Tensor | None,
    own_output: bool,
    num_heads: int = 3,
    num_blocks: int = 1,
) -> Head:
    size, columns = target.hidden_size, target.vocab_size if draft_ids is None else len(draft_ids)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            shapes[f"heads.{head}.blocks.{block}.weight"] = (size, size)
            shapes[f"heads.{head}.blocks.{block}.bias"] = (size,)
        if own_output:
            shapes[f"heads.{head}.output.weight"] = (columns, size)
    return Head(
        method="medusa",
        hidden_size=size,
        num_layers=target.num_layers,
        vocab_size=target.vocab_size,
        feature_layers=(target.num_layers,),
        normed=True,
        tensors={name: _random(name, shape, generator).to(dtype) for name, shape in shapes.items()},
        draft_ids=draft_ids,
        accept_by_depth=ACCURACIES,
    )


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        return 0.1 * noise if name.endswith("bias") else 1 + 0.1 * noise
    return noise / math.sqrt(shape[1])


def assert_same_head(found: Head, wanted: Head) -> None:
    """Every field but where it came from."""
    for name in (
        "method",
        "hidden_size",
        "num_layers",
        "vocab_size",
        "feature_layers",
        "normed",
        "config",
        "accept_by_depth",
        "accept_by_rank",
    ):
        assert getattr(found, name) == getattr(wanted, name), name
    assert (found.draft_ids is None) == (wanted.draft_ids is None)
    if found.draft_ids is not None and wanted.draft_ids is not None:
        assert found.draft_ids.tolist() == wanted.draft_ids.tolist()
    assert set(found.tensors) == set(wanted.tensors)
    for name, tensor in wanted.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(found.tensors[name], tensor), name
