"""What a request has used, and what speculation did for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.engine.outputs import SpeculationStats
from outrider.serve.protocol.answers import Usage

if TYPE_CHECKING:
    from outrider.engine.outputs import RequestOutput


def usage(outputs: Sequence[RequestOutput], choices: int) -> Usage:
    """Usage of one HTTP request. choices: answers to each prompt, which follow each other in ``outputs``."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs[::choices])
    completion = sum(len(output.token_ids) for output in outputs)
    total = SpeculationStats.total(output.statistics for output in outputs)
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": sum(output.cached_tokens for output in outputs[::choices])},
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "speculative": {
            "rounds": total.rounds,
            "drafted": total.drafted,
            "accepted": total.accepted,
            "acceptance_rate": total.acceptance_rate,
            "mean_acceptance_length": total.mean_acceptance_length,
            "accepted_by_position": total.accepted_by_position,
            "drafted_by_source": total.drafted_by_source,
            "accepted_by_source": total.accepted_by_source,
            "failures": total.failures,
            "draft_seconds": total.draft_seconds,
            "verify_seconds": total.verify_seconds,
            "accept_seconds": total.accept_seconds,
            "lossy": any(output.lossy for output in outputs),
        },
    }
