"""p and q at the nodes of one sequence's tree, for the rules that compare them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from outrider.acceptance import formulas
from outrider.acceptance.base import Candidate

Tensor = torch.Tensor


class Distribution:
    """Probabilities over the vocabulary, worked out only once more than single tokens of them are looked at."""

    def __init__(self, compute: Callable[[], Tensor], logprobs: Tensor | None = None) -> None:
        self._compute = compute
        self._logprobs = logprobs

    @classmethod
    def from_logprobs(cls, logprobs: Tensor) -> Distribution:
        """``logprobs``: [V] float32."""
        return cls(lambda: logprobs.to(torch.float64, copy=True).exp_(), logprobs)

    @cached_property
    def probs(self) -> Tensor:
        """[V] float64."""
        return self._compute()

    def of(self, token: int) -> Tensor:
        """Probability (float64 scalar) of one token."""
        return self.probs[token] if self._logprobs is None else self._logprobs[token].double().exp()

    def without(self, token: int) -> Distribution:
        """What is left after ``token`` was drawn and not put back."""
        return Distribution(lambda: formulas.without(self.probs, torch.tensor(token)))

    def residual(self, q: Distribution) -> Distribution:
        """What the target still has to offer after a token drawn from q was rejected."""
        return Distribution(lambda: formulas.residual(self.probs, q.probs))


def target(candidate: Candidate, node: int, path: Sequence[int]) -> Distribution:
    """p after ``node`` (or ROOT), whose path holds the tokens ``path``. Raises NonFiniteLogitsError."""
    return Distribution.from_logprobs(candidate.sampling.logprobs(candidate.logits[node + 1], path))


def proposal(candidate: Candidate, node: int) -> Distribution | None:
    """q that the children of ``node`` (or ROOT) were drawn from; None if they were chosen, not drawn."""
    logprobs = candidate.tree.logprobs.get(node)
    return None if logprobs is None else Distribution.from_logprobs(logprobs)


def chosen(candidate: Candidate, token: int) -> Distribution:
    """The point mass that stands for q where a token was chosen."""
    return Distribution(lambda: formulas.point_mass(torch.tensor(token), candidate.logits.shape[-1]))
