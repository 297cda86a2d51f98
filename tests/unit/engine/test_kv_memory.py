"""``kv_cache_memory`` is for all that keeps KV: executors of both kinds, real ones over small models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, EngineConfig, SamplingParams, SpeculativeOverride
from outrider.core.errors import ConfigError
from outrider.drafters import draft_model, heads
from outrider.executors import EXECUTORS
from outrider.executors.base import Executor
from outrider.executors.native import why_unavailable
from outrider.executors.torch.executor import TorchExecutor
from outrider.heads import shipped
from outrider.heads.head import METHODS
from outrider.heads.save import save_head
from outrider.models.loader import Model, load_model
from tests.support.heads import random_head
from tests.support.models import random_model, write_hf_folder

NATIVE = pytest.param("native", marks=pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())))
EXECUTOR = pytest.mark.parametrize("executor", ["torch", NATIVE])
LIMIT = 1_000_000
DRAFTERS = {
    "none": 0,
    "draft_model": 1,
    "eagle": 1,
    "eagle3": 1,
    "mtp": 1,
    "medusa": 0,
    "eagle3+draft_model+suffix": 2,
    "auto": 1,
}
"""Methods, and how many KV caches they have beside the target's."""


@pytest.fixture(autouse=True)
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Executor]]:
    """Every executor that has been built, in order."""
    found: list[Executor] = []
    for name in EXECUTORS.names() if why_unavailable() is None else ("torch",):
        kind: Any = EXECUTORS.get(name)

        def build(self: Executor, *args: Any, real: Any = kind.__init__, **options: Any) -> None:
            real(self, *args, **options)
            found.append(self)

        monkeypatch.setattr(kind, "__init__", build)
    yield found
    found.clear()


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """A model with a head of every method at hand; a draft model lies in ``tmp_path / "draft"``."""
    model = replace(random_model("llama", num_layers=6), name="small")
    for method in METHODS:
        ids = torch.arange(0, model.config.vocab_size, 2) if method == "eagle3" else None
        head = random_head(method, model.config, draft_ids=ids, own_output=method == "eagle3")
        save_head(head, tmp_path / "shipped" / model.name / method)
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    (tmp_path / "draft").mkdir()
    write_hf_folder(random_model("llama", num_layers=3, seed=1), tmp_path / "draft")
    return model


def speculation(method: str, folder: Path) -> dict[str, Any]:
    return {"method": method} | ({"model": str(folder / "draft")} if "draft_model" in method else {})


def open_llm(model: Model | str, executor: str, config: Any, memory: int | str = LIMIT, **options: Any) -> LLM:
    return LLM(
        model, config, executor=executor, threads=1, engine_config=EngineConfig(kv_cache_memory=memory), **options
    )


def kv_bytes(executor: Executor) -> int:
    """Of the memory that was allocated, as far as an executor shows it."""
    if isinstance(executor, TorchExecutor):
        return executor._cache.data.nbytes
    from outrider import _native

    config = executor.config
    page = _native.kv_page_bytes(config.num_layers, config.num_kv_heads, config.head_dim, executor.page_size, False)
    assert page >= 2 * 2 * executor.page_size * config.num_layers * config.num_kv_heads * config.head_dim
    return executor.total_tokens // executor.page_size * page


