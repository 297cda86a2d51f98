"""What every drafter must keep to, as checks that take a way to build it. New drafters get them by being registered."""

from __future__ import annotations

import gc
import random
import sys
import types
from collections.abc import Callable, Sequence

import torch

from outrider.core.noise import Stream
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, SequenceView
from tests.support.fakes import EOS, VOCAB
from tests.unit.drafters.simulation import Simulation, commit, make_view

Build = Callable[..., Drafter]
"""Builds a fresh drafter; keywords are fields of SpeculativeConfig."""

PROMPT = [1, 5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7]
REGIMES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 5, "stream": Stream.DRAFT},
]
"""Greedy; sampled by the target's noise; sampled by noise of the drafter's own, as rules that compare p with q ask."""


def check_limits(tree: DraftTree, view: SequenceView, budget: Budget) -> None:
    """A tree keeps the promises of its class, the budget, the room, and proposes nothing after an end token."""
    tree.check(VOCAB)
    assert len(tree) <= budget.nodes
    assert max(tree.depths(), default=0) <= min(budget.depth, view.room)
    for parent in tree.parents:
        assert parent == ROOT or tree.tokens[parent] not in view.sampling.end_ids, "a child after an end token"


def trees_are_valid(build: Build, width: int | None, regime: dict[str, object]) -> None:
    """Over random rounds with changing budgets and shrinking room."""
    chance = random.Random(3)
    drafter = build() if width is None else build(tree_width=width)
    for request in range(4):
        view = make_view(PROMPT, request, **regime)  # type: ignore[arg-type]
        simulation = Simulation(drafter, view, seed=request).open()
        while view.room > 0:
            budget = Budget(chance.randint(0, 20), chance.randint(0, 12))
            tree = simulation.draft(budget)
            check_limits(tree, view, budget)
            if width is not None:
                assert max(map(len, tree.children().values()), default=0) <= width
            drafter.observe([simulation.settle(tree)])
        drafter.close(view)


def end_tokens_are_leaves(build: Build, regime: dict[str, object]) -> None:
    """Even when the text so far always goes on after an end token, and the model is certain of it."""
    drafter = build()
    view = make_view([5, EOS, 6] * 6 + [5], stop_token_ids=[6], logit_bias={EOS: 60.0}, **regime)  # type: ignore[arg-type]
    simulation = Simulation(drafter, view).open()
    for _ in range(4):
        tree = simulation.draft(Budget(12, 6))
        check_limits(tree, view, Budget(12, 6))
        drafter.observe([simulation.settle(tree)])
        commit(view, [EOS, 6, 5])


def nothing_without_room(build: Build) -> None:
    drafter = build()
    view = make_view(PROMPT)
    drafter.open(view)
    for nodes, depth, room in ((8, 4, 0), (0, 4, 9), (8, 0, 9)):
        view.room = room
        assert len(drafter.propose([view], Budget(nodes, depth))[0]) == 0


def any_prompt_will_do(build: Build) -> None:
    """One token, an end token, one token over and over; and a request whose `open` or `observe` never came."""
    drafter = build()
    for request, prompt in enumerate(([1], [EOS], [7] * 40, [7, 8] * 20)):
        view = make_view(prompt, request)
        simulation = Simulation(drafter, view, seed=request)
        if request % 2 == 0:
            simulation.open()
        for turn in range(4):
            tree = simulation.draft(Budget(8, 8))
            check_limits(tree, view, Budget(8, 8))
            observation = simulation.settle(tree)
            if turn != 1:
                drafter.observe([observation])
        drafter.close(view)


def asking_twice_is_harmless(build: Build, regime: dict[str, object]) -> None:
    """A round may fail after drafting: then the same is asked, and answered, once more."""
    drafter = build()
    simulation = Simulation(drafter, make_view(PROMPT, **regime)).open()  # type: ignore[arg-type]
    for _ in range(4):
        first, second = simulation.draft(Budget(8, 4)), simulation.draft(Budget(8, 4))
        assert_same([first], [second])
        drafter.observe([simulation.settle(second)])


def runs_repeat(build: Build, regime: dict[str, object]) -> None:
    first, second = (
        Simulation(build(), make_view(PROMPT, **regime), seed=5).open().rounds(8, Budget(8, 4))  # type: ignore[arg-type]
        for _ in range(2)
    )
    assert_same(first, second)


