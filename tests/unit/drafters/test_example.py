"""The drafter that docs/add-a-drafter.md builds works as it stands there."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from outrider.drafters import DRAFTERS
from outrider.drafters.base import Budget
from tests.unit.drafters import conformance
from tests.unit.drafters.simulation import make, make_view

PAGE = Path(__file__).resolve().parents[3] / "docs" / "add-a-drafter.md"


@pytest.fixture(scope="module", autouse=True)
def registered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The page's file is written and its registry line added, as a reader would."""
    page = PAGE.read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    line = re.search(r'"(\w+)": "outrider\.drafters\.(\w+):(\w+)",', page)
    assert code is not None
    assert line is not None
    name, module, attribute = line.groups()
    folder = tmp_path_factory.mktemp("example")
    (folder / f"{module}.py").write_text(code[1], encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(DRAFTERS, "_entries", {**DRAFTERS._entries, name: f"{module}:{attribute}"})
        importlib.invalidate_caches()
        yield


def test_it_drafts_what_the_page_says() -> None:
    the, cat, sat, on = 5, 6, 7, 8
    tree = make("followers").propose([make_view([the, cat, sat, on, the])], Budget(2, 2))[0]
    assert list(tree.tokens) == [cat, sat]


@pytest.mark.parametrize("method", ["followers", "followers+recycle"])
def test_it_conforms(method: str) -> None:
    build = partial(make, method)
    for regime in conformance.REGIMES:
        conformance.trees_are_valid(build, None, regime)
        conformance.end_tokens_are_leaves(build, regime)
        conformance.asking_twice_is_harmless(build, regime)
        conformance.runs_repeat(build, regime)
        conformance.batches_change_nothing(build, regime)
    conformance.nothing_without_room(build)
    conformance.any_prompt_will_do(build)
    conformance.views_are_left_alone(build)
    conformance.tenants_are_strangers(build)
    conformance.memory_is_freed(build)
