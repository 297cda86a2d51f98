"""A bounded soak: no request lost, no text changed, memory flat. OUTRIDER_SOAK_SECONDS=300 makes it a long one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from outrider.core.config import SpeculativeConfig
from tests.serve.support import lively, open_llm, serving

SECONDS = float(os.environ.get("OUTRIDER_SOAK_SECONDS", "4"))
LONG_ENOUGH_FOR_MEMORY = 60


def test_a_busy_server_loses_nothing_and_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    from soak import Soak

    config = SpeculativeConfig(method="suffix+recycle", num_speculative_tokens=6, suffix_decoding_max_cached_requests=8)
    with serving(open_llm(lively, config)) as running:
        running.target.pause = 0.001
        report = Soak(running.url, "tiny", clients=16, seconds=SECONDS, key=None).run()
        # Within seconds, memory is that of caches that fill.
        assert report.problems(0.03 if SECONDS >= LONG_ENOUGH_FOR_MEMORY else 1.0) == []
        assert report.answered > 20
        assert report.left > 0
        assert running.settled()
