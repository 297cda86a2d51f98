"""The state in which a new drafter starts: what it can take from the target, so that little data goes far."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from outrider.models.config import Fusion, ModelConfig
from outrider.train.modules.layers import Block
from outrider.train.modules.shape import Shape
from outrider.train.modules.target import Target

_SPREAD = 0.02
"""Standard deviation of what starts at random."""
_SELF_SCORE = 25.0
"""Score of a row's own key in the heads that start by looking at nothing else; others have some 5."""
_MODESTY = 0.7
"""Factor on the first logits: a guess by least squares is too sure of itself."""


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
    """Start from the target's block ``number``, but with nothing added to the residual stream yet.

    Where q, k and v read the embedding beside the feature, its half starts at random. Of a smaller MLP, the neurons
    with the largest outgoing weights are taken; one that is larger than the target's starts at random.
    """
    for layer in _linear_layers(block):
        layer.weight.normal_(std=_SPREAD)
    for name in ("q_proj", "k_proj", "v_proj"):
        wanted = target.layer(number, f"self_attn.{name}")
        getattr(block.self_attn, name).weight[:, -wanted.shape[1] :] = wanted
    block.post_attention_layernorm.weight.copy_(target.layer(number, "post_attention_layernorm"))
    down = target.layer(number, "mlp.down_proj")
    inner = block.mlp.down_proj.in_features
    if inner <= down.shape[1]:
        strongest = down.norm(dim=0).topk(inner).indices.sort().values
        block.mlp.gate_proj.weight.copy_(target.layer(number, "mlp.gate_proj")[strongest])
        block.mlp.up_proj.weight.copy_(target.layer(number, "mlp.up_proj")[strongest])
    block.self_attn.o_proj.weight.zero_()
    block.mlp.down_proj.weight.zero_()


@torch.no_grad()
def start_norm(norm: nn.Parameter, target: Target) -> None:
    """The final norm, ``norm``: the target's, for logits less sure than its own."""
    norm.copy_(_MODESTY * target.norm)


@torch.no_grad()
def start_projection(fuse: nn.Linear) -> None:
    """As long as no batch was seen, the feature goes through as it is."""
    size = fuse.out_features
    fuse.weight.normal_(std=_SPREAD)
    fuse.weight[:, size:] = torch.eye(size)
    if fuse.bias is not None:
        fuse.bias.zero_()


@torch.no_grad()
def pass_tokens(block: Block, config: ModelConfig, matrix: torch.Tensor, embeddings: torch.Tensor) -> None:
    """Let attention add ``matrix`` [H, H] times the row's own normed embedding to the residual stream.

    One head of every group looks at its own row, by a random projection of the embedding that it shares with the keys;
    values and the output matrix hold as much of ``matrix`` as fits through them. The other heads stay without effect:
    what they find by features, as in the target, is a token too. embeddings: [N, H], some normed ones.
    """
    c, a, size = config, block.self_attn, config.hidden_size
    group, d = c.num_heads // c.num_kv_heads, c.head_dim
    left, strength, right = torch.linalg.svd(matrix)
    width = min(c.num_kv_heads * d, size)
    outgoing = left[:, :width] * strength[:width].sqrt()
    a.v_proj.weight.zero_()
    a.v_proj.weight[:width, :size] = right[:width] * strength[:width, None].sqrt()
    common = torch.nn.functional.normalize(embeddings.mean(0), dim=0)
    for kv_head in range(c.num_kv_heads):
        keys = slice(kv_head * d, (kv_head + 1) * d)
        queries = slice(kv_head * group * d, (kv_head * group + 1) * d)
        looking = torch.randn(d, size) / size**0.5
        looking -= (looking @ common)[:, None] * common  # what all tokens have in common tells none from another
        seen = (embeddings @ looking.T).pow(2).sum(-1).mean()
        looking *= (_SELF_SCORE * d**0.5 / seen).sqrt()
        a.k_proj.weight[keys, :size] = looking
        a.q_proj.weight[queries, :size] = looking
        a.q_proj.weight[queries, size:] = 0.0
        columns = outgoing[:, keys.start : min(keys.stop, width)]
        a.o_proj.weight[:, queries.start : queries.start + columns.shape[1]] = columns


def _linear_layers(block: Block) -> Iterator[nn.Linear]:
    return (layer for layer in block.modules() if isinstance(layer, nn.Linear))
