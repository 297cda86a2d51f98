"""Speculative decoding that can be seen in the clock and nowhere else.

>>> from outrider import LLM, SamplingParams
>>> llm = LLM("smollm2-135m")
>>> llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].text
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "outrider.engine.llm",
    "SamplingParams": "outrider.core.sampling",
    "StructuredOutputs": "outrider.core.structured",
    "SpeculativeConfig": "outrider.core.config",
    "EngineConfig": "outrider.core.config",
    "RequestOutput": "outrider.engine.outputs",
    "SpeculationStats": "outrider.engine.outputs",
    "Delta": "outrider.engine.outputs",
    "OutriderError": "outrider.core.errors",
    "UsageError": "outrider.core.errors",
}

if TYPE_CHECKING:
    from outrider.core.config import EngineConfig, SpeculativeConfig
    from outrider.core.errors import OutriderError, UsageError
    from outrider.core.sampling import SamplingParams
    from outrider.core.structured import StructuredOutputs
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import Delta, RequestOutput, SpeculationStats

__all__ = [
    "LLM",
    "Delta",
    "EngineConfig",
    "OutriderError",
    "RequestOutput",
    "SamplingParams",
    "SpeculationStats",
    "SpeculativeConfig",
    "StructuredOutputs",
    "UsageError",
]


def __getattr__(name: str) -> object:
    """Import what is asked for, when it is asked for: torch takes seconds."""
    import importlib

    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'outrider' has no attribute {name!r}")
