"""The layers of a drafter under training. Parameters bear the canonical names of `outrider.models.config`.

Products are taken in the dtype that is asked for (bfloat16 runs on the units that executors use, at twice the speed or
more); the residual stream, norms and rotations in float32, as the executors have them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from outrider.models.config import ModelConfig


class Norm(nn.Module):
    """RMSNorm (Zhang and Sennrich, 2019) over the last axis, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self._eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


class ScaledLinear(nn.Linear):
    """A matrix whose columns are learned in units that fit their inputs: it stands for ``weight / scale``.

    Adam moves all elements by about as much, whatever they are multiplied with. Hidden states have dimensions a hundred
    times larger than others, which would make the product jump before the small ones come to matter.
    """

    scale: torch.Tensor

    def __init__(self, size_in: int, size_out: int, bias: bool) -> None:
        super().__init__(size_in, size_out, bias)
        self.register_buffer("scale", torch.ones(size_in))

    @torch.no_grad()
    def measure(self, x: torch.Tensor, size: float = 1.0) -> None:
        """Take the units from inputs x [R, in]; outputs are to be of about ``size``. What it stands for stays."""
        scale = x.float().pow(2).mean(0).sqrt().clamp(min=1e-3) / size
        self.weight *= scale / self.scale
        self.scale.copy_(scale)

    @torch.no_grad()
    def stand_for(self, matrix: torch.Tensor) -> None:
        """Let it stand for ``matrix`` [out, in]."""
        self.weight.copy_(matrix * self.scale)

    @property
    def matrix(self) -> torch.Tensor:
        """What it stands for, differentiable by ``weight``."""
        return self.weight / self.scale


class Attention(nn.Module):
    """The four matrices of attention. seen: size of the rows that q, k and v read."""

    def __init__(self, config: ModelConfig, seen: int) -> None:
        super().__init__()
        c = config
        self.q_proj = nn.Linear(seen, c.num_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(seen, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(seen, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = Norm(c.head_dim, c.rms_norm_eps)
            self.k_norm = Norm(c.head_dim, c.rms_norm_eps)


class MLP(nn.Module):
    """The three matrices of SwiGLU (Shazeer, "GLU variants improve transformer", 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)


class Block(nn.Module):
    """One decoder block."""

    def __init__(self, config: ModelConfig, seen: int) -> None:
        super().__init__()
        if config.first_norm:
            self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, seen)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)


class Core(nn.Module):
    """All of a drafter under ``model.`` in canonical names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c, fusion = config, config.fusion
        assert fusion is not None
        attend = fusion.kind == "attend"
        if fusion.norms:
            self.embed_norm = Norm(c.hidden_size, c.rms_norm_eps)
            self.feature_norm = Norm(c.hidden_size, c.rms_norm_eps)
        if not attend:
            self.fuse = ScaledLinear(2 * c.hidden_size, c.hidden_size, fusion.bias)
        self.layers = nn.ModuleList([Block(c, 2 * c.hidden_size if attend else c.hidden_size)])
        if c.final_norm:
            self.norm = Norm(c.hidden_size, c.rms_norm_eps)


@dataclass(frozen=True)
class Product:
    """A matrix [n, k] and a bias, in the dtype of products, cast once for all uses in a batch."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, dtype: torch.dtype, *layers: nn.Linear) -> Product:
        """The layers below one another: one large product is faster than several small ones."""
        parts = [layer.matrix if isinstance(layer, ScaledLinear) else layer.weight for layer in layers]
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers]).to(dtype)
        return cls(weight.to(dtype), bias)

    def split(self, columns: int) -> tuple[Product, Product]:
        """The product with the first ``columns`` of the input, which takes the bias, and the one with the others."""
        first, second = self.weight[:, :columns], self.weight[:, columns:]
        return Product(first.contiguous(), self.bias), Product(second.contiguous())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)
