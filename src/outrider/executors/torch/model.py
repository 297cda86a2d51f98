"""The model: one block for every family, its differences read from `ModelConfig`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.executors.torch.attention import SegmentPlan, attend
from outrider.executors.torch.embedding import Embedding
from outrider.executors.torch.products import MIN_ROWS, Linear
from outrider.executors.torch.rope import RotaryTable, rotate
from outrider.models.config import ModelConfig
from outrider.models.weights import Weights


@dataclass(frozen=True)
class Batch:
    """One forward pass over R rows. plans: one a sequence, in the order of its rows. logit_rows: which need logits."""

    tokens: Sequence[int]
    positions: Sequence[int]
    plans: Sequence[SegmentPlan]
    logit_rows: Sequence[int]


@dataclass(frozen=True)
class Layer:
    """Weights of one block; q, k and v share one matrix, gate and up another.

    Weights of norms are float32. qk_norm: [heads + kv_heads, head_dim], the same row for all heads of a kind.
    """

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    rotary: bool
    windowed: bool


class TorchModel:
    """Weights on a device, and the forward pass over a batch of rows. Reads one tensor after another, each once."""

    def __init__(
        self, config: ModelConfig, weights: Weights, dtype: torch.dtype, device: torch.device, max_context: int
    ) -> None:
        self.config = config
        self._weights, self._dtype, self._device = weights, dtype, device
        self._eps = torch.tensor(config.rms_norm_eps, device=device)
        self._head = Linear(self._load("model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"))
        self._norm = self._load_norm("model.norm.weight")
        self._layers = [self._load_layer(i) for i in range(config.num_layers)]
        self._embedding = Embedding(config, weights, dtype, device)
        self._rotary = RotaryTable(config, max_context, device)
        _return_freed_memory()

    def forward(
        self, batch: Batch, kv: torch.Tensor, hidden_layers: Sequence[int]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Logits [L, V], and the residual stream [R, H] after each of ``hidden_layers`` blocks, in the model's dtype.

        kv: [layers, 2, kv_heads, slots, head_dim]; the rows' keys and values are written to it. A batch of fewer than
        MIN_ROWS rows is filled up with rows that no other row sees and that are dropped again.
        """
        rows = len(batch.tokens)
        filler = [0] * (MIN_ROWS - rows)
        angles = self._rotary.at(torch.tensor([*batch.positions, *filler], device=self._device))
        x = self._embedding([*batch.tokens, *filler])
        attended = x.new_zeros(len(x), self.config.num_heads, self.config.head_dim)
        hidden = {0: x[:rows]} if 0 in hidden_layers else {}
        for number, (layer, cache) in enumerate(zip(self._layers, kv.unbind(0), strict=True), start=1):
            self._attend(layer, self._normalise(x, layer.attention_norm), angles, batch.plans, cache, attended)
            x = x + layer.o(attended.flatten(1))
            gate, up = layer.gate_up(self._normalise(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
            if number in hidden_layers:
                hidden[number] = x[:rows]
        return self._logits(x, batch.logit_rows), hidden

    def _logits(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        if not rows:
            return x.new_empty(0, self.config.vocab_size)
        chosen = torch.tensor([*rows, *[0] * (MIN_ROWS - len(rows))], device=self._device)
        return self._head(self._normalise(x[chosen], self._norm))[: len(rows)]

    def _attend(
        self,
        layer: Layer,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        plans: Sequence[SegmentPlan],
        cache: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attention of normalised rows x [R, H], written to out [R, heads, head_dim]; K and V go to the cache."""
        c = self.config
        qkv = layer.qkv(x).view(len(x), -1, c.head_dim)
        qk = qkv[:, : c.num_heads + c.num_kv_heads]
        if layer.qk_norm is not None:
            qk.copy_(self._normalise(qk, layer.qk_norm))
        if layer.rotary:
            qk.copy_(rotate(qk, *angles))
        queries, kv = qkv.tensor_split((c.num_heads,), dim=1)
        kv = kv.view(len(x), 2, c.num_kv_heads, c.head_dim).permute(1, 2, 0, 3)
        for plan in plans:
            cache[:, :, plan.written] = kv[:, :, plan.rows]
            mask = plan.window_mask if layer.windowed else plan.mask
            out[plan.rows] = attend(queries[plan.rows], *plan.gather(cache), mask, plan)

    def _normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich, 2019) over the last axis, in float32: x / sqrt(mean(x^2) + eps) * weight."""
        x32 = x.float()
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        return (x32 * scale).mul_(weight).to(x.dtype)

    def _load(self, *names: str) -> torch.Tensor:
        """The named tensors, one below the other."""
        parts = [self._weights.tensor(name, self._dtype).to(self._device) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _load_norm(self, name: str) -> torch.Tensor:
        return self._load(name).float()

    def _load_qk_norm(self, prefix: str) -> torch.Tensor:
        heads = (("q_norm", self.config.num_heads), ("k_norm", self.config.num_kv_heads))
        return torch.cat([self._load_norm(f"{prefix}.{name}.weight").expand(count, -1) for name, count in heads])

    def _load_linear(self, prefix: str, names: Sequence[str], bias: bool) -> Linear:
        weight = self._load(*(f"{prefix}.{name}.weight" for name in names))
        return Linear(weight, self._load(*(f"{prefix}.{name}.bias" for name in names)) if bias else None)

    def _load_layer(self, i: int) -> Layer:
        c, prefix = self.config, f"model.layers.{i}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            attention_norm=self._load_norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._load_linear(attention, ("q_proj", "k_proj", "v_proj"), c.qkv_bias),
            qk_norm=self._load_qk_norm(attention) if c.qk_norm else None,
            o=self._load_linear(attention, ("o_proj",), c.o_bias),
            mlp_norm=self._load_norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._load_linear(mlp, ("gate_proj", "up_proj"), c.mlp_bias),
            down=self._load_linear(mlp, ("down_proj",), c.mlp_bias),
            rotary=i not in c.no_rope_layers,
            windowed=c.window(i) is not None,
        )


def _return_freed_memory() -> None:
    """Hand what the C library has freed back to the system: 0.5 GB after the weights of a 1.5B model were read."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc alone
        if trim is not None:
            trim(0)
