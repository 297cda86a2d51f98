"""Drafting with a smaller model."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence

import pytest
import scipy.stats
import torch

from outrider.acceptance import RULES
from outrider.acceptance.base import AcceptanceRule, Candidate, Verdict
from outrider.core.config import SpeculativeConfig
from outrider.core.errors import KVCacheFullError, VocabularyMismatchError
from outrider.core.noise import Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters import build
from outrider.drafters import draft_model as module
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, OpenExecutor, SequenceView
from outrider.drafters.calibration import follow
from outrider.drafters.cascade import Cascade
from outrider.drafters.draft_model import DraftModelDrafter
from outrider.engine.outputs import SpeculationStats
from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.loader import Model
from tests.support.fakes import EOS, VOCAB, FakeExecutor, fake_model, make_engine, random_logits, run
from tests.support.models import random_model
from tests.unit.drafters.simulation import Simulation, commit, make_view

COUPLED = RULES.get("coupled")(None)


@functools.cache
def _logits(end: tuple[int, ...], noise: float) -> torch.Tensor:
    return random_logits(end) + noise * random_logits(end, seed=99, scale=1.0)


def logits_after(history: Sequence[int], noise: float = 0.0) -> torch.Tensor:
    """Those of the fake target, or with ``noise`` those of a draft model at a distance; computed once."""
    return _logits(tuple(history[-3:]), noise)


class Opener(OpenExecutor):
    """Opens fakes with logits at a distance of ``noise`` from the target's, and keeps them to be looked at."""

    def __init__(self, noise: float = 1.0, scale: float = 1.0, **options: int) -> None:
        self.noise = noise
        self.scale = scale
        self.options = options
        self.opened: list[FakeExecutor] = []

    def __call__(self, model: Model) -> FakeExecutor:
        def logits(history: Sequence[int]) -> torch.Tensor:
            return self.scale * logits_after(history, self.noise)

        self.opened.append(FakeExecutor(logits, **self.options))
        return self.opened[-1]


def make(opener: Opener, **config: object) -> DraftModelDrafter:
    config = {"method": "draft_model", "model": "fake", "adaptive": False, **config}
    drafter = build(DrafterContext(SpeculativeConfig(**config), fake_model(), opener))  # type: ignore[arg-type]
    assert isinstance(drafter, DraftModelDrafter)
    return drafter


class TestSelfDraft:
    """A drafter that is the target itself is accepted in full: no probability is divided by another token's."""

    @pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_every_token_of_a_chain_is_accepted(self, acceptance: str, temperature: float) -> None:
        config = SpeculativeConfig(
            method="draft_model", model="fake", num_speculative_tokens=6, acceptance=acceptance, adaptive=False
        )
        engine = make_engine(build(DrafterContext(config, fake_model(), Opener(noise=0.0))), config=config)
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True, **more)  # type: ignore[arg-type]
            for i, more in enumerate(({}, {"top_p": 0.9, "repetition_penalty": 1.3}, {"min_p": 0.05, "top_k": 9}))
        ]
        requests = [engine.add([1, 5 + i, 6], p) for i, p in enumerate(params)]
        run(engine, requests)
        total = SpeculationStats.total(request.statistics for request in requests)
        assert total.failures == 0
        assert total.drafted > 60
        assert total.accepted == total.drafted

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_a_tree_is_accepted_along_its_first_children(self, temperature: float) -> None:
        drafter = make(Opener(noise=0.0), tree_width=3)
        view = make_view([1, 5, 6], temperature=temperature)
        for _ in range(6):
            tree = drafter.propose([view], Budget(12, 4))[0]
            first = [ROOT]
            while children := tree.children().get(first[-1]):
                first.append(children[0])
            path = judge(COUPLED, tree, view).path
            assert list(path) == first[1:]
            commit(view, [tree.tokens[node] for node in path])


def judge(rule: AcceptanceRule, tree: DraftTree, view: SequenceView) -> Verdict:
    """The verdict of the fake target."""
    histories = [view.tokens, *([*view.tokens, *(tree.tokens[n] for n in tree.path(i))] for i in range(len(tree)))]
    logits = torch.stack([logits_after(history) for history in histories])
    return rule.accept([Candidate(tree, logits, view.sampling)])[0]


