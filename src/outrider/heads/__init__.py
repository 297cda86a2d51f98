"""Heads: drafters that were trained for a target and read its hidden states. What they are, and their files.

A `Layout` is how some engine writes one down. `outrider.heads.load` reads any, `outrider.heads.save` writes one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.registry import Registry

if TYPE_CHECKING:
    from outrider.heads.base import Layout

LAYOUTS: Registry[type[Layout]] = Registry(
    "head layout",
    {
        "speculators": "outrider.heads.speculators:SpeculatorsLayout",
        "medusa": "outrider.heads.medusa:MedusaLayout",
        "medusa-lm-head": "outrider.heads.medusa:LmHeadLayout",
        "eagle3": "outrider.heads.eagle3:Eagle3Layout",
        "eagle": "outrider.heads.eagle:EagleLayout",
        "eagle-sglang": "outrider.heads.eagle:SGLangEagleLayout",
        "mtp": "outrider.heads.mtp:MtpLayout",
        "mtp-mimo": "outrider.heads.mtp:MimoLayout",
    },
)
"""In the order in which they are tried on a checkpoint."""
