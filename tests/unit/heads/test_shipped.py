"""Heads that come with the package, or within a target's checkpoint."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.core.config import LEARNED
from outrider.heads import shipped
from outrider.heads.head import METHODS
from outrider.heads.load import load_head
from outrider.heads.save import save_head
from outrider.heads.shipped import heads_at_hand, shipped_head, shipped_methods
from outrider.models.aliases import ALIASES
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from tests.support.heads import TARGET, random_head
from tests.unit.heads.checkpoints import write

TRAINED = {"smollm2-135m": {"eagle3", "mtp", "medusa"}, "qwen2.5-coder-1.5b": {"eagle3"}}
"""What the package brings, by the target's alias."""
SIZES = {
    "smollm2-135m": {"hidden_size": 576, "num_layers": 30, "vocab_size": 49152},
    "qwen2.5-coder-1.5b": {"hidden_size": 1536, "num_layers": 28, "vocab_size": 151936},
}
"""As the targets' own files say them."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    for method in ("medusa", "eagle3"):
        save_head(random_head(method), tmp_path / "shipped" / "small" / method)
    (tmp_path / "shipped" / "small" / "mtp").mkdir()  # nothing in it
    return tmp_path / "shipped"


def _model(name: str, source: Path | None = None) -> Model:
    return Model(name, TARGET, TensorWeights({}), source=source)


def test_the_best_comes_first(folder: Path) -> None:
    assert set(LEARNED) == set(METHODS)
    assert shipped_methods("small") == ("eagle3", "medusa")
    assert shipped_head("small", "medusa") == folder / "small" / "medusa"
    assert heads_at_hand(_model("small")) == {method: folder / "small" / method for method in ("eagle3", "medusa")}


@pytest.mark.parametrize("name", ["large", "", "..", "../shipped/small", "small/eagle3", "."])
def test_other_targets_have_none(name: str, folder: Path) -> None:
    assert shipped_methods(name) == ()
    assert shipped_head(name, "eagle3") is None
    assert heads_at_hand(_model(name)) == {}


def test_a_package_without_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "none")
    assert shipped_methods("small") == ()


def test_a_module_in_the_targets_own_checkpoint(folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "target"
    save_head(random_head("mtp"), own)
    assert heads_at_hand(_model("small", own)) == {
        "eagle3": folder / "small" / "eagle3",
        "mtp": own,
        "medusa": folder / "small" / "medusa",
    }
    values = json.loads((own / "config.json").read_text())
    tensors = {"model.embed_tokens.weight": random_head("mtp", own_embedding=True).tensors["model.embed_tokens.weight"]}
    write(own, values, tensors)  # promised, but left out, as conversions do
    assert list(heads_at_hand(_model("large", own))) == []


@pytest.mark.parametrize("alias", ALIASES)
def test_what_is_really_shipped_loads_and_is_small(alias: str) -> None:
    """Sizes as promised: 16 MB a head for the embedded model, 60 MB for any other."""
    assert set(shipped_methods(alias)) == TRAINED.get(alias, set())
    for method in shipped_methods(alias):
        path = shipped_head(alias, method)
        assert path is not None
        assert sum(file.stat().st_size for file in path.iterdir()) <= (16e6 if alias == "smollm2-135m" else 60e6)
        head = load_head(path, replace(TARGET, **SIZES[alias]), alias)
        assert head.method == method
        assert all(bool(tensor.isfinite().all()) for tensor in head.tensors.values())
        assert len(head.accept_by_depth) >= 3
        assert head.accept_by_depth[0] > 0.2, "it knows next to nothing"


def test_they_travel_whatever_ignore_rules_say() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert tomllib.loads(text)["tool"]["scikit-build"]["sdist"]["include"] == ["src/outrider/heads/shipped/**"]
