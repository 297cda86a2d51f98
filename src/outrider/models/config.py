"""What a model is: its shape, and how its family differs from the plain Llama block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies.

    kind: "linear", "llama3" or "yarn", the other fields as in Hugging Face; or "factors": frequency i is divided by
    ``factors[i]`` (head_dim / 2 of them), which is how GGUF files spell llama3 scaling (tensor ``rope_freqs.weight``).
    """

    kind: str
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    factors: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

    family: key in `outrider.models.families.FAMILIES`. The family's differences are spelled out here, so that an
    executor needs no family names: qkv_bias, o_bias, mlp_bias: linear layers with bias. qk_norm: RMSNorm over head_dim
    on queries and keys before the rotary embedding. sliding_window: a row sees this many latest positions (itself
    included) in the layers for which ``window_layers`` is true; None: all positions.
    no_rope_layers: layers that skip the rotary embedding (SmolLM3).
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position: int
    tie_embeddings: bool
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] = ()
    no_rope_layers: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, None for full attention."""
        if self.sliding_window is None or (self.window_layers and not self.window_layers[layer]):
            return None
        return self.sliding_window


def weight_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor that an executor needs, by its canonical name (Hugging Face's), with its shape."""
    c = config
    hidden, q, kv, inner = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, hidden)}
    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, hidden, c.qkv_bias),
            ("self_attn.k_proj", kv, hidden, c.qkv_bias),
            ("self_attn.v_proj", kv, hidden, c.qkv_bias),
            ("self_attn.o_proj", hidden, q, c.o_bias),
            ("mlp.gate_proj", inner, hidden, c.mlp_bias),
            ("mlp.up_proj", inner, hidden, c.mlp_bias),
            ("mlp.down_proj", hidden, inner, c.mlp_bias),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        if c.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (c.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (c.head_dim,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not c.tie_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, hidden)
    return shapes
