"""Acceptance rules: what of a draft is kept. One per module, chosen by name through the registry.

The verifier can be used by itself, on tensors: `rejection_sample`, `block_verify`, `coupled_verify` and
`typical_accept` judge many drafts at once. They are imported when first asked for, and PyTorch with them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outrider.core.registry import Registry

if TYPE_CHECKING:
    from outrider.acceptance.base import AcceptanceRule
    from outrider.acceptance.batch import VerifyResult
    from outrider.acceptance.block import block_verify
    from outrider.acceptance.coupled import coupled_verify
    from outrider.acceptance.rejection import rejection_sample
    from outrider.acceptance.typical import typical_accept

__all__ = ["RULES", "VerifyResult", "block_verify", "coupled_verify", "rejection_sample", "typical_accept"]

RULES: Registry[type[AcceptanceRule]] = Registry(
    "acceptance rule",
    {
        "coupled": "outrider.acceptance.coupled:Coupled",
        "rejection": "outrider.acceptance.rejection:Rejection",
        "block": "outrider.acceptance.block:Block",
        "typical": "outrider.acceptance.typical:Typical",
    },
)

_EXPORTS = {
    "VerifyResult": "batch",
    "block_verify": "block",
    "coupled_verify": "coupled",
    "rejection_sample": "rejection",
    "typical_accept": "typical",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
