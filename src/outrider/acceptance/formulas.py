"""The mathematics of the acceptance rules: pure functions of tensors, over the last dimension, any leading ones.

p is the target's distribution at a node, q the one that the node's children were drawn from. Tokens that were chosen
rather than drawn have a point mass for q. Distributions are [..., V], probabilities of one token [...]; float64 where
rounding could add up. Over a vocabulary of 150,000, fresh memory costs more than arithmetic: where it can, a function
makes one new [..., V] tensor and goes on in it.

Speculative sampling: Leviathan, Kalman, Matias (ICML 2023); Chen et al. (2023). Several children without replacement:
Jeon et al., "Recursive Speculative Decoding" (2024). Block verification: Sun et al. (2024). Typical acceptance: Cai et
al., "Medusa" (2024).
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def of(probs: Tensor, token: Tensor) -> Tensor:
    """Probability [...] of one token [...] in each distribution [..., V]."""
    return probs.gather(-1, token.unsqueeze(-1)).squeeze(-1)


def ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """p/q of one token [...]; 0 where q is 0, since such a token cannot have been drawn."""
    return torch.where(q_x > 0, p_x / q_x, torch.zeros_like(p_x))


def acceptance_probability(p_x: Tensor, q_x: Tensor) -> Tensor:
    """min(1, p/q) of the drafted token [...]."""
    return ratio(p_x, q_x).clamp(max=1)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+) [..., V], where the next token comes from when a token drawn from q was rejected.

    p may carry any positive weight. Where nothing is left, p and q are equal up to rounding, and p itself is returned.
    """
    excess = (p - q).clamp_(min=0)
    total = excess.sum(-1, keepdim=True)
    nothing = total <= 0
    excess /= total.masked_fill(nothing, 1)
    return torch.where(nothing, p, excess) if bool(nothing.any()) else excess


def without(q: Tensor, token: Tensor) -> Tensor:
    """q [..., V] after ``token`` [...] was drawn and not put back; all zeros if nothing else had any mass."""
    rest = q.scatter(-1, token.unsqueeze(-1), 0.0)
    total = rest.sum(-1, keepdim=True)
    rest /= total.masked_fill(total <= 0, 1)
    return rest


def point_mass(token: Tensor, vocab_size: int) -> Tensor:
    """The distribution [..., V] (float64) of a token [...] that was chosen and not drawn."""
    mass = torch.zeros(*token.shape, vocab_size, dtype=torch.float64, device=token.device)
    return mass.scatter_(-1, token.unsqueeze(-1), 1.0)


def pick(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF: the token [...] that u [...] in [0, 1) falls on; weights [..., V] need not add up to 1.

    A token without weight is never picked.
    """
    cumulative = weights.cumsum(-1)
    mark = u.unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, mark, right=True).squeeze(-1)


def block_weight(previous: Tensor, p_x: Tensor, q_x: Tensor) -> Tensor:
    """Probability [...] that block verification keeps a prefix, from the one of the prefix without its last token."""
    return (previous * ratio(p_x, q_x)).clamp(max=1)


def block_acceptance(weight: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """Probability [...] that a block ends with this prefix, given that no longer one was kept (h_i in the paper).

    weight: [...], `block_weight` of the prefix. p, q: [..., V], what follows the prefix.
    """
    excess = (weight.unsqueeze(-1) * p).sub_(q).clamp_(min=0).sum(-1)
    total = excess + 1 - weight
    return torch.where(total > 0, excess / total, torch.ones_like(total))


def typical_threshold(p: Tensor, threshold: float, alpha: float) -> Tensor:
    """Least probability [...] of a token that typical acceptance keeps: min(threshold, alpha * exp(-entropy of p))."""
    entropy = -torch.special.xlogy(p, p).sum(-1)
    return (alpha * torch.exp(-entropy)).clamp(max=threshold)
