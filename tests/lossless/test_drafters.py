"""Every drafter, next to every acceptance rule, in the engine: the promise, and the self-draft that catches bad ratios.

The target is a function of the visible history (see tests/support/fakes.py), so that equality is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter, DrafterContext
from outrider.engine.outputs import RequestOutput
from tests.support.fake_heads import OpenFakeHeads, build_with_heads, hidden
from tests.support.fakes import FakeExecutor, fake_model, make_engine, random_logits, run

METHODS = [*(name for name in DRAFTERS if name not in ("draft_model", "none")), "auto", "suffix+recycle+ngram"]
PARAMS = [
    SamplingParams(max_tokens=60, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_tokens=60, temperature=1.0, seed=2, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(max_tokens=60, temperature=0.6, seed=3, frequency_penalty=0.4, min_tokens=20, top_k=8),
    SamplingParams(max_tokens=33, temperature=1.2, seed=4, min_p=0.05, logit_bias={7: 2.0}),
]
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [8] * 40, [3, 4, 5, 6, 7, 3, 4, 5], [20], [9, 12, 9, 12, 13]]


def drafter(config: SpeculativeConfig, noise: float) -> Drafter:
    return build_with_heads(DrafterContext(config, fake_model("target"), OpenFakeHeads(noise)))


def answers(config: SpeculativeConfig, noise: float = 1.0, params: Sequence[SamplingParams] = PARAMS, batch: int = 5):
    executor = FakeExecutor(hidden=hidden)
    engine = make_engine(
        drafter(config, noise),
        config=config,
        executor=executor,
        engine_config=EngineConfig(max_batch_size=batch, prefill_chunk=16),
        model=fake_model("target"),
    )
    requests = [engine.add(prompt, own) for prompt, own in zip(PROMPTS, params, strict=False)]
    run(engine, requests)
    assert executor.open_sequences == 0
    assert executor.check_integrity() is None
    return [request.result() for request in requests]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    return answers(SpeculativeConfig(method="none"), batch=1)


def configs() -> list[SpeculativeConfig]:
    chosen = [SpeculativeConfig(method=method, num_speculative_tokens=n) for method in METHODS for n in (1, 5, 24)]
    chosen.append(SpeculativeConfig(method="none"))
    chosen += [
        SpeculativeConfig(
            method="draft_model", model="target", num_speculative_tokens=4 * width, tree_width=width, adaptive=False
        )
        for width in (1, 3)
    ]
    chosen.append(SpeculativeConfig(method="eagle3+medusa+suffix", num_speculative_tokens=12))
    chosen.append(SpeculativeConfig(method="draft_model+suffix", model="target", num_speculative_tokens=12))
    return chosen


@pytest.mark.parametrize("config", configs(), ids=lambda c: f"{c.method}-{c.num_speculative_tokens}")
def test_no_drafter_changes_a_token(config: SpeculativeConfig, plain: list[RequestOutput]) -> None:
    """Greedy and sampled, with penalties, batched with others and with prompts in chunks."""
    drafted = answers(config)
    for left, right in zip(drafted, plain, strict=True):
        assert (left.token_ids, left.text, left.finish_reason) == (right.token_ids, right.text, right.finish_reason)
    if config.method != "none":
        assert sum(output.statistics.accepted for output in drafted) > 0
    assert all(output.statistics.failures == 0 for output in drafted)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_14_the_target_as_its_own_drafter_is_accepted_in_full(rule: str, width: int) -> None:
    """On the accepted path nothing is ever rejected: every round commits the whole depth and a bonus token."""
    if rule == "block" and width > 1:
        pytest.skip("block verification judges chains")
    config = SpeculativeConfig(
        method="draft_model",
        model="target",
        num_speculative_tokens=4 if width == 1 else 40,
        max_draft_depth=4,
        tree_width=width,
        adaptive=False,
        acceptance=rule,
    )
    params = [
        SamplingParams(max_tokens=60, ignore_eos=True),
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=5),
        SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.8, top_p=0.9, seed=6, frequency_penalty=0.5),
    ]
    for output in answers(config, noise=0.0, params=params):
        statistics = output.statistics
        if width == 1:
            assert statistics.accepted == statistics.drafted
        assert statistics.rounds == 60 / 5
        assert statistics.accepted_by_position == [12] * 4


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_14_sampled_text_is_as_likely_as_plain_text(rule: str) -> None:
    """Mean log-likelihood under the target, of text drafted by a worse model and of plain text.

    40 texts of 60 tokens each; the bound is 6 standard errors, a false alarm of 2e-9.
    """
    texts = 40
    config = SpeculativeConfig(method="draft_model", model="target", num_speculative_tokens=4, acceptance=rule)
    means: list[tuple[float, float]] = []
    for own in (config, SpeculativeConfig(method="none")):
        values: list[float] = []
        for first in range(0, texts, 5):
            params = [
                SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=100 * (own is config) + first + i)
                for i in range(5)
            ]
            values.extend(value for output in answers(own, params=params) for value in likelihoods(output))
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
        means.append((mean, variance / len(values)))
    (drafted, v1), (without, v2) = means
    assert abs(drafted - without) < 6 * math.sqrt(v1 + v2)


def likelihoods(output: RequestOutput) -> list[float]:
    history = list(output.prompt_token_ids)
    result: list[float] = []
    for token in output.token_ids:
        result.append(float(random_logits(history).log_softmax(-1)[token]))
        history.append(token)
    return result
