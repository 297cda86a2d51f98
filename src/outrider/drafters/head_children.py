"""From a learned drafter's guesses at several nodes to the nodes' children."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from outrider.core.noise import Stream, gumbel

if TYPE_CHECKING:
    from outrider.drafters.base import SequenceView
    from outrider.drafters.guesses import Guesses

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]


def children_of(view: SequenceView, guesses: Guesses, paths: Ids, width: int) -> tuple[Ids, Scores]:
    """For R nodes, which are equally deep, their children in the order of preference, [R, width], and their scores.

    paths: [R, L], the tokens between the last committed one and each node. A score of 0 marks a child that cannot be.
    """
    if view.sampling.is_argmax:
        return guesses.ids[:, :width], np.exp(guesses.logprobs[:, :width].astype(np.float64)).clip(max=1.0)
    if view.sampling.params.greedy:
        return _most_likely(view, guesses, paths, width)
    if view.noise_stream == Stream.TARGET:
        return _best_with_noise(view, guesses, paths, width)
    return _most_probable(view, guesses, paths, width)


def _most_likely(view: SequenceView, guesses: Guesses, paths: Ids, width: int) -> tuple[Ids, Scores]:
    """For greedy requests with bans, penalties and the like; each score is the drafter's probability."""
    norm = guesses.logits[:, :1] - guesses.logprobs[:, :1]
    adjusted = view.sampling.candidates.adjusted(guesses.ids, guesses.logits, paths)
    top = np.maximum(norm, adjusted.max(axis=1, keepdims=True))
    weights = np.exp((adjusted - top).astype(np.float64))
    others = np.maximum(1 - np.exp(guesses.logprobs.astype(np.float64)).sum(axis=1, keepdims=True), 0)
    return _first(guesses.ids, weights, weights.sum(axis=1, keepdims=True) + others * np.exp(norm - top), width)


def _best_with_noise(view: SequenceView, guesses: Guesses, paths: Ids, width: int) -> tuple[Ids, Scores]:
    """For requests that sample by shared noise: the largest of log q + G, the target's own noise at this position.

    A score is the softmax of log q + G over all candidates. The target adds the same G to log p, so that a token far
    ahead here is far ahead there too; only where two are close does it matter how p and q differ.
    """
    sampling = view.sampling
    logprobs = sampling.candidates.logprobs(guesses.ids, guesses.logits, paths)
    noise = gumbel(sampling.seed, sampling.position + paths.shape[1], guesses.ids, view.noise_stream)
    # exp(log q + G) of G = -log(-log u), which is bounded, cannot overflow.
    weights = np.exp(logprobs + noise)
    return _first(guesses.ids, weights, weights.sum(axis=1, keepdims=True), width)


def _most_probable(view: SequenceView, guesses: Guesses, paths: Ids, width: int) -> tuple[Ids, Scores]:
    """For rules that compare p with q, where children are chosen and not drawn: each is accepted with its p."""
    weights = np.exp(view.sampling.candidates.logprobs(guesses.ids, guesses.logits, paths).astype(np.float64))
    return _first(guesses.ids, weights, np.ones((len(guesses), 1)), width)


def _first(ids: Ids, weights: Scores, total: Scores, width: int) -> tuple[Ids, Scores]:
    """The ``width`` heaviest candidates of each node; their weights relative to ``total`` [R, 1]."""
    order = np.argsort(-weights, axis=1, kind="stable")[:, :width]
    scores = np.take_along_axis(weights, order, axis=1) / np.where(total > 0, total, 1)
    return np.take_along_axis(ids, order, axis=1), scores.clip(max=1.0)
