"""A model's configuration and matrices, put together for the native forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from outrider import _native
from outrider.executors.torch.rope import rope_frequencies
from outrider.models.config import EMBEDDING, FINAL_NORM, OUTPUT, Fusion, ModelConfig

if TYPE_CHECKING:
    from outrider.models.weights import Weights

_MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def build_model(config: ModelConfig, matrices: Mapping[str, _native.PackedMatrix], weights: Weights) -> _native.Model:
    """matrices: packed, by canonical name. Norms and biases are read from ``weights``, as float32."""
    frequencies, factor = rope_frequencies(config)
    model = _native.Model(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        num_logits=config.num_logits,
        rms_norm_eps=config.rms_norm_eps,
        inverse_frequencies=np.ascontiguousarray(frequencies.numpy(), np.float32),
        rope_factor=factor,
    )
    embedding = matrices[EMBEDDING]
    model.set_embedding(embedding)
    model.set_lm_head(embedding if config.tie_embeddings else matrices[OUTPUT])
    if config.final_norm:
        model.set_final_norm(_vector(weights, FINAL_NORM))
    if config.fusion is not None:
        _set_fusion(model, config.fusion, matrices, weights)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        for short, name in _MATRICES.items():
            model.set_matrix(i, short, matrices[f"{layer}.{name}.weight"])
        for short, name in _vectors(config, i).items():
            model.set_vector(i, short, _vector(weights, f"{layer}.{name}"))
        model.set_layer(i, window=config.window(i) or 0, rope=i not in config.no_rope_layers)
    model.check()
    return model


def _set_fusion(
    model: _native.Model, fusion: Fusion, matrices: Mapping[str, _native.PackedMatrix], weights: Weights
) -> None:
    project = fusion.kind == "project"
    model.set_fusion(
        _native.FusionKind.project if project else _native.FusionKind.attend,
        embed_norm=_vector(weights, "model.embed_norm.weight") if fusion.norms else None,
        feature_norm=_vector(weights, "model.feature_norm.weight") if fusion.norms else None,
        matrix=matrices["model.fuse.weight"] if project else None,
        bias=_vector(weights, "model.fuse.bias") if project and fusion.bias else None,
        norm_before_residual=fusion.norm_before_residual,
    )


def _vectors(config: ModelConfig, layer: int) -> Mapping[str, str]:
    names = {"post_attention_norm": "post_attention_layernorm.weight"}
    if layer or config.first_norm:
        names["input_norm"] = "input_layernorm.weight"
    if config.qk_norm:
        names |= {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
    with_bias = "qkv" * config.qkv_bias + "o" * config.o_bias
    names |= {f"{part}_bias": f"self_attn.{part}_proj.bias" for part in with_bias}
    if config.mlp_bias:
        names |= {f"{part}_bias": f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")}
    return names


def _vector(weights: Weights, name: str) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(weights.tensor(name, torch.float32).numpy())
