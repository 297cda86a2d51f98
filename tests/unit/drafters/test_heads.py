"""Which head a learned drafter runs, what `auto` makes of it, and what a request may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.core.config import AUTO, SpeculativeConfig
from outrider.core.errors import ConfigError, ModelFileError, ModelNotFoundError
from outrider.core.tree import DraftTree
from outrider.drafters import DRAFTERS, assemble, build
from outrider.drafters.base import Budget, Drafter, DrafterContext, SequenceView
from outrider.drafters.cascade import Cascade
from outrider.drafters.heads import best_head, head_for
from outrider.heads import shipped
from outrider.heads.save import save_head
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from tests.support.fakes import OpenFake
from tests.support.heads import TARGET, random_head


class Learned(Drafter):
    """Loads its head and drafts nothing."""

    needs_model = True

    def __init__(self, context: DrafterContext) -> None:
        self.head = head_for(context, self.name)

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [DraftTree() for _ in views]


class Eagle3(Learned):
    name = "eagle3"


class Medusa(Learned):
    name = "medusa"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that ships two heads for the target "small", and their drafters."""
    for drafter in (Eagle3, Medusa):
        save_head(random_head(drafter.name), tmp_path / "small" / drafter.name)
        monkeypatch.setitem(DRAFTERS._entries, drafter.name, f"{__name__}:{drafter.__name__}")
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path)
    return tmp_path


def context(method: str, model: Path | str | None = None, target: str = "small") -> DrafterContext:
    config = SpeculativeConfig(method=method, model=None if model is None else str(model))
    return DrafterContext(config, Model(target, TARGET, TensorWeights({})), OpenFake())


def names(drafter: Drafter) -> list[str]:
    return [member.name for member in drafter.members] if isinstance(drafter, Cascade) else [drafter.name]


def test_the_shipped_head_is_used(folder: Path) -> None:
    for method in ("eagle3", "medusa"):
        drafter = build(context(method))
        assert isinstance(drafter, Learned)
        assert (drafter.head.method, drafter.head.source) == (method, str(folder / "small" / method))


def test_the_head_that_is_named_is_used(tmp_path: Path) -> None:
    save_head(random_head("eagle3", seed=1), tmp_path / "mine", "speculators")
    drafter = build(context("eagle3", tmp_path / "mine"))
    assert isinstance(drafter, Learned)
    assert drafter.head.source == str(tmp_path / "mine")


def test_auto_drafts_with_the_best_head_of_its_target(tmp_path: Path) -> None:
    assert names(build(context("auto"))) == [*AUTO, "eagle3"]
    assert names(build(context("auto", target="other"))) == list(AUTO)
    save_head(random_head("medusa", seed=1), tmp_path / "mine")
    cascade = build(context("auto", tmp_path / "mine"))
    assert names(cascade) == [*AUTO, "medusa"]
    assert best_head(context("auto", tmp_path / "mine", target="other")) == "medusa"
    assert names(build(context("medusa+auto"))) == ["medusa", *AUTO, "eagle3"]


def test_of_joined_methods_the_file_says_which_it_is_for(folder: Path, tmp_path: Path) -> None:
    save_head(random_head("medusa", seed=1), tmp_path / "mine")
    made: dict[str, Drafter] = {}
    joined = context("eagle3+medusa", tmp_path / "mine")
    assemble(joined.config.members, joined, made)
    sources = {name: drafter.head.source for name, drafter in made.items() if isinstance(drafter, Learned)}
    assert sources == {"eagle3": str(folder / "small" / "eagle3"), "medusa": str(tmp_path / "mine")}


def test_a_draft_model_takes_the_name_for_itself() -> None:
    """Then it names a whole model, and learned members have the shipped heads."""
    assert best_head(context("auto+draft_model", "some-model")) == "eagle3"
    assert head_for(context("eagle3+draft_model", "some-model"), "eagle3").method == "eagle3"


def test_without_a_head_the_error_says_how_to_get_one() -> None:
    for method in ("eagle3", "mtp"):
        with pytest.raises(ConfigError, match=f"outrider train other --method {method}") as refused:
            head_for(context(method, target="other"), method)
        assert "\n" not in str(refused.value)


def test_a_head_of_another_method_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a drafter of method 'medusa'; method 'eagle3' would ignore it"):
        build(context("eagle3", folder / "small" / "medusa"))


def test_what_is_no_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="is named with method 'draft_model'"):
        build(context("auto", "smollm2-135m"))
    (tmp_path / "cut.safetensors").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="not a complete safetensors file"):
        build(context("eagle3", tmp_path / "cut.safetensors"))


def test_a_request_may_ask_for_a_head_that_is_loaded() -> None:
    made: dict[str, Drafter] = {}
    started = context("suffix+eagle3")
    assemble(started.config.members, started, made)
    assert names(assemble(["eagle3"], started, made, load_models=False)) == ["eagle3"]
    assert names(assemble(["auto"], started, made, load_models=False)) == [*AUTO, "eagle3"]
    for members in (["medusa"], ["suffix", "medusa"]):
        with pytest.raises(ConfigError, match="method 'medusa' needs a model that is not loaded"):
            assemble(members, started, made, load_models=False)


def test_a_requests_auto_makes_do_without_a_head() -> None:
    assert names(assemble(["auto"], context("none"), {}, load_models=False)) == list(AUTO)
