"""Checkpoints built by hand, under the names that other projects give to tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from outrider.models.config import ModelConfig

_GENERATOR = torch.Generator().manual_seed(11)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=_GENERATOR)


def ones(size: int) -> torch.Tensor:
    return torch.ones(size)


def block(prefix: str, target: ModelConfig, *, width: int | None = None, seen: int | None = None) -> dict[str, Any]:
    """Matrices of one Llama block, and the norm before its MLP. seen: columns of q, k and v."""
    width = width or target.hidden_size
    seen = seen or width
    q, kv = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    rows = {"q": q, "k": kv, "v": kv}
    return {
        **{f"{prefix}.self_attn.{name}_proj.weight": normal(size, seen) for name, size in rows.items()},
        f"{prefix}.self_attn.o_proj.weight": normal(width, q),
        f"{prefix}.mlp.gate_proj.weight": normal(target.intermediate_size, width),
        f"{prefix}.mlp.up_proj.weight": normal(target.intermediate_size, width),
        f"{prefix}.mlp.down_proj.weight": normal(width, target.intermediate_size),
        f"{prefix}.post_attention_layernorm.weight": ones(width),
    }


def write(
    folder: Path, values: Mapping[str, Any] | None, tensors: Mapping[str, torch.Tensor], file: str = "model.safetensors"
) -> Path:
    """config.json (unless ``values`` is None) and the tensors, as safetensors or, by its ending, a pickle."""
    if values is not None:
        (folder / "config.json").write_text(json.dumps(values))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(dict(tensors), folder / file)
    return folder


def config_values(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return values


def tensors_of(folder: Path, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / file)


def deepseek_module(prefix: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    size = config.hidden_size
    return {
        f"{prefix}.enorm.weight": ones(size),
        f"{prefix}.hnorm.weight": 2 * ones(size),
        f"{prefix}.eh_proj.weight": normal(size, 2 * size),
        f"{prefix}.input_layernorm.weight": ones(size),
        f"{prefix}.shared_head.norm.weight": ones(size),
        **block(prefix, config),
    }


def mimo_module(prefix: str, config: ModelConfig) -> dict[str, torch.Tensor]:
    size, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = {f"{prefix}.self_attn.{name}_proj.bias": normal(rows) for name, rows in (("q", q), ("k", kv), ("v", kv))}
    return {
        f"{prefix}.token_layernorm.weight": ones(size),
        f"{prefix}.hidden_layernorm.weight": 2 * ones(size),
        f"{prefix}.input_proj.weight": normal(size, 2 * size),
        f"{prefix}.input_layernorm.weight": ones(size),
        f"{prefix}.final_layernorm.weight": ones(size),
        **block(prefix, config),
        **biases,
    }


def carry(folder: Path, extra: dict[str, torch.Tensor], **values: Any) -> None:
    """Put modules into a target's own checkpoint."""
    file = folder / "model.safetensors"
    save_file(load_file(file) | extra, file)
    (folder / "config.json").write_text(json.dumps(config_values(folder) | values))
