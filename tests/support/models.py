"""Small random models of every family, and writers that put them on disk in the formats the package reads."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.models.config import ModelConfig, RopeScaling, weight_shapes
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights

_BASE = ModelConfig(
    family="llama",
    vocab_size=128,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    max_position=512,
    tie_embeddings=False,
    eos_token_ids=(2,),
    bos_token_id=1,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_embeddings": True, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32, "hidden_size": 96},
    "llama-bias": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "llama-linear-rope": {"rope_scaling": RopeScaling("linear", 4.0)},
    "llama3-rope": {"rope_scaling": RopeScaling("llama3", 8.0, original_max_position=64), "rope_theta": 5e5},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "tie_embeddings": True},
    "qwen2-yarn": {
        "family": "qwen2",
        "qkv_bias": True,
        "rope_scaling": RopeScaling("yarn", 4.0, original_max_position=128),
    },
    "qwen2-window": {
        "family": "qwen2",
        "qkv_bias": True,
        "sliding_window": 12,
        "window_layers": (False, True, True),
    },
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 32},
    "mistral": {"family": "mistral"},
    "mistral-window": {"family": "mistral", "sliding_window": 12},
    "smollm3": {"family": "smollm3", "num_layers": 4, "no_rope_layers": (3,), "tie_embeddings": True},
}
"""Names that `random_model` takes: each family, and those of its features that change the mathematics."""


def random_model(variant: str = "llama", *, seed: int = 0, **overrides: Any) -> Model:
    """A model of a few layers with seeded weights, its logits spread by about 1 so that no token dominates.

    variant: a key of VARIANTS. overrides: fields of ModelConfig, on top of the variant's.
    """
    config = replace(_BASE, **(VARIANTS[variant] | overrides))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = 1 + 0.1 * noise
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = 0.15 * noise
        elif name.endswith("bias"):
            tensors[name] = 0.1 * noise
        else:
            tensors[name] = noise / math.sqrt(shape[1])
    return Model(f"random-{variant}", config, TensorWeights(tensors))


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json that Hugging Face transformers would have written for ``config``."""
    c = config
    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "smollm3": "SmolLM3"}
    values: dict[str, Any] = {
        "architectures": [f"{names[c.family]}ForCausalLM"],
        "model_type": c.family,
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.intermediate_size,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "max_position_embeddings": c.max_position,
        "tie_word_embeddings": c.tie_embeddings,
        "hidden_act": "silu",
        "bos_token_id": c.bos_token_id,
        "pad_token_id": None,
        "eos_token_id": list(c.eos_token_ids),
        "torch_dtype": "float32",
    }
    if c.family == "llama":
        values |= {"attention_bias": c.qkv_bias, "mlp_bias": c.mlp_bias}
    if c.family == "mistral":
        values["sliding_window"] = c.sliding_window
    if c.family in ("qwen2", "qwen3") and c.sliding_window is not None:
        first = c.window_layers.index(True)
        values |= {"use_sliding_window": True, "sliding_window": c.sliding_window, "max_window_layers": first}
    if c.family == "smollm3":
        values["no_rope_layers"] = [int(i not in c.no_rope_layers) for i in range(c.num_layers)]
    if c.rope_scaling is not None:
        values["rope_scaling"] = _hf_rope_scaling(c.rope_scaling)
    return values


def _hf_rope_scaling(scaling: RopeScaling) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        values["original_max_position_embeddings"] = scaling.original_max_position
    if scaling.kind == "llama3":
        values |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        values |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return values


def write_hf_folder(model: Model, path: Path, *, shards: int = 1) -> Path:
    """Write config.json and safetensors (``shards`` files with an index if more than one); returns ``path``."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(model.config), indent=1))
    tensors = {name: model.weights.tensor(name, torch.float32) for name in model.weights.names()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return path
    places: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(part, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"
    return f"{_GGUF_NAMES[stem]}.{kind}"


def _interleaved(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head from (first halves, second halves) to pairs, as GGUF files of Llama architecture hold them."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def llama3_factors(config: ModelConfig) -> np.ndarray[Any, Any]:
    """What each rotary frequency is divided by under ``llama3`` scaling: the tensor ``rope_freqs`` of a GGUF."""
    scaling = config.rope_scaling
    assert scaling is not None
    wavelengths = 2 * math.pi * config.rope_theta ** (np.arange(0, config.head_dim, 2) / config.head_dim)
    ratio = scaling.original_max_position / wavelengths
    smooth = (ratio - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    return np.asarray(1 / ((1 - smooth) / scaling.factor + smooth), dtype=np.float32)


def write_gguf(model: Model, path: Path, kind: str = "F32", *, metadata: dict[str, Any] | None = None) -> Path:
    """Write a GGUF file with the `gguf` package: matrices as ``kind`` (a type it can quantise to), the rest as F32.

    metadata: further string, bool, int, float or list fields, for tokenizers.
    """
    import gguf

    c = model.config
    arch = {"mistral": "llama"}.get(c.family, c.family)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(c.max_position)
    writer.add_embedding_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_heads)
    writer.add_head_count_kv(c.num_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_rope_dimension_count(c.head_dim)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    if c.bos_token_id is not None:
        writer.add_bos_token_id(c.bos_token_id)
    if c.eos_token_ids:
        writer.add_eos_token_id(c.eos_token_ids[0])
    if c.sliding_window is not None:
        writer.add_sliding_window(c.sliding_window)
    _add_rope_scaling(writer, c)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, *_gguf_types(value))
    target = gguf.GGMLQuantizationType[kind]
    for name in model.weights.names():
        values = model.weights.tensor(name, torch.float32).numpy()
        if arch in ("llama", "smollm3") and (".q_proj." in name or ".k_proj." in name):
            values = _interleaved(values, c.num_heads if ".q_proj." in name else c.num_kv_heads)
        if values.ndim == 2 and kind != "F32":
            writer.add_tensor(_gguf_name(name), gguf.quants.quantize(values, target), raw_dtype=target)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_rope_scaling(writer: Any, config: ModelConfig) -> None:
    import gguf

    scaling = config.rope_scaling
    if scaling is None:
        return
    if scaling.kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(config))
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling.kind))
    writer.add_rope_scaling_factor(scaling.factor)
    if scaling.original_max_position:
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position)


def _gguf_types(value: Any) -> tuple[Any, ...]:
    import gguf

    kinds = gguf.GGUFValueType
    if isinstance(value, list):
        return kinds.ARRAY, _gguf_types(value[0])[0]
    table = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    return (table[type(value)],)
