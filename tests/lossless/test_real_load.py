"""The promise under load on a real model: native, bit for bit, with a KV cache too small for all."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from outrider import LLM, EngineConfig, RequestOutput, SamplingParams, SpeculativeOverride
from outrider.bench.prompts import load_prompts
from outrider.core.structured import StructuredOutputs
from outrider.engine.request import Request
from outrider.executors.native import why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

METHODS = (None, "none", "ngram", "suffix", "recycle")
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
SENTENCES = StructuredOutputs(regex=r"([A-Z][a-z]{1,8} (is|was) [a-z]{2,9}\. ){2,9}The end\.")
KINDS: list[dict[str, Any]] = [
    {"structured_outputs": SENTENCES, "presence_penalty": 0.4},
    {"ignore_eos": True},
    {"stop": ["\n\n", " the"], "stop_token_ids": [29], "min_tokens": 12},
    {"ignore_eos": True, "min_p": 0.02, "logit_bias": {260: -4.0, 281: 2.0}},
]
TIGHT = 320


@cache
def model(kv_tokens: int, caching: bool) -> LLM:
    """Speculates by ``auto`` unless a request says otherwise, planner included."""
    config = EngineConfig(kv_tokens=kv_tokens, max_context=TIGHT, prefill_chunk=96, enable_prefix_caching=caching)
    return LLM("smollm2-135m", executor="native", engine_config=config)


@cache
def prompts() -> list[list[int]]:
    """Twelve, of up to 200 tokens: each beginning is there three times, with another end."""
    tokenizer = model(4096, False).tokenizer
    texts = sorted((prompt.turns[0] for prompt in load_prompts()), key=len)[:4]
    shared = " ".join(texts)
    beginnings = [[], tokenizer.encode(shared)[:48], tokenizer.encode(shared)[:130], tokenizer.encode(shared)[40:110]]
    return [
        beginnings[number % 4] + tokenizer.encode_chat([{"role": "user", "content": texts[number // 3]}])[-40:]
        for number in range(12)
    ]


def params(number: int) -> SamplingParams:
    """Greedy and sampled, of four kinds. Those that make way first, the last of the least priority, have a grammar."""
    own = KINDS[0] if number % 3 == 2 else KINDS[1 + number // 3 % 3]
    return SamplingParams(max_tokens=40, seed=number, logprobs=1, **own, **(SAMPLED if number % 2 else {}))


@cache
def plain() -> list[RequestOutput]:
    llm = model(4096, False).with_speculation("none")
    return [llm.generate(prompt, params(number))[0] for number, prompt in enumerate(prompts())]


def submit(llm: LLM, number: int) -> Request:
    method = METHODS[number % len(METHODS)]
    return llm.engine.add(
        prompts()[number],
        params(number),
        tenant="ab"[number % 2],
        priority=number % 3,
        speculation=SpeculativeOverride(method) if method else None,
    )


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("kv_tokens", [4096, TIGHT], ids=["roomy", "tight"])
def test_all_at_once_is_one_by_one(kv_tokens: int, caching: bool) -> None:
    llm = model(kv_tokens, caching)
    requests: list[Request] = []
    for number in range(12):
        requests.append(submit(llm, number))
        if number % 4 == 3:  # some are under way when others come
            llm.engine.step()
    while not all(request.finished for request in requests):
        llm.engine.step()
        llm.executor.check_integrity()
    for request, alone in zip(requests, plain(), strict=True):
        output = request.result()
        assert output.token_ids == alone.token_ids
        assert output.logprobs == alone.logprobs, "log-probabilities are equal to the bit"
    stats = llm.engine.stats
    assert (stats.preemptions > 0) == (kv_tokens == TIGHT)
    moved = [request for request in requests if request.result().preemptions]
    assert not moved or any(request.sampling.params.structured_outputs for request in moved)
    assert stats.kv_tokens_used == 0
    assert stats.num_accepted_tokens > 0


def test_a_second_request_reads_only_what_is_new() -> None:
    llm = model(4096, True)
    prompt = prompts()[2]
    first, second = (llm.generate(prompt, params(2), tenant="again")[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, (len(prompt) - 1) // 16 * 16)
    assert second.token_ids == first.token_ids == plain()[2].token_ids
    assert second.logprobs == first.logprobs
    llm.reset_prefix_cache()
    assert llm.generate(prompt, params(2), tenant="again")[0].cached_tokens == 0
    assert llm.generate(prompt, params(2), tenant="another")[0].cached_tokens == 0
