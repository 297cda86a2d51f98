"""Drafters under training: one module a method, over shared layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.registry import Registry

if TYPE_CHECKING:
    from outrider.train.modules.base import DrafterModule

MODULES: Registry[type[DrafterModule]] = Registry(
    "training method",
    {
        "eagle3": "outrider.train.modules.eagle3:Eagle3",
        "eagle": "outrider.train.modules.eagle:Eagle",
        "medusa": "outrider.train.modules.medusa:Medusa",
        "mtp": "outrider.train.modules.mtp:MTP",
    },
)
