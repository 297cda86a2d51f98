"""What the engine has done since it was made, and what it is at: counters for whoever watches it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from outrider.core.tree import DraftTree


class DrafterCounts(TypedDict):
    """One drafter's part. A token that two drafters proposed counts for both.

    drafts: trees with a node of its own that were verified. draft_tokens: its nodes in them. accepted_tokens: those of
    them that were emitted.
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int


@dataclass
class EngineStats:
    """Counters only grow; the sums over all requests' `SpeculationStats` agree with them.

    running, waiting: requests now. kv_tokens_used, kv_tokens_total: KV memory that requests hold now, and all there is,
        in tokens (whole pages). What only the prefix cache holds counts as free.
    prefix_cache_queries, prefix_cache_hits: prompt tokens that were looked for in the prefix cache, and found.
    preemptions: times that a request had to make way. prompt_tokens: of requests that were started.
    generation_tokens: emitted. rounds: passes over a batch, those with nothing but prompt chunks included.
    num_drafts, num_draft_tokens, num_accepted_tokens: draft trees verified, their nodes, and the nodes that were
        emitted; accepted_per_pos: the latter by depth (index 0: children of the root). by_drafter: the same by drafter.
    draft_seconds, verify_seconds, accept_seconds, engine_seconds: where rounds' time went, as in `SpeculationStats`.
    planner_budget: draft nodes that the planner let into the last round, of all requests together.
    drafter_failures: rounds in which a drafter raised or broke its contract, counted once each.
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
    drafter_failures: int = 0

    def count_started(self, prompt_tokens: int, queried: int, found: int) -> None:
        """A request was started for the first time."""
        self.prompt_tokens += prompt_tokens
        self.prefix_cache_queries += queried
        self.prefix_cache_hits += found

    def count_emitted(self, tree: DraftTree, path: Sequence[int], emitted: int) -> None:
        """A request's part of a round: ``tree`` was verified, ``path`` accepted, and ``emitted`` tokens emitted."""
        self.generation_tokens += emitted
        accepted = path[:emitted]
        self.num_drafts += bool(tree.tokens)
        self.num_draft_tokens += len(tree)
        self.num_accepted_tokens += len(accepted)
        self.accepted_per_pos.extend([0] * (len(accepted) - len(self.accepted_per_pos)))
        for depth in range(len(accepted)):
            self.accepted_per_pos[depth] += 1
        for source in dict.fromkeys(source for sources in tree.sources for source in sources):
            counts = self.by_drafter.setdefault(source, DrafterCounts(drafts=0, draft_tokens=0, accepted_tokens=0))
            counts["drafts"] += 1
            counts["draft_tokens"] += sum(source in sources for sources in tree.sources)
            counts["accepted_tokens"] += sum(source in tree.sources[node] for node in accepted)

    def add_times(self, *, draft: float, verify: float, accept: float, engine: float) -> None:
        """Add one round's seconds."""
        self.rounds += 1
        self.draft_seconds += draft
        self.verify_seconds += verify
        self.accept_seconds += accept
        self.engine_seconds += engine
