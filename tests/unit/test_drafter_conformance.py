"""One suite over every registered drafter, and over the cascades that are made of them."""

from __future__ import annotations

from functools import partial

import pytest

from outrider.drafters import DRAFTERS
from outrider.drafters.base import Drafter
from tests.unit.drafters import conformance
from tests.unit.drafters.simulation import make

METHODS = [*DRAFTERS.names(), "auto", "ngram+suffix+recycle", "suffix+draft_model", "suffix+eagle3"]
REGIMES = [pytest.param(regime, id=f"regime{i}") for i, regime in enumerate(conformance.REGIMES)]

pytestmark = pytest.mark.parametrize("build", [pytest.param(partial(make, m), id=m) for m in METHODS])


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("width", [None, 1, 3])
def test_trees_are_valid(build: partial[Drafter], width: int | None, regime: dict[str, object]) -> None:
    if width is not None and build.args == ("none",):
        pytest.skip("drafts nothing, and takes no width")
    conformance.trees_are_valid(build, width, regime)


@pytest.mark.parametrize("regime", REGIMES)
def test_end_tokens_are_leaves(build: conformance.Build, regime: dict[str, object]) -> None:
    conformance.end_tokens_are_leaves(build, regime)


def test_nothing_without_room(build: conformance.Build) -> None:
    conformance.nothing_without_room(build)


def test_any_prompt_will_do(build: conformance.Build) -> None:
    conformance.any_prompt_will_do(build)


@pytest.mark.parametrize("regime", REGIMES)
def test_asking_twice_is_harmless(build: conformance.Build, regime: dict[str, object]) -> None:
    conformance.asking_twice_is_harmless(build, regime)


@pytest.mark.parametrize("regime", REGIMES)
def test_runs_repeat(build: conformance.Build, regime: dict[str, object]) -> None:
    conformance.runs_repeat(build, regime)


def test_views_are_left_alone(build: conformance.Build) -> None:
    conformance.views_are_left_alone(build)


def test_tenants_are_strangers(build: conformance.Build) -> None:
    conformance.tenants_are_strangers(build)


@pytest.mark.parametrize("regime", REGIMES)
def test_batches_change_nothing(build: conformance.Build, regime: dict[str, object]) -> None:
    conformance.batches_change_nothing(build, regime)


def test_memory_is_freed(build: conformance.Build) -> None:
    conformance.memory_is_freed(build)
