"""Walking down one sequence's draft tree."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.acceptance.base import Candidate, Verdict
from outrider.core.errors import NonFiniteLogitsError
from outrider.core.gumbel import gumbel_argmax
from outrider.core.tree import ROOT


def own_token(candidate: Candidate, node: int, path: Sequence[int]) -> int:
    """The token that the target itself puts after ``node``, whose path holds the tokens ``path``.

    It depends on the target's distribution, the seed and the position, and on nothing that was drafted.
    """
    sampling = candidate.sampling
    if sampling.params.greedy:
        return sampling.argmax_of_row(candidate.rows[node + 1], path)
    logprobs = sampling.logprobs(candidate.logits[node + 1], path)
    return gumbel_argmax(logprobs, sampling.seed, sampling.position + len(path))


def follow(candidate: Candidate) -> Verdict:
    """Go down the tree as long as a child holds the target's own token. Rows off this path are not read.

    Where nothing can follow (broken logits, or a mask that rules all out) the walk ends with the token before, so that
    the request fails where plain decoding would have it fail, with the same tokens. Raises NonFiniteLogitsError if that
    is the root.
    """
    tree = candidate.tree
    nodes: list[int] = []
    tokens: list[int] = []
    node: int | None = ROOT
    while node is not None:
        try:
            token = own_token(candidate, node, tokens)
        except NonFiniteLogitsError:
            if node == ROOT:
                raise
            return Verdict(tuple(nodes[:-1]), tokens[-1])
        node = tree.places.get((node, token))
        if node is not None:
            nodes.append(node)
            tokens.append(token)
    return Verdict(tuple(nodes), token)
