"""Several drafters for the same round: their trees are merged, and the best nodes of all are kept."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from outrider.core.errors import DraftError
from outrider.core.tenants import TenantStore
from outrider.core.tree import ROOT, DraftTree, merge
from outrider.drafters.base import Budget, Drafter, Observation, SequenceView, Wants
from outrider.drafters.calibration import Calibrator, path_products
from outrider.drafters.costly import CostlyMember

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Proposal:
    """What was proposed for one request in this round: each member's own tree, and all of them merged."""

    members: tuple[DraftTree, ...]
    merged: DraftTree


@dataclass(frozen=True)
class _Calibrators:
    """One tenant's. members: each drafter's own scores. merged: the merged tree's nodes, by all who proposed them."""

    members: Calibrator = field(default_factory=Calibrator)
    merged: Calibrator = field(default_factory=Calibrator)

    def forget(self, request: int) -> None:
        self.members.forget(request)
        self.merged.forget(request)


class Cascade(Drafter):
    """Every member may use the whole budget; the merged tree is cut to it by calibrated path probability.

    The scores of the tree that comes out are calibrated, which makes those of different members comparable.
    A member that runs a model is asked after those that only look things up, and where it promises to pay beside them.
    A member that raises sits the round out; ``failures`` counts how often, by name. Only if all of them fail does the
    cascade itself raise.
    """

    def __init__(self, members: Sequence[Drafter], width: int | None = None) -> None:
        """``width``: children per node at most, as each member takes it from its configuration."""
        self.members = tuple(members)
        self.name = "+".join(member.name for member in members)
        self.default_tokens = max(member.default_tokens for member in members)
        self.wants = _wants_of(members)
        self._width = width
        self._lookups = [member for member in self.members if not member.needs_model]
        self._costly = [CostlyMember(member) for member in self.members if member.needs_model]
        self.minds_price = bool(self._costly)
        self.failures: Counter[str] = Counter()
        self._untold: defaultdict[str, set[int]] = defaultdict(set)
        self._calibrators: TenantStore[_Calibrators] = TenantStore(_Calibrators)
        self._proposals: dict[int, _Proposal] = {}
        self._views: dict[int, SequenceView] = {}

    def open(self, view: SequenceView) -> None:
        self._views[view.request_id] = view
        for member in (*self._lookups, *(costly.drafter for costly in self._costly if costly.is_awake(view))):
            self._attempt(member, [view], partial(member.open, view))
        self._want()

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        proposed = [trees for member in self._lookups if (trees := self._member_trees(member, views, budget))]
        if self._costly:
            looked_up = {view.request_id: [trees[i] for trees in proposed] for i, view in enumerate(views)}
            for costly in self._costly:
                ask = partial(self._member_trees, costly.drafter)
                trees = costly.propose(views, budget, lambda view: self._merged(view, looked_up[view.request_id]), ask)
                if trees is not None:
                    proposed.append(trees)
        if views and not proposed:
            raise DraftError(f"every drafter of {self.name} failed in this round; the log says how")
        return [self._combine(view, [trees[i] for trees in proposed], budget) for i, view in enumerate(views)]

    def observe(self, observations: Sequence[Observation]) -> None:
        for observation in observations:
            proposal = self._proposals.pop(observation.view.request_id, None)
            if proposal is not None:
                self._learn(observation, proposal)
        for member in self._lookups:
            self._attempt(member, [o.view for o in observations], partial(member.observe, observations))
        for costly in self._costly:
            self._tell(costly, observations)
        self._want()

    def _tell(self, costly: CostlyMember, observations: Sequence[Observation]) -> None:
        """Tell a member of the requests that it follows."""
        layers = costly.drafter.wants.hidden_layers
        told = [o for o in observations if costly.is_awake(o.view) and all(layer in o.hidden for layer in layers)]
        if told:
            self._attempt(costly.drafter, [o.view for o in told], partial(costly.drafter.observe, told))
        for view in costly.learn(observations):
            self._attempt(costly.drafter, [], partial(costly.drafter.pause, view))

    def _want(self) -> None:
        """Want what the members want that follow any request."""
        awake = [c.drafter for c in self._costly if any(map(c.is_awake, self._views.values()))]
        self.wants = _wants_of([*self._lookups, *awake])

    def pause(self, view: SequenceView) -> None:
        for member in self.members:
            self._attempt(member, [view], partial(member.pause, view))

    def close(self, view: SequenceView) -> None:
        self._views.pop(view.request_id, None)
        self._proposals.pop(view.request_id, None)
        self._calibrators.get(view.tenant).forget(view.request_id)
        for costly in self._costly:
            costly.forget(view.request_id)
        for member in self.members:
            self._attempt(member, [], partial(member.close, view))

    def take_failures(self) -> Mapping[str, frozenset[int]]:
        for member in self.members:
            for name, requests in member.take_failures().items():
                self._untold[name] |= requests
        untold = {name: frozenset(requests) for name, requests in self._untold.items() if requests}
        self._untold.clear()
        return untold

    def _member_trees(
        self, member: Drafter, views: Sequence[SequenceView], budget: Budget
    ) -> Sequence[DraftTree] | None:
        """The member's trees with its name on every node, or None if it failed."""
        trees: list[DraftTree] = []

        def ask() -> None:
            answer = member.propose(views, budget)
            for view, tree in zip(views, answer, strict=True):
                tree = replace(tree, sources=((member.name,),) * len(tree))
                tree.check(view.sampling.vocab_size)
                if len(tree) > budget.nodes:
                    raise DraftError(f"{len(tree)} draft nodes, more than the {budget.nodes} asked for")
                trees.append(tree)

        return trees if self._attempt(member, views, ask) else None

    def _attempt(self, member: Drafter, views: Sequence[SequenceView], action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception as error:
            if not self.failures[member.name]:
                reason = f"{type(error).__name__}: {error}"
                _log.warning("drafter %s failed (%s); the others go on, and it is asked again", member.name, reason)
            self.failures[member.name] += 1
            self._untold[member.name].update(view.request_id for view in views)
            return False
        return True

    def _combine(self, view: SequenceView, trees: Sequence[DraftTree], budget: Budget) -> DraftTree:
        merged = self._merged(view, trees)
        self._proposals[view.request_id] = _Proposal(tuple(trees), merged)
        calibrator = self._calibrators.get(view.tenant).merged
        return cut(calibrator.calibrated(merged, view.request_id), budget.nodes, self._width)

    def _merged(self, view: SequenceView, trees: Sequence[DraftTree]) -> DraftTree:
        """One tree of the members' trees, its scores what those of each member are worth."""
        calibrator = self._calibrators.get(view.tenant).members
        return merge(calibrator.calibrated(tree, view.request_id) for tree in _one_drawn(trees))

    def _learn(self, observation: Observation, proposal: _Proposal) -> None:
        calibrators = self._calibrators.get(observation.view.tenant)
        request = observation.view.request_id
        for tree in proposal.members:
            calibrators.members.observe_committed(tree, observation.committed, request)
        calibrators.merged.observe_committed(proposal.merged, observation.committed, request)


def _wants_of(members: Sequence[Drafter]) -> Wants:
    return Wants(
        top_k=max((member.wants.top_k for member in members), default=0),
        hidden_layers=tuple(sorted({layer for member in members for layer in member.wants.hidden_layers})),
        whole_prompt=any(member.wants.whole_prompt for member in members),
    )


def _one_drawn(trees: Sequence[DraftTree]) -> Iterator[DraftTree]:
    """The trees, of which the first that carries distributions keeps them; the draws of others become mere guesses.

    Two members may draw more nodes than the budget holds, and what a rule that compares p with q is told must not
    depend on what was drawn, as it would if the cut had to choose. A guess is judged on its own, however it came about.
    """
    seen = False
    for tree in trees:
        yield replace(tree, logprobs={}) if seen else tree
        seen = seen or bool(tree.logprobs)


def cut(tree: DraftTree, nodes: int, width: int | None = None) -> DraftTree:
    """The ``nodes`` nodes of the highest path probability, at most ``width`` below each other node.

    Nodes that were drawn from a distribution which the tree carries all stay, of which there must be no more than
    ``nodes``: to drop some by what they are worth would bias a rule that compares p with q. The tree's support stays
    where it fits in next to them, and is given up for good where it does not.
    """
    if len(tree) <= nodes and width is None:
        return tree
    products = path_products(tree.parents, tree.scores)
    drawn: set[int] = set()
    for node, parent in enumerate(tree.parents):
        if parent in tree.logprobs:
            drawn.update(tree.path(node))
    kept = drawn | tree.support
    children = Counter(tree.parents[node] for node in kept)
    if len(kept) > nodes or (width is not None and max(children.values(), default=0) > width):
        tree = replace(tree, support=frozenset(), support_worth=0.0)
        kept = set(drawn)
        children = Counter(tree.parents[node] for node in drawn)
    # The sort is stable and a parent is never worth less than its child, so that parents come before their children.
    for node in sorted(range(len(tree)), key=products.__getitem__, reverse=True):
        parent = tree.parents[node]
        fits = len(kept) < nodes and (width is None or children[parent] < width)
        if node not in kept and fits and (parent == ROOT or parent in kept):
            kept.add(node)
            children[parent] += 1
    return tree.keep(kept)
