"""What the engine has done since it was made, and what it is at: counters for whoever watches it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from outrider.core.tree import DraftTree


class DrafterCounts(TypedDict):
    """One drafter's part. A token that two drafters proposed counts for both.

    drafts: trees with a node of its own that were verified. draft_tokens: its nodes in them. accepted_tokens: those of
    them that were emitted; accepted_per_pos: these by depth.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: list[int]


NODE_BUCKETS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Upper bounds by which `PlanCounts` sorts rounds: draft nodes that were let in, of all requests together."""


@dataclass
class PlanCounts:
    """What was decided in the rounds with requests that could have been drafted for.

    speculative, declined, plain: rounds with draft nodes to verify; those whose nodes were all left out; and those in
        which nothing was proposed, since no drafter was asked or none had anything.
    requests: that could have been drafted for, summed over rounds. proposed, admitted: draft nodes that drafters came
        up with, and those of them that were let in: the rest did not pay, or found no room.
    by_nodes: rounds by nodes admitted, as many as `NODE_BUCKETS` has bounds and one for what is above.
    """

    speculative: int = 0
    declined: int = 0
    plain: int = 0
    requests: int = 0
    proposed: int = 0
    admitted: int = 0
    by_nodes: list[int] = field(default_factory=lambda: [0] * (len(NODE_BUCKETS) + 1))

    def count(self, requests: int, proposed: int, admitted: int) -> None:
        """One round's decision."""
        self.requests += requests
        self.proposed += proposed
        self.admitted += admitted
        self.by_nodes[bisect_left(NODE_BUCKETS, admitted)] += 1
        if admitted:
            self.speculative += 1
        elif proposed:
            self.declined += 1
        else:
            self.plain += 1


@dataclass
class EngineStats:
    """Counters only grow; the sums over all requests' `SpeculationStats` agree with them.

    running, waiting: requests now. kv_tokens_used, kv_tokens_total: KV memory of the target that requests hold now,
        and all there is, in tokens (whole pages). What only the prefix cache holds counts as free.
    prefix_cache_queries, prefix_cache_hits: prompt tokens that were looked for in the prefix cache, and found.
    preemptions: times that a request had to make way. prompt_tokens: of requests that were started.
    generation_tokens: emitted. rounds: passes over a batch, those with nothing but prompt chunks included.
    num_drafts, num_draft_tokens, num_accepted_tokens: draft trees verified, their nodes, and the nodes that were
        emitted; accepted_per_pos: the latter by depth (index 0: children of the root). by_drafter: the same by drafter.
    draft_seconds, verify_seconds, accept_seconds, engine_seconds: where rounds' time went, as in `SpeculationStats`.
    planner_budget: draft nodes that the planner let into the last round, of all requests together. plans: what was
        decided in all rounds so far.
    drafter_failures: rounds in which a drafter raised or broke its contract, counted once each, and requests that lost
        a part of their draft; failures_by_drafter: the same by drafter, a request counting for each that failed it.
    """

    running: int = 0
    waiting: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    by_drafter: dict[str, DrafterCounts] = field(default_factory=dict)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    engine_seconds: float = 0.0
    planner_budget: int = 0
    plans: PlanCounts = field(default_factory=PlanCounts)
    drafter_failures: int = 0
    failures_by_drafter: dict[str, int] = field(default_factory=dict)

    def count_started(self, prompt_tokens: int, queried: int, found: int) -> None:
        """A request was started for the first time."""
        self.prompt_tokens += prompt_tokens
        self.prefix_cache_queries += queried
        self.prefix_cache_hits += found

    def count_planned(self, requests: int, proposed: int, admitted: int) -> None:
        """A round was planned: for so many requests that could be drafted for, with so many draft nodes of them all."""
        self.planner_budget = admitted
        if requests:
            self.plans.count(requests, proposed, admitted)

    def count_emitted(self, tree: DraftTree, path: Sequence[int], emitted: int) -> None:
        """A request's part of a round: ``tree`` was verified, ``path`` accepted, and ``emitted`` tokens emitted."""
        self.generation_tokens += emitted
        accepted = path[:emitted]
        self.num_drafts += bool(tree.tokens)
        self.num_draft_tokens += len(tree)
        self.num_accepted_tokens += len(accepted)
        _count_depths(self.accepted_per_pos, range(len(accepted)))
        for source in dict.fromkeys(source for sources in tree.sources for source in sources):
            counts = self.by_drafter.setdefault(
                source, DrafterCounts(drafts=0, draft_tokens=0, accepted_tokens=0, accepted_per_pos=[])
            )
            depths = [depth for depth, node in enumerate(accepted) if source in tree.sources[node]]
            counts["drafts"] += 1
            counts["draft_tokens"] += sum(source in sources for sources in tree.sources)
            counts["accepted_tokens"] += len(depths)
            _count_depths(counts["accepted_per_pos"], depths)

    def add_times(self, *, draft: float, verify: float, accept: float, engine: float) -> None:
        """Add one round's seconds."""
        self.rounds += 1
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.accept_seconds += accept
        self.engine_seconds += engine


def _count_depths(counts: list[int], depths: Sequence[int]) -> None:
    """Add one to ``counts`` at each of ``depths``, which rise."""
    if depths:
        counts.extend([0] * (depths[-1] + 1 - len(counts)))
    for depth in depths:
        counts[depth] += 1
