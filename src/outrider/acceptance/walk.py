"""Walking down one sequence's draft tree."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.acceptance.base import Candidate, Verdict
from outrider.core.gumbel import gumbel_argmax
from outrider.core.tree import ROOT


def own_token(candidate: Candidate, node: int, path: Sequence[int]) -> int:
    """The token that the target itself puts after ``node``, whose path holds the tokens ``path``.

    It depends on the target's distribution, the seed and the position, and on nothing that was drafted.
    """
    sampling = candidate.sampling
    logits = candidate.logits[node + 1]
    if sampling.params.greedy:
        return sampling.argmax(logits, path)
    return gumbel_argmax(sampling.logprobs(logits, path), sampling.seed, sampling.position + len(path))


def follow(candidate: Candidate) -> Verdict:
    """Go down the tree as long as a child holds the target's own token. Rows off this path are not read."""
    tree = candidate.tree
    child = {key: node for node, key in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    nodes: list[int] = []
    tokens: list[int] = []
    node: int | None = ROOT
    while node is not None:
        token = own_token(candidate, node, tokens)
        node = child.get((node, token))
        if node is not None:
            nodes.append(node)
            tokens.append(token)
    return Verdict(tuple(nodes), token)
