"""MTP: a multi-token prediction module, which some models are trained with and others can be given.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2.
"""

from __future__ import annotations

from outrider.drafters.feature_drafter import FeatureDrafter


class MtpDrafter(FeatureDrafter):
    """The feature is the last layer's state after the target's final norm. One module is applied again and again."""

    name = "mtp"
