"""What a model is: its shape, and how its family differs from the plain Llama block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"


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
class Fusion:
    """How a row of a learned drafter takes in a feature, a hidden state of the target's, beside its token.

    kind: "project": the first block's input is one matrix times [embedding, feature] (EAGLE-1, MTP). "attend": the
    feature is the residual stream, and the first block's q, k and v read [norm(embedding), norm(feature)] (EAGLE-3).
    norms: RMSNorm on embedding and feature before they are joined; always with "attend". bias: of the matrix of
    "project". norm_before_residual: with "attend", the residual stream is norm(feature), as speculators has it.
    """

    kind: str
    norms: bool = True
    bias: bool = False
    norm_before_residual: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a decoder-only transformer with RMSNorm, rotary positions, grouped-query attention and SwiGLU.

    family: key in `outrider.models.families.FAMILIES`. The family's differences are spelled out here, so that an
    executor needs no family names: qkv_bias, o_bias, mlp_bias: linear layers with bias. qk_norm: RMSNorm over head_dim
    on queries and keys before the rotary embedding. sliding_window: a row sees this many latest positions (itself
    included) in the layers for which ``window_layers`` is true; None: all positions.
    no_rope_layers: layers that skip the rotary embedding (SmolLM3).

    For learned drafters. fusion: rows have a feature as well. logits_size: columns of the logits, if the output is
    over other tokens than the vocabulary. first_norm, final_norm: whether there is a norm before the first block's
    attention (never with fusion "attend", whose norms take its place) and one after the last block.
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
    fusion: Fusion | None = None
    logits_size: int | None = None
    first_norm: bool = True
    final_norm: bool = True

    def __post_init__(self) -> None:
        if self.fusion is not None and self.fusion.kind == "attend" and self.first_norm:
            raise ValueError("with fusion 'attend' the first block has no norm of its own; set first_norm=False")

    @property
    def num_logits(self) -> int:
        """Columns of the logits."""
        return self.logits_size if self.logits_size is not None else self.vocab_size

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, None for full attention."""
        if self.sliding_window is None or (self.window_layers and not self.window_layers[layer]):
            return None
        return self.sliding_window


def weight_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Every tensor that an executor needs, by its canonical name (Hugging Face's), with its shape."""
    c = config
    hidden, q, kv, inner = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (c.vocab_size, hidden)}
    shapes |= _fusion_shapes(c)
    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        if i or c.first_norm:
            shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        seen = 2 * hidden if i == 0 and c.fusion is not None and c.fusion.kind == "attend" else hidden
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, seen, c.qkv_bias),
            ("self_attn.k_proj", kv, seen, c.qkv_bias),
            ("self_attn.v_proj", kv, seen, c.qkv_bias),
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
    if c.final_norm:
        shapes[FINAL_NORM] = (hidden,)
    if not c.tie_embeddings:
        shapes[OUTPUT] = (c.num_logits, hidden)
    return shapes


def _fusion_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    hidden, fusion = config.hidden_size, config.fusion
    shapes: dict[str, tuple[int, ...]] = {}
    if fusion is not None and fusion.norms:
        shapes |= {"model.embed_norm.weight": (hidden,), "model.feature_norm.weight": (hidden,)}
    if fusion is not None and fusion.kind == "project":
        shapes["model.fuse.weight"] = (hidden, 2 * hidden)
        if fusion.bias:
            shapes["model.fuse.bias"] = (hidden,)
    return shapes
