"""From a draft model's logits at a node to the node's children."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.core import transform
from outrider.core.gumbel import gumbel_top_k
from outrider.core.noise import Stream, gumbel

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from outrider.drafters.base import SequenceView

_RIVALS = 3
"""Candidates beyond the children that a child is weighed against."""


@dataclass(frozen=True)
class Children:
    """Distinct tokens in the order of preference, with their scores.

    logprobs: [V], the distribution that they were drawn from, where the acceptance rule needs to know it.
    """

    tokens: Sequence[int]
    scores: Sequence[float]
    logprobs: torch.Tensor | None = None


def are_drawn(view: SequenceView) -> bool:
    """Whether children must be drawn from q, q told, and none left out for what it is: rules that compare p with q."""
    return view.noise_stream != Stream.TARGET and not view.sampling.params.greedy


def most_likely(view: SequenceView, logits: torch.Tensor, path: Sequence[int], k: int) -> Children:
    """For greedy requests: the k best tokens; each score is the draft model's probability."""
    logits = view.sampling.adjusted(logits, path)
    values, tokens = logits.topk(min(k, len(logits)))
    # In NumPy, on one thread: PyTorch would wake its own for it, which then get in the way of an executor's.
    logprobs = transform.log_softmax(logits.numpy() - values[0].numpy())
    scores = np.exp(logprobs[tokens.numpy()]).clip(max=1.0).tolist()
    kept = [(token, score) for token, score in zip(tokens.tolist(), scores, strict=True) if score > 0]
    return Children([token for token, _ in kept], [score for _, score in kept])


def best_with_noise(view: SequenceView, logits: torch.Tensor, path: Sequence[int], k: int) -> Children:
    """For requests that sample by shared noise: the k largest of log q + G, the target's own noise at this position.

    A score is the softmax of log q + G over the children and a few rivals. The target adds the same G to log p, so that
    a token far ahead here is far ahead there too; only where two are close does it matter how p and q differ.
    """
    tokens, logprobs = _draw(view, logits, path, k + _RIVALS)
    noise = gumbel(view.sampling.seed, view.sampling.position + len(path), tokens, view.noise_stream)
    perturbed = [float(logprobs[token]) + float(g) for token, g in zip(tokens, noise, strict=True)]
    weights = [math.exp(value - perturbed[0]) for value in perturbed]
    total = sum(weights)
    return Children(tokens[:k], [weight / total for weight in weights[:k]])


def drawn(view: SequenceView, logits: torch.Tensor, path: Sequence[int], k: int) -> Children:
    """For rules that compare p with q: k draws without replacement, with the distribution they came from.

    Scores are rough: what q holds likely, p rarely holds impossible; and each further child is only tried if the ones
    before it were rejected.
    """
    tokens, logprobs = _draw(view, logits, path, k)
    scores = [(0.5 + 0.5 * math.exp(min(0.0, float(logprobs[t])))) * 0.5**i for i, t in enumerate(tokens)]
    return Children(tokens, scores, logprobs)


def _draw(view: SequenceView, logits: torch.Tensor, path: Sequence[int], k: int) -> tuple[list[int], torch.Tensor]:
    logprobs = view.sampling.logprobs(logits, path)
    position = view.sampling.position + len(path)
    return gumbel_top_k(logprobs, k, view.sampling.seed, position, view.noise_stream), logprobs
