"""Drafting with heads that read the target's hidden states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import scipy.stats
import torch

from outrider.acceptance import RULES
from outrider.acceptance.base import AcceptanceRule, Candidate, Verdict
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.noise import Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters import feature_runs
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation
from outrider.drafters.cascade import Cascade
from outrider.drafters.eagle import Eagle3Drafter, EagleDrafter
from outrider.drafters.feature_drafter import FeatureDrafter
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.mtp import MtpDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.engine.outputs import SpeculationStats
from outrider.engine.request import Request
from tests.support.fake_heads import DRAFT_IDS, OpenFakeHeads, drafted_logits, fake_head, hidden
from tests.support.fakes import EOS, VOCAB, FakeExecutor, fake_model, make_engine, random_logits, run
from tests.unit.drafters.simulation import Simulation, make_view

DRAFTERS: dict[str, type[FeatureDrafter]] = {"eagle": EagleDrafter, "eagle3": Eagle3Drafter, "mtp": MtpDrafter}
METHODS = pytest.mark.parametrize("method", DRAFTERS)
_BUDGET = Budget(8, 4)
PARAMS = [
    SamplingParams(max_tokens=60, ignore_eos=True, banned_token_ids=[EOS]),
    SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=2, repetition_penalty=1.2),
    SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.6, seed=3, frequency_penalty=0.4, top_k=8),
    SamplingParams(max_tokens=33, ignore_eos=True, temperature=1.2, seed=4, min_p=0.05, logit_bias={7: 2.0}),
]
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [8] * 40, [3, 4, 5, 6, 7, 3, 4, 5], [20], list(range(3, 30)) * 3]


def make(method: str, opener: OpenFakeHeads | None = None, max_position: int = 512, **config: object) -> FeatureDrafter:
    config = {"adaptive": False, **config}
    context = DrafterContext(SpeculativeConfig(**config), fake_model(), opener or OpenFakeHeads())  # type: ignore[arg-type]
    return DRAFTERS[method](context, fake_head(method, max_position))


def engine_for(
    drafter: Drafter, logits: Callable[[Sequence[int]], torch.Tensor] = drafted_logits, **options: object
) -> Engine:
    """An engine over the fake target, whose prompts come in chunks."""
    config = SpeculativeConfig(**{"adaptive": False, **options.pop("config", {})})  # type: ignore[arg-type,dict-item]
    kv_tokens, page_size = options.pop("kv_tokens", 8192), options.pop("page_size", 1)
    return make_engine(
        drafter,
        config=config,
        executor=FakeExecutor(logits, hidden=hidden, kv_tokens=kv_tokens, page_size=page_size),  # type: ignore[arg-type]
        engine_config=EngineConfig(prefill_chunk=16, **options),  # type: ignore[arg-type]
        model=fake_model(),
    )


def play(engine: Engine, params: Sequence[SamplingParams] = PARAMS) -> list[Request]:
    requests = [engine.add(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    run(engine, requests)
    return requests


class TestAlignment:
    """A head that is right if each feature comes with the token after it is accepted in full, and else hardly ever."""

    @METHODS
    @pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
    def test_a_perfect_head_is_accepted_in_full(self, method: str, rule: str) -> None:
        config = {"acceptance": rule, "tree_width": 1, "num_speculative_tokens": 4}
        opener = OpenFakeHeads(logits=drafted_logits)
        requests = play(engine_for(make(method, opener, **config), config=config))
        total = SpeculationStats.total(request.statistics for request in requests)
        assert total.failures == 0
        assert total.drafted > 150
        assert total.accepted == total.drafted
        assert opener.opened[0].open_sequences == 0

    @METHODS
    def test_with_features_of_the_position_before_hardly_anything_is(self, method: str) -> None:
        """The test above can fail: this is what it would see."""
        engine = engine_for(make(method, OpenFakeHeads(logits=drafted_logits)))
        engine._executor._hidden = lambda layer, history: hidden(layer, history[:-1] or history)  # type: ignore[attr-defined]
        total = SpeculationStats.total(request.statistics for request in play(engine))
        assert total.accepted < 0.1 * total.drafted

    def test_rejected_rows_and_branches_do_not_shift_it(self) -> None:
        """Next to a drafter of guesses, in trees: what is accepted lies anywhere among the rows."""
        config = SpeculativeConfig(method="suffix", num_speculative_tokens=12)
        context = DrafterContext(config, fake_model(), OpenFakeHeads())
        head = make("eagle3", OpenFakeHeads(logits=drafted_logits), tree_width=3, max_draft_depth=3)
        requests = play(engine_for(Cascade([SuffixDrafter(context), head]), config={"num_speculative_tokens": 12}))
        total = SpeculationStats.total(request.statistics for request in requests)
        assert total.committed > 3 * total.rounds

    def test_requests_that_had_to_make_way_go_on_as_before(self) -> None:
        config = {"tree_width": 1, "num_speculative_tokens": 4}
        opener = OpenFakeHeads(logits=drafted_logits)
        engine = engine_for(make("eagle3", opener, **config), config=config, kv_tokens=224, max_batch_size=5)
        requests = play(engine)
        total = SpeculationStats.total(request.statistics for request in requests)
        assert engine.stats.preemptions > 0
        assert total.failures == 0
        assert total.accepted == total.drafted > 100
        assert opener.opened[0].open_sequences == 0

    def test_what_the_prefix_cache_had_is_done_without(self) -> None:
        config = {"tree_width": 1, "num_speculative_tokens": 4}
        opener = OpenFakeHeads(logits=drafted_logits)
        engine = engine_for(make("eagle3", opener, **config), config=config, page_size=8)
        own = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=7)
        rows: list[int] = []
        answers: list[list[int]] = []
        for _ in range(2):
            request = engine.add(PROMPTS[4], own)
            before = opener.opened[0].rows
            run(engine, [request])
            rows.append(opener.opened[0].rows - before)
            answers.append(list(request.result().token_ids))
            assert request.statistics.accepted == request.statistics.drafted > 0
        assert request.cached_tokens >= 72
        assert rows[1] <= rows[0] - 72
        assert answers[0] == answers[1]


class TestRuns:
    """What the head's KV holds, and what becomes of it."""

    def test_it_holds_a_row_for_each_committed_token_after_the_first(self) -> None:
        opener = OpenFakeHeads(1.0)
        drafter = make("eagle3", opener)
        view = make_view([1, 5, 6, 7, 8])
        simulation = Simulation(drafter, view, seed=4).open()
        assert not len(simulation.draft(Budget(8, 4)))
        drafter.observe([simulation.settle(DraftTree())])
        executor = opener.opened[0]
        for _ in range(12):
            known, rows = len(view.tokens) - 1, executor.rows
            tree = simulation.draft(Budget(8, 4))
            assert executor._committed[1] == view.tokens[1:]
            assert executor.pending(1) == 0
            held = len(view.tokens) - known
            drafter.observe([simulation.settle(tree)])
            assert executor.rows - rows >= held
        drafter.close(view)
        drafter.close(view)
        assert executor.open_sequences == 0

    def test_one_forward_pass_serves_a_level_of_all_requests(self) -> None:
        opener = OpenFakeHeads(logits=drafted_logits)
        drafter = make("eagle3", opener, tree_width=1)
        simulations = [Simulation(drafter, make_view([1, 6 + i, 6], i, banned_token_ids=[EOS])) for i in range(5)]
        drafter.observe([simulation.settle(DraftTree()) for simulation in simulations])
        assert opener.opened[0].forwards == 0
        trees = drafter.propose([simulation.view for simulation in simulations], Budget(4, 4))
        assert [len(tree) for tree in trees] == [4] * 5
        # What was committed, then three levels: the last one is not forwarded. One product joins all features.
        assert (opener.opened[0].forwards, opener.products) == (4, 1)

    def test_long_prompts_are_read_along_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(feature_runs, "CHUNK", 10)
        monkeypatch.setattr(feature_runs, "_LEFT_FOR_THE_ROUND", 4)
        opener, whole = OpenFakeHeads(), OpenFakeHeads()
        drafter, twin = make("eagle3", opener), make("eagle3", whole)
        prompt = [3 + j % 20 for j in range(40)]
        view = make_view(prompt)
        for start, end in ((0, 25), (25, 39)):
            drafter.observe([chunk_of(view, start, end)])
            assert opener.opened[0]._committed[1] == prompt[1:end]
        assert opener.opened[0].largest_pass <= 10
        tree = settled(drafter, view, 39)
        monkeypatch.undo()
        assert tree == settled(twin, make_view(prompt), 0)

    def test_an_observation_that_never_came_costs_the_rows_before_it(self) -> None:
        opener = OpenFakeHeads()
        drafter = make("eagle3", opener)
        view = make_view([1, 5, 6, 7, 8])
        simulation = Simulation(drafter, view, seed=4)
        drafter.observe([simulation.settle(DraftTree())])
        simulation.settle(DraftTree())
        assert not len(simulation.draft(Budget(8, 4)))
        drafter.observe([simulation.settle(DraftTree())])
        tree = simulation.draft(Budget(8, 4))
        assert opener.opened[0]._committed[2] == view.tokens[-1:]
        assert tree.tokens[tree.parents.index(ROOT)] == DRAFT_IDS[random_logits(view.tokens)[DRAFT_IDS].argmax()]

    def test_features_of_other_tokens_than_the_texts_are_not_taken(self) -> None:
        drafter = make("eagle3")
        view = make_view([1, 5, 6, 7, 8])
        observation = Simulation(drafter, view).settle(DraftTree())
        view.tokens[2] = 9
        drafter.observe([observation])
        assert not len(drafter.propose([view], Budget(8, 4))[0])

    def test_requests_that_do_not_fit_are_left_out_and_the_others_go_on(self) -> None:
        opener = OpenFakeHeads(logits=drafted_logits, kv_tokens=150)
        engine = engine_for(make("eagle3", opener, tree_width=1, num_speculative_tokens=4))
        requests = play(engine)
        assert engine.stats.drafter_failures == 0
        assert sum(request.statistics.accepted for request in requests) > 50
        assert opener.opened[0].open_sequences == 0

    def test_a_head_of_a_short_context_drafts_on_from_the_latest_text(self) -> None:
        opener = OpenFakeHeads(logits=drafted_logits, max_context=24)
        engine = engine_for(make("eagle3", opener, tree_width=1, num_speculative_tokens=4))
        requests = play(engine)
        total = SpeculationStats.total(request.statistics for request in requests)
        assert total.failures == 0
        assert total.accepted == total.drafted > 100

    def test_a_failure_in_mid_round_leaves_nothing_wrong_behind(self) -> None:
        opener = OpenFakeHeads(1.0)
        drafter, twin = make("eagle3", opener), make("eagle3", OpenFakeHeads(1.0))
        mine, other = (Simulation(d, make_view([1, 5, 6]), seed=3) for d in (drafter, twin))
        for simulation in (mine, other):
            simulation.drafter.observe([simulation.settle(DraftTree())])
        executor = opener.opened[0]
        for failing in (1, 2, 3):
            executor.fail_at = {executor.forwards + failing}
            with pytest.raises(RuntimeError):
                mine.draft(Budget(8, 4))
            assert executor.pending(1) == 0
            assert mine.draft(Budget(8, 4)) == other.draft(Budget(8, 4))
            tree = other.draft(Budget(8, 4))
            for simulation in (mine, other):
                simulation.drafter.observe([simulation.settle(tree)])

    def test_a_request_that_waits_holds_no_memory(self) -> None:
        opener = OpenFakeHeads()
        drafter = make("eagle3", opener)
        view = make_view([1, 5, 6, 7, 8])
        drafter.observe([Simulation(drafter, view).settle(DraftTree())])
        drafter.propose([view], Budget(4, 4))
        drafter.pause(view)
        assert opener.opened[0].open_sequences == 0
        assert not len(drafter.propose([view], Budget(4, 4))[0])

    @pytest.mark.parametrize("stream", [Stream.TARGET, Stream.DRAFT])
    @pytest.mark.parametrize("after", [0, 2])
    def test_logits_that_cannot_be_used_cost_their_own_request_its_draft(
        self, after: int, stream: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """``after``: drafted tokens of the ill request behind which its logits are NaN.

        If they are from the root on, it lets go of what it holds, and begins again with what comes next.
        """
        opener = OpenFakeHeads(logits=drafted_logits)
        drafter = make("eagle3", opener, tree_width=2)
        views = [make_view([1, 20 + i, 6], i, temperature=0.8, banned_token_ids=[EOS], stream=stream) for i in (0, 1)]
        simulations = [Simulation(drafter, view, seed=i) for i, view in enumerate(views)]
        drafter.observe([simulation.settle(DraftTree()) for simulation in simulations])
        expected = drafter.propose(views, Budget(8, 4))
        executor = opener.opened[0]
        works, start = executor.row_logits, executor.length(1)

        def ill(seq: int, row: int) -> torch.Tensor:
            depth = len(executor.history(seq, row)) - start
            return torch.full_like(works(seq, row), math.nan) if seq == 1 and depth >= after else works(seq, row)

        monkeypatch.setattr(executor, "row_logits", ill)
        for turn in range(2):
            trees = drafter.propose(views, Budget(8, 4))
            assert (len(trees[0]), list(trees[1].tokens)) == (0, list(expected[1].tokens))
            assert drafter.take_failures() == ({drafter.name: {0}} if after or not turn else {})
        assert executor.open_sequences == 1 + bool(after)
        assert drafter.take_failures() == {}
        assert len(caplog.records) == 1
        monkeypatch.undo()
        if not after:
            drafter.observe([simulations[0].settle(DraftTree())])
            assert len(drafter.propose(views, Budget(8, 4))[0]) == 8
        else:
            assert list(drafter.propose(views, Budget(8, 4))[0].tokens) == list(expected[0].tokens)


class TestTrees:
    """What is proposed."""

    def test_greedy_children_are_the_heads_best_tokens(self) -> None:
        tree = drafted([1, 5, 6], Budget(3, 1), tree_width=3)
        assert set(tree.tokens) <= set(DRAFT_IDS.tolist())
        assert all(a >= b for a, b in zip(tree.scores, tree.scores[1:], strict=False))
        assert tree.parents == [ROOT] * 3

    def test_the_tree_is_that_of_the_highest_path_probabilities(self) -> None:
        """Against a search through all paths of three tokens."""
        drafter = make("eagle3", OpenFakeHeads(logits=drafted_logits), tree_width=4)
        view = make_view([1, 5, 6], banned_token_ids=[EOS])
        simulation = Simulation(drafter, view)
        drafter.observe([simulation.settle(DraftTree())])
        tree = simulation.draft(Budget(10, 3))
        probability: dict[tuple[int, ...], float] = {(): 1.0}
        for depth in range(3):
            for path in [path for path in probability if len(path) == depth]:
                logits = drafted_logits([*view.tokens, *path])
                logits[EOS] = -math.inf
                best = logits.softmax(-1).topk(4)
                for token, p in zip(best.indices.tolist(), best.values.tolist(), strict=True):
                    probability[(*path, token)] = probability[path] * p
        expected = sorted((path for path in probability if path), key=lambda path: -probability[path])[:10]
        assert {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(10)} == set(expected)

    @pytest.mark.parametrize("width", [1, 2, None])
    def test_rules_that_compare_p_with_q_are_told_q(self, width: int | None) -> None:
        drafter = make("eagle3", OpenFakeHeads(), tree_width=width)
        view = make_view([1, 5, 6], temperature=1.0, top_k=6, stream=Stream.DRAFT, banned_token_ids=[EOS])
        simulation = Simulation(drafter, view)
        drafter.observe([simulation.settle(DraftTree())])
        tree = simulation.draft(Budget(6, 3))
        tree.check(VOCAB)
        assert set(tree.logprobs) == set(tree.parents)
        for node, row in tree.logprobs.items():
            path = [] if node == ROOT else [tree.tokens[n] for n in tree.path(node)]
            logits = torch.full((VOCAB,), -math.inf)
            logits[DRAFT_IDS] = random_logits([*view.tokens, *path])[DRAFT_IDS]
            assert torch.equal(row, view.sampling.logprobs(logits, path))

    def test_without_q_to_tell_no_distribution_is_carried(self) -> None:
        for temperature, stream in ((0.0, Stream.DRAFT), (1.0, Stream.TARGET)):
            assert not drafted([1, 5, 6], Budget(6, 3), temperature=temperature, stream=stream).logprobs

    def test_an_adaptive_draft_ends_where_a_further_level_does_not_pay(self) -> None:
        """A head that costs as much as the fake target's one layer, which its target has four of."""
        sizes = [
            [len(drafted([1, 5 + i, 6], Budget(8, 8), tree_width=1, adaptive=adaptive)) for i in range(20)]
            for adaptive in (True, False)
        ]
        assert all(1 <= shorter <= longer for shorter, longer in zip(*sizes, strict=True))
        assert sum(sizes[0]) < sum(sizes[1])

    def test_depth_and_width_have_bounds_of_their_own(self) -> None:
        """Unless the configuration says otherwise: a budget of nodes is no wish for a long path."""
        assert max(drafted([1, 6, 6], Budget(60, 60), scale=4).depths()) == 7
        assert max(drafted([1, 6, 6], Budget(60, 60), scale=4, max_draft_depth=10).depths()) == 10
        assert len(drafted([1, 6, 6], Budget(12, 12), tree_width=1)) == 12


class TestDistribution:
    """Heads and rules together leave the target's distribution as it is. Seeds are fixed, as is the bound: a false
    alarm has a chance of 1e-6 when a seed is changed.
    """

    @pytest.mark.parametrize(("rule", "width"), [("rejection", 1), ("rejection", 3), ("block", 1), ("coupled", None)])
    @pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa"])
    def test_two_tokens_follow_the_target(self, method: str, rule: str, width: int | None) -> None:
        """The head has no column for every seventh token, which the target says like any other."""
        acceptance = RULES.get(rule)(None)
        context = DrafterContext(SpeculativeConfig(adaptive=False, tree_width=width), fake_model(), OpenFakeHeads(1.0))
        drafter: Drafter = {**DRAFTERS, "medusa": MedusaDrafter}[method](context, fake_head(method))
        outcomes: Counter[tuple[int, int]] = Counter()
        for seed in range(800):
            view = make_view([1, 5, 6], seed, temperature=1.0, top_k=4)
            simulation = Simulation(drafter, view)
            drafter.observe([simulation.settle(DraftTree(), Verdict((), 12))])
            while len(view.tokens) < 6:
                view.noise_stream = acceptance.draft_stream(view.sampling.position)
                tree = simulation.draft(Budget(6, 3))
                drafter.observe([simulation.settle(tree, judge(acceptance, tree, view))])
            outcomes[view.tokens[4], view.tokens[5]] += 1
            drafter.close(view)
        assert p_value(outcomes) > 1e-6


def judge(rule: AcceptanceRule, tree: DraftTree, view) -> Verdict:  # type: ignore[no-untyped-def]
    """The verdict of the fake target."""
    histories = [view.tokens, *([*view.tokens, *(tree.tokens[n] for n in tree.path(i))] for i in range(len(tree)))]
    logits = torch.stack([random_logits(history) for history in histories])
    return rule.accept([Candidate(tree, logits, view.sampling)])[0]


def p_value(outcomes: Counter[tuple[int, int]]) -> float:
    """Chi-square against the target's own distribution of two tokens after the text, sixteen pairs."""
    sampling = make_view([1, 5, 6, 12], temperature=1.0, top_k=4).sampling
    expected: dict[tuple[int, int], float] = {}
    first = sampling.logprobs(random_logits([1, 5, 6, 12])).exp()
    for a in first.nonzero().flatten().tolist():
        second = sampling.logprobs(random_logits([1, 5, 6, 12, a])).exp()
        expected |= {(a, b): float(first[a] * second[b]) for b in second.nonzero().flatten().tolist()}
    assert set(outcomes) <= set(expected)
    total = sum(outcomes.values()) / sum(expected.values())
    observed = [outcomes[pair] for pair in expected]
    return float(scipy.stats.chisquare(observed, [total * p for p in expected.values()]).pvalue)


def drafted(
    prompt: Sequence[int],
    budget: Budget,
    *,
    temperature: float = 0.0,
    stream: Stream = Stream.TARGET,
    scale: float = 1.0,
    **config: object,
) -> DraftTree:
    """What a perfect head proposes after the first round."""
    drafter = make("eagle3", OpenFakeHeads(logits=lambda history: scale * drafted_logits(history)), **config)
    view = make_view(prompt, temperature=temperature, stream=stream, banned_token_ids=[EOS], room=100)
    return settled(drafter, view, 0, budget)


def settled(drafter: Drafter, view, start: int, budget: Budget = _BUDGET) -> DraftTree:  # type: ignore[no-untyped-def]
    """The draft after a plain round that forwards the prompt from ``start`` on."""
    simulation = Simulation(drafter, view, seed=1)
    simulation._forwarded = start
    drafter.observe([simulation.settle(DraftTree())])
    return simulation.draft(budget)


def chunk_of(view, start: int, end: int) -> Observation:  # type: ignore[no-untyped-def]
    """A chunk of a prompt that ends before the root."""
    states = {
        layer: torch.stack([hidden(layer, view.tokens[: at + 1]) for at in range(start, end)]) for layer in (1, 2, 4)
    }
    return Observation(view, (), (), (), context=view.tokens[start:end], start=start, hidden=states)
