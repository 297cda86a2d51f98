"""`LLM` over the fake target: streams that share an engine, and what is asked of a small vocabulary."""

from __future__ import annotations

import pytest

from outrider.core.sampling import SamplingParams
from tests.support.fake_llm import fake_llm, use_fakes
from tests.support.fakes import VOCAB


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
