"""Drafting with heads that read the target's hidden states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.errors import KVCacheFullError
from outrider.core.noise import Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters import feature_runs
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation
from outrider.drafters.cascade import Cascade
from outrider.drafters.eagle import Eagle3Drafter, EagleDrafter
from outrider.drafters.feature_drafter import FeatureDrafter
from outrider.drafters.mtp import MtpDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.engine.outputs import SpeculationStats
from outrider.engine.request import Request
from tests.support.fake_heads import DRAFT_IDS, OpenFakeHeads, drafted_logits, fake_head, fake_target, hidden
from tests.support.fakes import EOS, VOCAB, FakeExecutor, make_engine, random_logits, run
from tests.unit.drafters.simulation import Simulation, commit, make_view

DRAFTERS: dict[str, type[FeatureDrafter]] = {"eagle": EagleDrafter, "eagle3": Eagle3Drafter, "mtp": MtpDrafter}
METHODS = pytest.mark.parametrize("method", DRAFTERS)
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
    context = DrafterContext(SpeculativeConfig(**config), fake_target(), opener or OpenFakeHeads())  # type: ignore[arg-type]
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
        model=fake_target(),
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