def views_are_left_alone(build: Build) -> None:
    drafter = build()
    view = make_view(PROMPT, temperature=0.7)
    simulation = Simulation(drafter, view).open()
    for _ in range(4):
        before = (list(view.tokens), view.room, view.sampling.position)
        tree = simulation.draft(Budget(8, 4))
        assert (view.tokens, view.room, view.sampling.position) == before
        observation = simulation.settle(tree)
        before = (list(view.tokens), view.room, view.sampling.position)
        drafter.observe([observation])
        assert (view.tokens, view.room, view.sampling.position) == before


def tenants_are_strangers(build: Build) -> None:
    """What tenant B is offered does not depend on what tenant A said before, or says meanwhile."""

    def offered(with_a: bool) -> list[DraftTree]:
        drafter = build()
        if with_a:
            for request in (100, 101, 102):
                earlier = make_view(PROMPT, request, tenant="a", room=100)
                Simulation(drafter, earlier, seed=request).open().rounds(15, Budget(8, 4))
                drafter.close(earlier)
        trees: list[DraftTree] = []
        for request in range(2):
            view = make_view(PROMPT, request, tenant="b", room=100)
            simulation = Simulation(drafter, view, seed=request).open()
            neighbour = Simulation(drafter, make_view(PROMPT, 200 + request, tenant="a", room=100), seed=9).open()
            for _ in range(12):
                trees += simulation.rounds(1, Budget(8, 4))
                if with_a:
                    neighbour.rounds(1, Budget(8, 4))
            drafter.close(view)
        return trees

    assert_same(offered(with_a=False), offered(with_a=True))


def batches_change_nothing(build: Build, regime: dict[str, object]) -> None:
    """A request is offered the same alone and in a batch, whatever becomes of the others."""
    prompts = [PROMPT, [1], PROMPT[:5], [9, 8, 7] * 8]

    def simulations(drafter: Drafter) -> list[Simulation]:
        return [
            Simulation(drafter, make_view(prompt, i, tenant=f"t{i}", **regime), seed=i).open()  # type: ignore[arg-type]
            for i, prompt in enumerate(prompts)
        ]

    budget = Budget(8, 4)
    alone = [simulations(build())[i].rounds(8, budget) for i in range(len(prompts))]
    drafter = build()
    batch = simulations(drafter)
    together: list[list[DraftTree]] = [[] for _ in prompts]
    for _ in range(8):
        trees = drafter.propose([simulation.view for simulation in batch], budget)
        drafter.observe([simulation.settle(tree) for simulation, tree in zip(batch, trees, strict=True)])
        for i, tree in enumerate(trees):
            together[i].append(tree)
    for one, other in zip(alone, together, strict=True):
        assert_same(one, other)


def memory_is_freed(build: Build) -> None:
    """A thousand requests, of more tenants than are remembered, leave no more behind than two hundred."""
    drafter = build()
    sizes: list[int] = []
    for request in range(1000):
        view = make_view([1, 5 + request % 20, 6, 7, 5], request, tenant=f"t{request % 50}")
        Simulation(drafter, view, seed=request).open().rounds(2, Budget(4, 3))
        drafter.close(view)
        if request in (199, 999):
            sizes.append(footprint(drafter))
    drafter.close(view)
    assert sizes[1] <= 1.05 * sizes[0] + 2048, sizes


_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)


def footprint(thing: object) -> int:
    """Bytes of all that can be reached from an object, classes, modules and functions left out."""
    seen: set[int] = set()
    queue = [thing]
    total = 0
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, _CODE):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, torch.Tensor):
            total += item.nbytes
        queue.extend(gc.get_referents(item))
    return total


def assert_same(first: Sequence[DraftTree], second: Sequence[DraftTree]) -> None:
    """Trees are equal to the last bit, the distributions that they carry included."""
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert (list(one.tokens), list(one.parents)) == (list(other.tokens), list(other.parents))
        assert list(one.scores) == list(other.scores)
        assert one.logprobs.keys() == other.logprobs.keys()
        for node, row in one.logprobs.items():
            assert torch.equal(row, other.logprobs[node])
