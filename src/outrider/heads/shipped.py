"""Heads that come with their target: inside this package, or within the target's own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.config import LEARNED

if TYPE_CHECKING:
    from outrider.models.loader import Model

SHIPPED = Path(__file__).with_name("shipped")
"""``<target's alias>/<method>/`` with config.json and model.safetensors."""


def shipped_head(target_name: str, method: str) -> Path | None:
    """The folder of the head that this package brings for a target, named by its alias; None if there is none."""
    return _shipped(target_name).get(method)


def shipped_methods(target_name: str) -> tuple[str, ...]:
    """Methods for which this package brings a head of that target, best first."""
    return tuple(_shipped(target_name))


def heads_at_hand(target: Model) -> Mapping[str, Path]:
    """By method, best first: what is shipped, and the MTP module of a target whose checkpoint carries one."""
    found = {**_shipped(target.name)}
    if target.source is not None and _carries_module(target.source):
        found["mtp"] = target.source
    return {method: found[method] for method in LEARNED if method in found}


def _shipped(target_name: str) -> Mapping[str, Path]:
    folders = {path.name: path for path in SHIPPED.iterdir()} if SHIPPED.is_dir() else {}
    if target_name not in folders:  # a name from a listing can lead nowhere else
        return {}
    heads = {method: folders[target_name] / method for method in LEARNED}
    return {method: folder for method, folder in heads.items() if (folder / "config.json").exists()}


def _carries_module(source: Path) -> bool:
    from outrider.heads import LAYOUTS
    from outrider.heads.checkpoint import CONFIG, Checkpoint
    from outrider.models.config_hf import read_json

    if not (source / CONFIG).exists() or not read_json(source / CONFIG).get("num_nextn_predict_layers"):
        return False
    checkpoint = Checkpoint(source)
    return any(LAYOUTS.get(layout)().method(checkpoint) for layout in ("mtp", "mtp-mimo"))
