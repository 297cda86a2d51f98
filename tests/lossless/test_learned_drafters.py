"""The promise with learned drafters: random heads over small random models, on both executors.

What a head computes cannot change the text. These know nothing, so that most of what they draft is rejected, and shared
noise makes the rest right often enough to be kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider import LLM, RequestOutput, SamplingParams
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.drafters.base import Drafter, DrafterContext
from outrider.drafters.cascade import Cascade
from outrider.drafters.duty import Duty
from outrider.drafters.eagle import Eagle3Drafter, EagleDrafter
from outrider.drafters.features import Features, States
from outrider.drafters.medusa import MedusaDrafter
from outrider.drafters.mtp import MtpDrafter
from outrider.drafters.pace import Pace
from outrider.drafters.resting import Resting
from outrider.engine.runtime import _OpenAlike
from outrider.executors import EXECUTORS as EXECUTOR_KINDS
from outrider.executors.native import why_unavailable
from outrider.heads import shipped
from outrider.heads.head import Head
from outrider.heads.save import save_head
from tests.support.heads import random_head
from tests.support.models import random_model, write_hf_folder

NATIVE = pytest.param("native", marks=pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())))
EXECUTORS = pytest.mark.parametrize("executor", ["torch", NATIVE])
DRAFTERS: Mapping[str, Callable[[DrafterContext, Head], Drafter]] = {
    "eagle": EagleDrafter,
    "eagle3": Eagle3Drafter,
    "mtp": MtpDrafter,
    "medusa": MedusaDrafter,
}
METHODS = pytest.mark.parametrize("method", DRAFTERS)

PROMPTS = [[1, 9, 5, 9, 5, 9, 5], [8, 3] * 30, [3, 4, 5, 6, 7, 3, 4, 5], [20], [8, 3] * 25 + [4, 100]]
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_tokens=40, temperature=1.0, seed=2, repetition_penalty=1.2, presence_penalty=0.3),
    SamplingParams(max_tokens=40, temperature=0.6, seed=3, frequency_penalty=0.4, min_tokens=20, top_k=8),
    SamplingParams(max_tokens=33, temperature=1.2, seed=4, min_p=0.05, logit_bias={7: 2.0}),
]
SMALL = EngineConfig(max_batch_size=5, prefill_chunk=16, kv_tokens=160, max_context=128)
"""Prompts come in chunks, and with five requests some have to make way."""


@cache
def llm(executor: str, config: EngineConfig = SMALL, variant: str = "llama") -> LLM:
    model = random_model(variant, num_layers=6)
    dtype = "float32" if executor == "torch" else "auto"
    return LLM(model, "none", executor=executor, dtype=dtype, engine_config=config, threads=1)


@cache
def plain(executor: str) -> list[RequestOutput]:
    """One request after the other."""
    return [llm(executor).generate(prompt, own)[0] for prompt, own in zip(PROMPTS, PARAMS, strict=True)]


def with_head(model: LLM, method: str, reduced: bool = False, beside: str | None = None, **config: object) -> LLM:
    """The model, drafted for by a random head. reduced: it has columns for every second token alone."""
    own = SpeculativeConfig(method=beside or "recycle", **{"adaptive": False, **config})  # type: ignore[arg-type]
    target = model.model.config
    ids = torch.arange(0, target.vocab_size, 2) if reduced or method == "eagle3" else None
    head = random_head(method, target, draft_ids=ids, own_output=method == "eagle3", seed=5)
    context = DrafterContext(own, model.model, _OpenAlike(model._runtime))
    drafter = DRAFTERS[method](context, head)
    alone = Resting(drafter) if own.adaptive else drafter
    join = partial(_joined, drafter) if beside else lambda _: alone
    return model.with_speculation(own, join)


def _joined(head: Drafter, other: Drafter) -> Drafter:
    return Cascade([other, head])


def check(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for left, right in zip(outputs, expected, strict=True):
        assert (left.token_ids, left.finish_reason) == (right.token_ids, right.finish_reason)
    assert all(output.statistics.failures == 0 for output in outputs)
    assert sum(output.statistics.accepted for output in outputs) > 0


@EXECUTORS
@METHODS
@pytest.mark.parametrize("config", [{}, {"tree_width": 1, "num_speculative_tokens": 5}], ids=["tree", "chain"])
def test_a_head_changes_no_token(executor: str, method: str, config: dict[str, object]) -> None:
    """Greedy and sampled, with penalties, in a batch that is too large for the KV cache, prompts in chunks."""
    model = with_head(llm(executor), method, **config)
    outputs = model.generate(PROMPTS, PARAMS, use_tqdm=False)
    check(outputs, plain(executor))
    assert sum(output.preemptions for output in outputs) > 0


@EXECUTORS
def test_one_beside_a_drafter_of_guesses_changes_none_either(executor: str) -> None:
    model = with_head(llm(executor), "eagle3", beside="suffix", num_speculative_tokens=12)
    check(model.generate(PROMPTS, PARAMS, use_tqdm=False), plain(executor))


@EXECUTORS
@METHODS
def test_one_that_rests_and_wakes_in_the_middle_of_requests_changes_none(
    executor: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cascade leaves the head out every third round or so, and takes it up again where it missed part of the text."""
    turns: list[bool] = []

    def take_turns(duty: Duty, needed: bool) -> None:
        turns.append(needed)
        duty.awake = len(turns) % 5 < 3

    monkeypatch.setattr(Duty, "count", take_turns)
    monkeypatch.setattr(Pace, "budget", lambda pace, full, drafting, beside=(): full)
    model = with_head(llm(executor), method, beside="suffix", num_speculative_tokens=12, adaptive=True)
    outputs = model.generate(PROMPTS, PARAMS, use_tqdm=False)
    check(outputs, plain(executor))
    assert True in turns
    assert False in turns
    assert sum(output.statistics.drafted_by_source.get(method, 0) for output in outputs) > 0