class TestKV:
    """What the draft executor holds."""

    def test_it_holds_committed_tokens_and_keeps_accepted_rows(self) -> None:
        opener = Opener()
        drafter = make(opener, tree_width=2)
        view = make_view([1, 5, 6, 7, 8])
        simulation = Simulation(drafter, view, seed=4).open()
        for _ in range(12):
            tree = simulation.draft(Budget(8, 4))
            executor = opener.opened[0]
            assert executor._committed[1] == view.tokens
            before, rows = executor.length(1), executor.rows
            accepted = follow(tree, simulation.settle(tree).committed)
            forwarded = [node for node in accepted if any(parent == node for parent in tree.parents)]
            drafter.propose([view], Budget(1, 1))
            # Accepted nodes that had been forwarded are not forwarded again. The last token always is, for its logits.
            assert executor.rows - rows <= max(1, len(view.tokens) - before - len(forwarded))
        drafter.close(view)
        drafter.close(view)
        assert executor.open_sequences == 0

    def test_one_forward_pass_serves_a_level_of_all_requests(self) -> None:
        opener = Opener()
        drafter = make(opener)
        views = [make_view([1, 5 + i, 6], i, logit_bias={EOS: -100.0}) for i in range(5)]
        trees = drafter.propose(views, Budget(4, 4))
        assert [len(tree) for tree in trees] == [4] * 5
        # The prompts, then three levels: the last one is not forwarded.
        assert opener.opened[0].forwards == 4

    def test_a_short_prompt_is_read_when_its_request_opens(self) -> None:
        opener = Opener()
        drafter, twin = make(opener), make(Opener())
        view = make_view([3 + j % 20 for j in range(25)])
        drafter.open(view)
        assert opener.opened[0]._committed[1] == view.tokens[:-1]
        assert drafter.propose([view], Budget(1, 1)) == twin.propose([view], Budget(1, 1))
        assert opener.opened[0].rows == 25

    def test_a_long_prompt_is_read_along_with_the_target(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Chunk by chunk; what the target had in its prefix cache is caught up with, a bounded piece at a time."""
        monkeypatch.setattr(module, "_CHUNK", 10)
        opener = Opener()
        drafter, twin = make(opener), make(Opener())
        view = make_view([3 + j % 20 for j in range(25)])
        drafter.open(view)
        read = []
        for start in (8, 12, 16):
            drafter.observe([Observation(view, (), (), (), context=view.tokens[start : start + 4], start=start)])
            read.append(opener.opened[0].length(1))
        assert read == [8, 16, 20]
        assert drafter.propose([view], Budget(1, 1)) == twin.propose([view], Budget(1, 1))
        assert opener.opened[0].rows == 25

    def test_requests_that_do_not_fit_are_left_out_and_the_others_go_on(self) -> None:
        """The target shares pages and lets requests wait; a draft model's cache may be too small for all that run."""
        opener = Opener(kv_tokens=70)
        engine = make_engine(make(opener), config=SpeculativeConfig(num_speculative_tokens=4))
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        requests = [engine.add([5 + n, 6, 7] * 5, params) for n in range(3)]
        run(engine, requests)
        assert engine.stats.drafter_failures == 0
        assert requests[0].statistics.drafted > 0
        assert opener.opened[0].open_sequences == 0

    def test_memory_of_rejected_rows_is_promised_once(self) -> None:
        """What a request's last draft leaves is that request's to draw on, and is not given to another one as well."""
        opener = Opener(kv_tokens=41)
        drafter = make(opener)
        views = [make_view([3 + i, *range(14, 23)], i) for i in range(3)]
        for view in views:
            drafter.open(view)
        for view, tree in zip(views, drafter.propose(views, Budget(3, 3)), strict=True):
            assert len(tree) == 3
            view.tokens.append(next(token for token in range(3, VOCAB) if token not in tree.tokens))
        assert [len(tree) for tree in drafter.propose(views, Budget(4, 4))] == [4, 0, 4]

    def test_a_request_that_waits_holds_no_memory(self) -> None:
        opener = Opener()
        drafter, twin = make(opener), make(Opener())
        view = make_view([3 + j % 20 for j in range(25)])
        drafter.open(view)
        drafter.pause(view)
        assert opener.opened[0].open_sequences == 0
        assert drafter.propose([view], Budget(3, 3)) == twin.propose([view], Budget(3, 3))

    def test_long_prompts_are_read_in_chunks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_CHUNK", 10)
        opener = Opener()
        drafter = make(opener)
        views = [make_view([3 + (i * 7 + j) % 20 for j in range(n)], i) for i, n in enumerate((25, 3, 12))]
        chunked = drafter.propose(views, Budget(3, 3))
        assert opener.opened[0].forwards == 4 + 2
        monkeypatch.setattr(module, "_CHUNK", 512)
        whole = make(Opener()).propose(views, Budget(3, 3))
        assert [list(tree.tokens) for tree in chunked] == [list(tree.tokens) for tree in whole]

    def test_a_failure_in_mid_round_leaves_nothing_wrong_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opener = Opener()
        drafter, twin = make(opener), make(Opener())
        view = make_view([1, 5, 6])
        drafter.propose([view], Budget(4, 4))
        executor = opener.opened[0]
        commit(view, [7, 8])
        works = FakeExecutor.forward
        calls = Counter[str]()

        def fails_second(self: FakeExecutor, segments: Sequence[Segment]) -> object:
            calls["forward"] += 1
            if calls["forward"] == 2:
                raise KVCacheFullError("full")
            return works(self, segments)

        monkeypatch.setattr(executor, "forward", fails_second.__get__(executor))
        with pytest.raises(KVCacheFullError):
            drafter.propose([view], Budget(4, 4))
        monkeypatch.undo()
        commit(view, [9])
        assert drafter.propose([view], Budget(4, 4)) == twin.propose([view], Budget(4, 4))
        assert executor._committed[1] == view.tokens

    @pytest.mark.parametrize("stream", [Stream.TARGET, Stream.DRAFT])
    @pytest.mark.parametrize("after", [0, 2])
    def test_logits_that_cannot_be_used_cost_their_own_request_its_draft(
        self, after: int, stream: Stream, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """``after``: committed and drafted tokens of the ill request behind which its logits are NaN."""
        opener = Opener()
        drafter, twin = make(opener), make(Opener())
        views = [make_view([1, 20 + i, 6], i, temperature=0.8, logit_bias={EOS: -100.0}, stream=stream) for i in (0, 1)]

        def shapes(trees: Sequence[DraftTree]) -> list[tuple[list[int], list[int]]]:
            return [(list(tree.tokens), list(tree.parents)) for tree in trees]

        expected = shapes(twin.propose(views, Budget(4, 4)))
        executor = opener.opened[0]
        works = executor._logits

        def ill(history: Sequence[int]) -> torch.Tensor:
            broken = history[1] == 20 and len(history) >= 3 + after
            return torch.full((VOCAB,), math.nan) if broken else works(history)

        monkeypatch.setattr(executor, "_logits", ill)
        for _ in range(2):
            assert shapes(drafter.propose(views, Budget(4, 4))) == [([], []), expected[1]]
            assert drafter.take_failures() == {drafter.name: {0}}
        assert drafter.take_failures() == {}
        assert len(caplog.records) == 1
        monkeypatch.undo()
        assert shapes(drafter.propose(views, Budget(4, 4))) == expected

    def test_a_context_that_is_too_long_for_the_draft_model_is_not_drafted_for(self) -> None:
        opener = Opener(max_context=8)
        drafter = make(opener)
        views = [make_view([5] * n, n, logit_bias={EOS: -100.0}) for n in (6, 8, 9)]
        for view in views:
            drafter.open(view)
        trees = drafter.propose(views, Budget(9, 9))
        assert [len(tree) for tree in trees] == [3, 1, 0]


class TestTrees:
    """What is proposed."""

    def test_a_greedy_tree_has_the_models_best_tokens_as_children(self) -> None:
        drafter = make(Opener(noise=0.0), tree_width=3)
        view = make_view([1, 5, 6])
        tree = drafter.propose([view], Budget(3, 1))[0]
        expected = logits_after([1, 5, 6]).softmax(-1).topk(3)
        assert list(tree.tokens) == expected.indices.tolist()
        assert list(tree.scores) == pytest.approx(expected.values.tolist())

    def test_a_sure_model_drafts_to_the_full_depth(self) -> None:
        opener = Opener(scale=4.0)
        for seed in range(10):
            view = make_view([1, 5 + seed, 6], seed, logit_bias={EOS: -100.0})
            tree = make(opener, tree_width=4).propose([view], Budget(16, 5))[0]
            assert (len(tree), max(tree.depths())) == (16, 5)
        assert all(executor.rows <= 3 + 16 for executor in opener.opened)

    def test_penalties_and_bans_shape_greedy_children(self) -> None:
        view = make_view([1, 5, 6], banned_token_ids=logits_after([1, 5, 6]).topk(2).indices.tolist())
        tree = make(Opener(noise=0.0), tree_width=2).propose([view], Budget(2, 1))[0]
        assert list(tree.tokens) == logits_after([1, 5, 6]).topk(4).indices.tolist()[2:]

    def test_sampled_children_are_drawn_with_the_targets_noise(self) -> None:
        for seed in range(20):
            view = make_view([1, 5, 6], seed, temperature=1.0)
            tree = make(Opener(noise=0.0), tree_width=2).propose([view], Budget(2, 1))[0]
            assert tree.tokens[0] == judge(COUPLED, DraftTree(), view).token

    def test_rules_that_compare_p_with_q_are_told_q(self) -> None:
        view = make_view([1, 5, 6], temperature=1.0, top_k=6, stream=Stream.DRAFT)
        tree = make(Opener(), tree_width=2).propose([view], Budget(6, 3))[0]
        tree.check(VOCAB)
        assert set(tree.logprobs) == set(tree.parents)
        for node, row in tree.logprobs.items():
            path = [] if node == ROOT else [tree.tokens[n] for n in tree.path(node)]
            history = [*view.tokens, *path]
            assert torch.equal(row, view.sampling.logprobs(logits_after(history, noise=1.0), path))

    def test_without_q_to_tell_no_distribution_is_carried(self) -> None:
        for temperature, stream in ((0.0, Stream.DRAFT), (1.0, Stream.TARGET)):
            view = make_view([1, 5, 6], temperature=temperature, stream=stream)
            assert not make(Opener(), tree_width=2).propose([view], Budget(6, 3))[0].logprobs

    def test_an_adaptive_draft_ends_where_a_further_level_does_not_pay(self) -> None:
        drafter, full = make(Opener(), adaptive=True), make(Opener())
        lengths: list[tuple[int, int]] = []
        for request in range(20):
            view = make_view([1, 5 + request, 6], request)
            lengths.append(tuple(len(d.propose([view], Budget(8, 8))[0]) for d in (drafter, full)))  # type: ignore[arg-type]
        assert all(1 <= adaptive <= whole for adaptive, whole in lengths)
        assert any(adaptive < whole for adaptive, whole in lengths)


def _first_tokens(
    rule: str,
    width: int | None,
    draws: int,
    *,
    pick: bool = False,
    drafter: Drafter | None = None,
    nodes: int = 4,
    depth: int = 2,
    **params: object,
) -> Counter[tuple[int, int]]:
    """The first two tokens after a prompt, committed by drafting and accepting; ``pick``: drop an unlikely draw."""
    drafter = drafter or make(Opener(), tree_width=width)
    acceptance = RULES.get(rule)(None)
    outcomes: Counter[tuple[int, int]] = Counter()
    for seed in range(draws):
        view = make_view([1, 5, 6], seed, temperature=1.0, top_k=3, stream=acceptance.noise_stream, **params)
        tokens: list[int] = []
        while len(tokens) < 2:
            tree = drafter.propose([view], Budget(nodes, depth))[0]
            if pick:
                tree = tree.keep(n for n in range(len(tree)) if tree.logprobs[tree.parents[n]][tree.tokens[n]] > -1.0)
            verdict = judge(acceptance, tree, view)
            new = [*(tree.tokens[node] for node in verdict.path), verdict.token]
            commit(view, new)
            tokens += new
        outcomes[tokens[0], tokens[1]] += 1
        drafter.close(view)
    return outcomes


def _p_value(outcomes: Counter[tuple[int, int]], **params: object) -> float:
    """Chi-square against the target's own distribution of the first two tokens (nine possible pairs)."""
    view = make_view([1, 5, 6], temperature=1.0, top_k=3, **params)
    first = view.sampling.logprobs(logits_after(view.tokens)).exp()
    expected: dict[tuple[int, int], float] = {}
    for a in first.nonzero().flatten().tolist():
        second = view.sampling.logprobs(logits_after([*view.tokens, a]), [a]).exp()
        for b in second.nonzero().flatten().tolist():
            expected[a, b] = float(first[a] * second[b])
    total = sum(outcomes.values())
    assert set(outcomes) <= set(expected)
    observed = [outcomes[pair] for pair in expected]
    frequencies = torch.tensor(list(expected.values()), dtype=torch.float64)
    return float(scipy.stats.chisquare(observed, (frequencies / frequencies.sum() * total).tolist()).pvalue)


class TestDistribution:
    """Drafts and rules together leave the target's distribution as it is. Seeds are fixed: a false alarm, at a chance
    below 1e-6 when a seed is changed, would come every time or never.
    """

    @pytest.mark.parametrize(
        ("rule", "width"), [("rejection", None), ("rejection", 2), ("block", None), ("coupled", 2)]
    )
    def test_first_tokens_follow_the_target(self, rule: str, width: int | None) -> None:
        assert _p_value(_first_tokens(rule, width, draws=1000)) > 1e-6

    def test_two_draft_models_at_once_do_not_bend_it(self) -> None:
        """They draw six nodes, one more than the budget holds, unless one of them drew an end token."""
        drafter = Cascade([make(Opener()), make(Opener(noise=2.0))])
        ends: dict[str, object] = {"logit_bias": {EOS: 4.0}}
        outcomes = _first_tokens("rejection", None, draws=1000, drafter=drafter, nodes=5, depth=3, **ends)
        assert _p_value(outcomes, **ends) > 1e-6

    def test_leaving_out_nodes_by_what_was_drawn_is_noticed(self) -> None:
        assert _p_value(_first_tokens("rejection", 2, draws=1000, pick=True)) < 1e-6


class TestModels:
    """Which models go together, and real forward passes."""

    def test_another_vocabulary_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "load_model", lambda name: fake_model(name, tokenizer=False, vocab_size=VOCAB + 1))
        with pytest.raises(VocabularyMismatchError, match="it has 33 tokens instead of 32"):
            make(Opener(), model="other")

    def test_the_target_itself_is_not_loaded_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "load_model", lambda name: pytest.fail("loaded again"))
        make(Opener())

    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    @pytest.mark.parametrize("width", [None, 3])
    def test_a_real_model_drafts_for_itself(self, temperature: float, width: int | None) -> None:
        target = random_model("llama")

        class OpenTorch(OpenExecutor):
            def __call__(self, model: Model) -> TorchExecutor:
                return TorchExecutor(model, dtype="float32", device="cpu", kv_tokens=2048, max_context=256)

        config = SpeculativeConfig(
            method="draft_model", model=target.name, num_speculative_tokens=6, tree_width=width, adaptive=False
        )
        executor = OpenTorch()(target)
        drafter = build(DrafterContext(config, target, OpenTorch()))
        engine = make_engine(drafter, config=config, executor=executor, model=target)
        requests = [
            engine.add([1, 9, 8 + i], SamplingParams(temperature=temperature, seed=i, max_tokens=24, ignore_eos=True))
            for i in range(3)
        ]
        run(engine, requests)
        total = SpeculationStats.total(request.statistics for request in requests)
        assert total.failures == 0
        if width is None:
            assert total.accepted == total.drafted
        else:
            # With every root child a hit, a round commits two tokens at the very least.
            assert total.accepted_by_position[0] == total.drafted_rounds
        assert isinstance(drafter, DraftModelDrafter)
        drafter._executor.check_integrity()