def check_division(opened: list[Executor], limit: int) -> None:
    """All of the limit but less than a page of each; and to give it all to the target would have been too much."""
    total, pages = sum(map(kv_bytes, opened)), opened[0].total_tokens // opened[0].page_size
    assert {executor.total_tokens for executor in opened} == {opened[0].total_tokens}
    assert limit - total // pages < total <= limit
    targets_alone = limit // (kv_bytes(opened[0]) // pages)
    assert (targets_alone * (total // pages) > limit) == (len(opened) > 1)


@EXECUTOR
@pytest.mark.parametrize("method", DRAFTERS)
def test_what_is_open_has_equally_many_tokens_within_the_limit(
    executor: str, method: str, target: Model, tmp_path: Path, opened: list[Executor]
) -> None:
    llm = open_llm(target, executor, speculation(method, tmp_path))
    assert opened[0] is llm.executor
    assert len(opened) == 1 + DRAFTERS[method]
    check_division(opened, LIMIT)
    assert llm.engine.stats.kv_tokens_total == opened[0].total_tokens
    prompt = [5, 9, 5, 9, 5]
    assert len(llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids) == 8


@EXECUTOR
def test_the_head_that_comes_with_a_model_is_counted(executor: str, opened: list[Executor]) -> None:
    llm = open_llm("smollm2-135m", executor, "auto", "64MiB")
    assert [each.config.num_layers for each in opened] == [llm.model.config.num_layers, 1]
    check_division(opened, 64 << 20)


@EXECUTOR
def test_a_page_of_each_must_fit(executor: str, target: Model, tmp_path: Path, opened: list[Executor]) -> None:
    method = speculation("eagle3+draft_model", tmp_path)
    open_llm(target, executor, method)
    pages = opened[0].total_tokens // opened[0].page_size
    together = sum(map(kv_bytes, opened)) // pages
    alone = kv_bytes(opened[0]) // pages
    opened.clear()
    open_llm(target, executor, method, together)
    assert [each.total_tokens for each in opened] == [16, 16, 16]
    opened.clear()
    for config, need in ((method, together), ("none", alone)):
        message = f"kv_cache_memory={need - 1} does not hold one page of KV.*: {need} bytes are needed; raise it"
        with pytest.raises(ConfigError, match=message) as refused:
            open_llm(target, executor, config, need - 1)
        assert "\n" not in str(refused.value)
    assert opened == [], "nothing is loaded for what cannot be"


@EXECUTOR
def test_models_and_heads_are_read_once(
    executor: str, target: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def noting(real: Any, name: Any, *rest: Any) -> Any:
        read.append(Path(name).name)
        return real(name, *rest)

    monkeypatch.setattr(draft_model, "load_model", partial(noting, load_model))
    monkeypatch.setattr(heads, "load_head", partial(noting, heads.load_head))
    llm = open_llm(target, executor, speculation("eagle3+draft_model", tmp_path))
    assert sorted(read) == ["draft", "eagle3"]
    assert llm._runtime._read._kept == {}, "and who runs them is all that holds them"


@EXECUTOR
def test_what_is_opened_later_fits_or_is_refused(
    executor: str, target: Model, tmp_path: Path, opened: list[Executor]
) -> None:
    llm = open_llm(target, executor, "eagle3")
    llm.with_speculation("none")
    llm.with_speculation("suffix+medusa")
    for method in ("draft_model", "eagle3"):
        with pytest.raises(ConfigError, match=rf"kv_cache_memory={LIMIT} only \d+ are left; .* reserve_for") as refused:
            llm.with_speculation(speculation(method, tmp_path))
        assert "\n" not in str(refused.value)
    assert len(opened) == 2


@EXECUTOR
def test_one_that_is_no_longer_used_has_given_its_memory_back(
    executor: str, target: Model, tmp_path: Path, opened: list[Executor]
) -> None:
    method = speculation("auto+draft_model", tmp_path)
    llm = open_llm(target, executor, method)
    llm.generate([[5, 9, 5, 9, 5]], SamplingParams(max_tokens=8))
    llm = llm.with_speculation("none")
    opened.clear()
    llm = llm.with_speculation(method)
    assert len(opened) == 2
    check_division([llm.executor, *opened], LIMIT)


@EXECUTOR
def test_room_is_set_aside_for_what_will_be_opened(
    executor: str, target: Model, tmp_path: Path, opened: list[Executor]
) -> None:
    methods = [speculation(method, tmp_path) for method in ("draft_model", "auto", "eagle3")]
    llm = open_llm(target, executor, "none", reserve_for=methods)
    others = [llm.with_speculation(method) for method in methods]
    assert len(opened) == 1 + len(others)
    check_division(opened, LIMIT)


@EXECUTOR
def test_requests_open_nothing(executor: str, target: Model, tmp_path: Path, opened: list[Executor]) -> None:
    llm = open_llm(target, executor, speculation("eagle3+draft_model", tmp_path))
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for method in ("none", "draft_model", "auto", "suffix+eagle3"):
        request = llm.engine.add([1, 5, 9], params, speculation=SpeculativeOverride(method))
        while not request.finished:
            llm.engine.step()
    with pytest.raises(ConfigError, match="needs a model that is not loaded"):
        llm.engine.add([1, 5, 9], params, speculation=SpeculativeOverride("medusa"))
    assert len(opened) == 3


@EXECUTOR
def test_tokens_are_counted_in_the_targets_cache(
    executor: str, target: Model, tmp_path: Path, opened: list[Executor]
) -> None:
    """`kv_tokens` is what requests have; drafters' caches come on top, with as many."""
    engine_config = EngineConfig(kv_tokens=320)
    llm = LLM(target, speculation("eagle3+draft_model", tmp_path), executor=executor, engine_config=engine_config)
    assert llm.engine.stats.kv_tokens_total == 320
    assert [each.total_tokens for each in opened] == [320] * 3
