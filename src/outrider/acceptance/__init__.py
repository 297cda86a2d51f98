"""Acceptance rules: what of a draft is kept. One per module, chosen by name through the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.registry import Registry

if TYPE_CHECKING:
    from outrider.acceptance.base import AcceptanceRule

RULES: Registry[type[AcceptanceRule]] = Registry(
    "acceptance rule",
    {
        "coupled": "outrider.acceptance.coupled:Coupled",
        "rejection": "outrider.acceptance.rejection:Rejection",
        "block": "outrider.acceptance.block:Block",
        "typical": "outrider.acceptance.typical:Typical",
    },
)
