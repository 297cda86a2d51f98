"""The model: one block for every family, its differences read from `ModelConfig`."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.executors.shared import shared_tensors
from outrider.executors.torch.attention import SegmentPlan, attend
from outrider.executors.torch.embedding import Embedding
from outrider.executors.torch.fusion import Fuse, Normalise
from outrider.executors.torch.norm import Norm, keep
from outrider.executors.torch.products import MIN_ROWS, Linear
from outrider.executors.torch.rope import RotaryTable, rotate
from outrider.models.config import EMBEDDING, FINAL_NORM, OUTPUT, ModelConfig
from outrider.models.weights import Weights


@dataclass(frozen=True)
class Batch:
    """One forward pass over R rows.

    plans: one a sequence, in the order of its rows. logit_rows: which need logits. features: [R, H], if the model takes
    any.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    plans: Sequence[SegmentPlan]
    logit_rows: Sequence[int]
    features: torch.Tensor | None


@dataclass(frozen=True)
class Layer:
    """Weights of one block; q, k and v share one matrix, gate and up another.

    qk_norm: over [heads + kv_heads, head_dim], with the same weights for all heads of a kind.
    """

    attention_norm: Normalise
    qkv: Linear
    qk_norm: Normalise | None
    o: Linear
    mlp_norm: Normalise
    gate_up: Linear
    down: Linear
    rotary: bool
    windowed: bool


class TorchModel:
    """Weights on a device, and the forward pass over a batch of rows. Reads one tensor after another, each once.

    target: the model whose embedding and output matrix stand for those that ``weights`` lacks.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        max_context: int,
        target: TorchModel | None = None,
    ) -> None:
        self.config = config
        self._weights, self._dtype, self._device = weights, dtype, device
        shared = shared_tensors(config, weights, target.config) if target is not None else ()
        self._head = self._output(target, shared)
        self._norm = self._load_norm(FINAL_NORM) if config.final_norm else keep
        self._layers = [self._load_layer(i) for i in range(config.num_layers)]
        self._fuse = self._load_fuse() if config.fusion is not None else None
        self._embedding: Embedding
        if target is not None and EMBEDDING in shared:
            self._embedding = target._embedding
        else:
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
        x, seen = self._enter([*batch.tokens, *filler], batch.features)
        attended = x.new_zeros(len(x), self.config.num_heads, self.config.head_dim)
        hidden = {0: x[:rows]} if 0 in hidden_layers else {}
        for number, (layer, cache) in enumerate(zip(self._layers, kv.unbind(0), strict=True), start=1):
            self._attend(layer, seen if number == 1 else layer.attention_norm(x), angles, batch.plans, cache, attended)
            x = x + layer.o(attended.flatten(1))
            gate, up = layer.gate_up(layer.mlp_norm(x)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate).mul_(up))
            if number in hidden_layers:
                hidden[number] = x[:rows]
        return self._logits(x, batch.logit_rows), hidden

    def _enter(self, tokens: Sequence[int], features: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """The residual stream [len(tokens), H] before the first block, and what that block's attention reads."""
        embedded = self._embedding(tokens)
        norm = self._layers[0].attention_norm if self._layers else keep
        if self._fuse is None or features is None:
            return embedded, norm(embedded)
        features = F.pad(features, (0, 0, 0, len(tokens) - len(features)))
        return self._fuse(embedded, features.to(self._device, self._dtype), norm)

    def _logits(self, x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        if not rows:
            return x.new_empty(0, self.config.num_logits)
        chosen = torch.tensor([*rows, *[0] * (MIN_ROWS - len(rows))], device=self._device)
        return self._head(self._norm(x[chosen]))[: len(rows)]

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
            qk.copy_(layer.qk_norm(qk))
        if layer.rotary:
            qk.copy_(rotate(qk, *angles))
        queries, kv = qkv.tensor_split((c.num_heads,), dim=1)
        kv = kv.view(len(x), 2, c.num_kv_heads, c.head_dim).permute(1, 2, 0, 3)
        for plan in plans:
            cache[:, :, plan.written] = kv[:, :, plan.rows]
            mask = plan.window_mask if layer.windowed else plan.mask
            out[plan.rows] = attend(queries[plan.rows], *plan.gather(cache), mask, plan)

    def _load(self, *names: str) -> torch.Tensor:
        """The named tensors, one below the other."""
        parts = [self._weights.tensor(name, self._dtype).to(self._device) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _output(self, target: TorchModel | None, shared: Collection[str]) -> Linear:
        name = EMBEDDING if self.config.tie_embeddings else OUTPUT
        if target is None or name not in shared:
            return Linear(self._load(name))
        if name == OUTPUT or target.config.tie_embeddings:
            return target._head
        return Linear(target._load(EMBEDDING))

    def _load_norm(self, name: str) -> Norm:
        return Norm(self._load(name), self.config.rms_norm_eps)

    def _load_qk_norm(self, prefix: str) -> Norm:
        heads = (("q_norm", self.config.num_heads), ("k_norm", self.config.num_kv_heads))
        weights = [self._load(f"{prefix}.{name}.weight").expand(count, -1) for name, count in heads]
        return Norm(torch.cat(weights), self.config.rms_norm_eps)

    def _load_fuse(self) -> Fuse:
        fusion = self.config.fusion
        assert fusion is not None
        embed_norm = self._load_norm("model.embed_norm.weight") if fusion.norms else keep
        feature_norm = self._load_norm("model.feature_norm.weight") if fusion.norms else keep
        matrix = None
        if fusion.kind == "project":
            matrix = Linear(self._load("model.fuse.weight"), self._load("model.fuse.bias") if fusion.bias else None)
        return Fuse(embed_norm, feature_norm, matrix, fusion.norm_before_residual)

    def _load_linear(self, prefix: str, names: Sequence[str], bias: bool) -> Linear:
        weight = self._load(*(f"{prefix}.{name}.weight" for name in names))
        return Linear(weight, self._load(*(f"{prefix}.{name}.bias" for name in names)) if bias else None)

    def _load_layer(self, i: int) -> Layer:
        c, prefix = self.config, f"model.layers.{i}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        return Layer(
            attention_norm=self._load_norm(f"{prefix}.input_layernorm.weight") if i or c.first_norm else keep,
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
