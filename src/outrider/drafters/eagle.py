"""EAGLE and EAGLE-3: one decoder layer that drafts from the target's hidden states.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (2024) and "EAGLE-3: Scaling up
Inference Acceleration of Large Language Models via Training-Time Test" (2025). The tree is EAGLE-2's for both.
"""

from __future__ import annotations

from outrider.drafters.feature_drafter import FeatureDrafter


class EagleDrafter(FeatureDrafter):
    """The feature is the last layer's state after the target's final norm; the output matrix is the target's."""

    name = "eagle"


class Eagle3Drafter(FeatureDrafter):
    """The feature joins the states of a low, a middle and a high layer; the output is a reduced vocabulary."""

    name = "eagle3"
