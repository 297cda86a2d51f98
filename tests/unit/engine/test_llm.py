"""`LLM` over the fake target: streams that share an engine, and what is asked of a small vocabulary."""

from __future__ import annotations

import pytest

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.sampling import SamplingParams
from outrider.engine.llm import LLM
from tests.support.fake_llm import fake_llm, use_fakes
from tests.support.fakes import VOCAB
from tests.support.models import random_model


def test_a_stream_that_others_ran_to_its_end_still_gives_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    llm = fake_llm()
    long, short = (SamplingParams(max_tokens=n, ignore_eos=True) for n in (40, 5))
    first, second = llm.stream("hello", long), llm.stream("world", short)
    pieces = [list(first), list(second)]
    for (last, *_), params, prompt in zip((p[::-1] for p in pieces), (long, short), ("hello", "world"), strict=True):
        assert last.output is not None
        assert last.output.token_ids == fake_llm().generate(prompt, params)[0].token_ids
    assert [token for piece in pieces[1] for token in piece.token_ids] == pieces[1][-1].output.token_ids  # type: ignore[union-attr]


def test_more_logprobs_than_tokens_gives_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    output = fake_llm().generate("abc", SamplingParams(max_tokens=2, logprobs=100))[0]
    assert output.logprobs is not None
    assert all(len(entry.top) == VOCAB for entry in output.logprobs)


def test_memory_of_the_kv_cache_is_set_in_bytes() -> None:
    """Never more than was allowed; a context that is longer than the whole cache is cut, or refused if asked for."""
    model = random_model("llama", num_layers=2, max_position=512)
    page = 2 * 2 * 16 * model.config.num_kv_heads * model.config.head_dim * 4
    llm = LLM(
        model, "none", executor="torch", dtype="float32", engine_config=EngineConfig(kv_cache_memory=5 * page + 1)
    )
    assert llm.executor.total_tokens == 5 * 16
    assert llm.executor.max_context == 80
    output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=None, ignore_eos=True))[0]
    assert len(output.token_ids) == 77
    with pytest.raises(ConfigError, match="max_context=200 does not fit a KV cache of 80 tokens"):
        LLM(
            model,
            "none",
            executor="torch",
            dtype="float32",
            engine_config=EngineConfig(kv_cache_memory=5 * page, max_context=200),
        )


def test_a_prompt_that_comes_again_is_found_within_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    llm = fake_llm()
    params = SamplingParams(max_tokens=3)
    found = [llm.generate("hello world", params, tenant=tenant)[0].cached_tokens for tenant in ("a", "a", "b")]
    assert found == [0, 10, 0], "of eleven tokens the last one is always read"
    llm.reset_prefix_cache()
    assert llm.generate("hello world", params, tenant="a")[0].cached_tokens == 0