@EXECUTORS
@METHODS
def test_a_feature_that_is_no_number_costs_one_draft(
    executor: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head with attention has it in its KV by then, where every later row would meet it."""
    calls = 0
    features_of = Features.of

    def of(features: Features, states: States) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return features_of(features, np.full_like(states, np.nan) if calls == 3 else states)

    monkeypatch.setattr(Features, "of", of)
    model = with_head(llm(executor), method, num_speculative_tokens=6)
    output = model.generate(PROMPTS[0], PARAMS[0], use_tqdm=False)[0]
    assert output.token_ids == plain(executor)[0].token_ids
    assert output.statistics.failures == 1
    assert calls > 10
    assert output.statistics.drafted > 6 * (calls - 5)


@EXECUTORS
@METHODS
def test_one_alone_that_rests_and_wakes_changes_none(
    executor: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[bool] = []

    def take_turns(duty: Duty, needed: bool) -> None:
        turns.append(needed)
        duty.awake = len(turns) % 5 < 3

    monkeypatch.setattr(Duty, "count", take_turns)
    monkeypatch.setattr(Pace, "budget", lambda pace, full, drafting, beside=(): full)
    model = with_head(llm(executor), method, num_speculative_tokens=12, adaptive=True)
    outputs = model.generate(PROMPTS, PARAMS, use_tqdm=False)
    check(outputs, plain(executor))
    assert True in turns
    assert False in turns


@EXECUTORS
def test_an_mtp_head_over_a_part_of_the_vocabulary_takes_those_rows_of_the_targets_matrix(executor: str) -> None:
    check(with_head(llm(executor), "mtp", reduced=True).generate(PROMPTS, PARAMS, use_tqdm=False), plain(executor))


@EXECUTORS
@METHODS
@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
def test_greedy_text_is_the_same_under_every_rule(executor: str, method: str, rule: str) -> None:
    """And sampled requests run through."""
    lossy = {"allow_lossy": True} if rule == "typical" else {}
    model = with_head(llm(executor), method, acceptance=rule, **lossy)
    outputs = model.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert outputs[0].token_ids == plain(executor)[0].token_ids
    assert all(output.statistics.failures == 0 for output in outputs)
    assert sum(output.statistics.accepted for output in outputs) > 0


@EXECUTORS
def test_a_text_that_begins_in_the_prefix_cache_is_the_same(executor: str) -> None:
    model = with_head(llm(executor), "eagle3")
    for _ in range(2):
        outputs = [model.generate(prompt, own)[0] for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
        check(outputs, plain(executor))
    assert outputs[1].cached_tokens > 0


@EXECUTORS
@pytest.mark.parametrize("method", ["eagle3", "eagle3+draft_model"])
def test_one_in_memory_that_is_too_small_for_all_changes_none(
    executor: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kv_cache_memory` is for the KV of target and drafters together, so that requests have to make way."""
    model = replace(llm(executor).model, name="target")
    ids = torch.arange(0, model.config.vocab_size, 2)
    head = random_head("eagle3", model.config, draft_ids=ids, own_output=True, seed=5)
    save_head(head, tmp_path / "target" / "eagle3")
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    config: dict[str, object] = {"method": method, "num_speculative_tokens": 12, "adaptive": False}
    if "draft_model" in method:
        config["model"] = str(write_hf_folder(random_model("llama", num_layers=2, seed=1), tmp_path))
    dtype = "float32" if executor == "torch" else "auto"
    layers = replace(model.config, num_layers=6 + 1 + 2 * ("draft_model" in method))
    page_bytes = EXECUTOR_KINDS.get(executor).kv_page_bytes(layers, dtype=dtype, device="cpu")
    sizes = EngineConfig(max_batch_size=5, prefill_chunk=16, kv_cache_memory=10 * page_bytes)
    drafted = LLM(model, config, executor=executor, dtype=dtype, engine_config=sizes, threads=1)
    assert drafted.executor.total_tokens == 160
    outputs = drafted.generate(PROMPTS, PARAMS, use_tqdm=False)
    check(outputs, plain(executor))
    assert sum(output.preemptions for output in outputs) > 0
    for member in method.split("+"):
        assert sum(output.statistics.drafted_by_source.get(member, 0) for output in outputs) > 0


@EXECUTORS
@METHODS
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no_cache"])
def test_many_at_once_are_what_each_is_alone(executor: str, method: str, caching: bool) -> None:
    """24 requests that share beginnings, eight at a time in a KV cache that holds two or three of them."""
    choose = random.Random(11)
    beginnings = [[choose.randrange(3, 100) for _ in range(length)] for length in (0, 18, 40)]
    prompts = [[*choose.choice(beginnings), *(choose.randrange(3, 100) for _ in range(1 + n % 7))] for n in range(24)]
    params = [replace(choose.choice(PARAMS), seed=100 + n) for n in range(24)]
    sizes = EngineConfig(
        max_batch_size=8, prefill_chunk=16, kv_tokens=208, max_context=128, enable_prefix_caching=caching
    )
    alone = [llm(executor).generate(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    outputs = with_head(llm(executor, sizes), method).generate(prompts, params, use_tqdm=False)
    check(outputs, alone)
    assert sum(output.preemptions for output in outputs) > 0
    assert (sum(output.cached_tokens for output in outputs) > 0) == caching
