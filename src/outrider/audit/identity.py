"""Are the tokens the same with speculation on and off? And where not, was it rounding or a fault?

An executor whose additions depend on the number of rows can flip a choice between two tokens that are all but equal. A
difference counts as such a *near-tie* only if the target itself, run plainly, scores the two tokens within a bound of
each other; anything else is a difference. After either, the rest of the two answers cannot be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from outrider.core.noise import gumbel
from outrider.core.sampling import SamplingState
from outrider.executors.base import Segment
from outrider.grammar import mask_for

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams
    from outrider.engine.llm import LLM
    from outrider.engine.outputs import RequestOutput

NEAR_TIE = 1e-4
"""Logits closer than this may change places by float32 rounding alone."""
MOST_FLIPS = 1 / 2000
"""Near-ties that a run may show, as a share of its tokens."""
METHODS = ("ngram", "suffix", "recycle", "suffix+recycle", "draft_model")
"""What an audit of a model goes through: every drafter, and a cascade."""
KINDS: Mapping[str, Mapping[str, float]] = {
    "greedy": {},
    "sampled": {
        "temperature": 0.8,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.2,
    },
}
"""Sampling parameters that an audit runs under, by name."""


@dataclass(frozen=True)
class Difference:
    """Where two answers part: position in the output, both tokens, and how far apart the target scores them."""

    request: int
    position: int
    expected: int
    found: int
    margin: float


@dataclass(frozen=True)
class IdentityReport:
    """tokens: compared, up to and with the first difference of each answer."""

    requests: int
    tokens: int
    differences: tuple[Difference, ...]
    near_ties: tuple[Difference, ...]

    @property
    def identical(self) -> bool:
        return not self.differences and not self.near_ties

    @property
    def passes(self) -> bool:
        """No difference, and no more near-ties than `MOST_FLIPS` allows (one in any case)."""
        return not self.differences and len(self.near_ties) <= max(1.0, MOST_FLIPS * self.tokens)

    def __str__(self) -> str:
        verdict = "identical" if self.identical else f"{len(self.differences)} differences"
        ties = f", {len(self.near_ties)} near-ties" if self.near_ties else ""
        return f"{verdict}{ties} in {self.tokens} tokens of {self.requests} answers"


def compare(
    llm: LLM,
    params: Sequence[SamplingParams],
    expected: Sequence[RequestOutput],
    found: Sequence[RequestOutput],
    *,
    near_tie: float = NEAR_TIE,
) -> IdentityReport:
    """Compare answers of plain decoding (``expected``) with others to the same prompts and parameters, one by one.

    llm: the model, asked again where two answers part. near_tie: bound in logits; 0 admits none.
    """
    tokens = 0
    differences: list[Difference] = []
    near_ties: list[Difference] = []
    for number, (own, left, right) in enumerate(zip(params, expected, found, strict=True)):
        position = left.first_difference(right)
        if position is None:
            tokens += len(left.token_ids)
            continue
        tokens += position + 1
        pair = [_token_at(answer.token_ids, position) for answer in (left, right)]
        margin = _margin(llm, own, left, position, pair)
        difference = Difference(number, position, pair[0], pair[1], margin)
        (near_ties if margin < near_tie else differences).append(difference)
    return IdentityReport(len(expected), tokens, tuple(differences), tuple(near_ties))


def _token_at(tokens: Sequence[int], position: int) -> int:
    return tokens[position] if position < len(tokens) else -1


def _margin(llm: LLM, params: SamplingParams, answer: RequestOutput, position: int, pair: Sequence[int]) -> float:
    """How far apart the target scores two tokens after the first ``position`` tokens of an answer.

    The scores are those that decide: logits after penalties and bans; with a temperature, log p + noise. Infinite where
    one of the tokens could not come at all, or an answer just ends.
    """
    if -1 in pair:
        return math.inf
    prompt, output = answer.prompt_token_ids, answer.token_ids[:position]
    executor = llm.executor
    seq = executor.open()
    try:
        rows = [*prompt, *output]
        logits = executor.forward([Segment.chain(seq, rows, logits=[len(rows) - 1])]).logits[0]
    finally:
        executor.close(seq)
    # At temperature 1 the log-probabilities of the greedy transform differ by what the logits differ by.
    scored = replace(params, temperature=1.0) if params.greedy else params
    mask = mask_for(llm.model, params)
    state = SamplingState(replace(scored, seed=answer.seed), llm.model.config.vocab_size, prompt, _ends(llm), mask)
    for token in output:
        state.commit(token)
    scores = state.logprobs(logits)[list(pair)].numpy().astype(np.float64)
    if not params.greedy:
        scores = scores + gumbel(state.seed, state.position, np.array(pair))
    return float(abs(scores[0] - scores[1])) if np.isfinite(scores).all() else math.inf


def _ends(llm: LLM) -> Sequence[int]:
    return llm.model.config.eos_token_ids
