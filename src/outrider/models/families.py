"""Model families: a table of how each differs from the plain Llama block, as its configuration files spell it.

A family is added by one entry. Executors never see it: `outrider.models.config.ModelConfig` spells the differences out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

WindowRule = Callable[[Mapping[str, Any], int], tuple[bool, ...]]


def _every_layer(values: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    return (True,) * layers


def _from_max_window_layers(values: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    first = values.get("max_window_layers", 28)
    return tuple(layer >= first for layer in range(layers))


def _layers_without_rope(values: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    without = no_rope_layers(values, layers)
    return tuple(layer in without for layer in range(layers))


def no_rope_layers(values: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Layers without rotary embedding, from ``no_rope_layers`` (1: the layer has it) or every n-th layer."""
    flags = values.get("no_rope_layers")
    if flags is None:
        every = values.get("no_rope_layer_interval", 4)
        flags = [int((layer + 1) % every != 0) for layer in range(layers)]
    return tuple(layer for layer, rotary in enumerate(flags[:layers]) if not rotary)


@dataclass(frozen=True)
class Family:
    """Differences of one family.

    gguf_pairs: GGUF files hold the rows of q_proj and k_proj in the order of interleaved rotary pairs, which must be
        undone (llama.cpp's converter makes them so).
    qkv_bias: q, k and v have biases whatever the configuration says. bias_keys: configuration keys that add biases to
        attention ("attention_bias") or to the MLP ("mlp_bias").
    qk_norm: RMSNorm on queries and keys. nope: some layers skip the rotary embedding.
    window: which layers ``sliding_window`` is for; None: the family has no window. window_switch: the configuration
        key that must be true for the window to be used at all.
    defaults: values that transformers assumes for keys that config.json leaves out.
    """

    gguf_pairs: bool = False
    qkv_bias: bool = False
    bias_keys: tuple[str, ...] = ()
    qk_norm: bool = False
    nope: bool = False
    window: WindowRule | None = None
    window_switch: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: Mapping[str, Family] = {
    "llama": Family(gguf_pairs=True, bias_keys=("attention_bias", "mlp_bias")),
    "mistral": Family(gguf_pairs=True, window=_every_layer, defaults={"sliding_window": 4096}),
    "qwen2": Family(qkv_bias=True, window=_from_max_window_layers, window_switch="use_sliding_window"),
    "qwen3": Family(
        bias_keys=("attention_bias",),
        qk_norm=True,
        window=_from_max_window_layers,
        window_switch="use_sliding_window",
        defaults={"head_dim": 128},
    ),
    "smollm3": Family(
        gguf_pairs=True,
        bias_keys=("attention_bias", "mlp_bias"),
        nope=True,
        window=_layers_without_rope,
        window_switch="use_sliding_window",
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    ),
}
"""By ``model_type`` of config.json."""

SAME_BLOCKS: Mapping[str, str] = {"mimo": "qwen2"}
"""Model types that have another family's blocks. What they add, a module that predicts more tokens, is a drafter's."""


GGUF_FAMILIES: Mapping[str, str] = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3"}
"""Family by architecture of a GGUF file. A Mistral model calls itself llama there; only its window tells them apart."""
