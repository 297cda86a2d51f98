"""The state in which a new drafter starts: what it can take from the target, so that little data goes far."""

from __future__ import annotations

import torch
from torch import nn

from outrider.models.config import Fusion, ModelConfig
from outrider.train.modules.base import Shape
from outrider.train.modules.layers import Block
from outrider.train.modules.target import Target

_SPREAD = 0.02
"""Standard deviation of what starts at random."""


def drafter_config(
    target: ModelConfig,
    shape: Shape,
    draft_ids: torch.Tensor | None,
    fusion: Fusion,
    *,
    first_norm: bool,
    final_norm: bool,
) -> ModelConfig:
    """One block like the target's, without biases, norms of queries, windows and stretched positions."""
    return ModelConfig(
        family="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=shape.intermediate_size or target.intermediate_size,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position=target.max_position,
        tie_embeddings=False,
        eos_token_ids=target.eos_token_ids,
        bos_token_id=target.bos_token_id,
        fusion=fusion,
        logits_size=None if draft_ids is None else len(draft_ids),
        first_norm=first_norm,
        final_norm=final_norm,
    )


@torch.no_grad()
def start_block(block: Block, target: Target, number: int) -> None:
    """Start from the target's block ``number``.

    Where q, k and v read the embedding beside the feature, its half starts at random. Of a smaller MLP, the neurons
    with the largest outgoing weights are taken; one that is larger than the target's starts at random.
    """
    a = block.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        layer: nn.Linear = getattr(a, name)
        layer.weight.normal_(std=_SPREAD)
        wanted = target.layer(number, f"self_attn.{name}")
        layer.weight[:, -wanted.shape[1] :] = wanted
    a.o_proj.weight.copy_(target.layer(number, "self_attn.o_proj"))
    block.post_attention_layernorm.weight.copy_(target.layer(number, "post_attention_layernorm"))
    down = target.layer(number, "mlp.down_proj")
    inner = block.mlp.down_proj.in_features
    if inner <= down.shape[1]:
        strongest = down.norm(dim=0).topk(inner).indices.sort().values
        block.mlp.down_proj.weight.copy_(down[:, strongest])
        block.mlp.gate_proj.weight.copy_(target.layer(number, "mlp.gate_proj")[strongest])
        block.mlp.up_proj.weight.copy_(target.layer(number, "mlp.up_proj")[strongest])
    else:
        for layer in (block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj):
            layer.weight.normal_(std=_SPREAD)


@torch.no_grad()
def start_projection(fuse: nn.Linear) -> None:
    """Let the feature through as it is, and the embedding but faintly: the block starts near what the target has."""
    size = fuse.out_features
    fuse.weight.normal_(std=_SPREAD)
    fuse.weight[:, size:] = torch.eye(size)
    if fuse.bias is not None:
        fuse.bias.zero_()
