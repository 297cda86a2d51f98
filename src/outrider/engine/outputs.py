"""What a request returns: text, tokens, and what speculation did for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from outrider.core.errors import OutriderError

FinishReason = Literal["stop", "length", "aborted", "error"]


@dataclass
class SpeculationStats:
    """Counts and times of speculation, for one request or (by `total`) for many. DESIGN's words, everywhere the same.

    rounds: rounds of propose, verify, accept, commit. The one that ends the prefill is one; chunks before it are not.
    drafted: draft tokens that the target verified.
    accepted: those of them that the request emitted; nothing after a stop counts.
    committed: tokens that rounds emitted, corrections and bonus tokens included.
    accepted_by_position: accepted draft tokens by depth in the tree (index 0: children of the root).
    drafted_rounds: rounds that had anything to verify.
    rounds_by_draft: (draft tokens verified, accepted) -> rounds in which it came to that; plain rounds are (0, 0).
    drafted_by_source, accepted_by_source: the same counts by drafter; a token that two proposed counts for both.
    failures: rounds in which the drafter failed and the round went on as plain decoding.
    draft_seconds, verify_seconds, accept_seconds: time in the drafter (observing included), in the target's forward
        passes, and in acceptance; a batch's time is shared equally by its requests.
    engine_seconds: the rest of the round.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    committed: int = 0
    drafted_rounds: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    rounds_by_draft: dict[tuple[int, int], int] = field(default_factory=dict)
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    engine_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float:
        """accepted / drafted; 0 if nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """committed / rounds: tokens emitted per target forward pass; 0 without a round."""
        return self.committed / self.rounds if self.rounds else 0.0

    @classmethod
    def total(cls, parts: Iterable[SpeculationStats]) -> SpeculationStats:
        """The sum of several."""
        result = cls()
        for part in parts:
            for name in ("rounds", "drafted", "accepted", "committed", "drafted_rounds", "failures"):
                setattr(result, name, getattr(result, name) + getattr(part, name))
            for name in ("draft_seconds", "verify_seconds", "accept_seconds", "engine_seconds"):
                setattr(result, name, getattr(result, name) + getattr(part, name))
            for depth, count in enumerate(part.accepted_by_position):
                result.count_position(depth, count)
            for outcome, count in part.rounds_by_draft.items():
                result.rounds_by_draft[outcome] = result.rounds_by_draft.get(outcome, 0) + count
            for mine, theirs in (
                (result.drafted_by_source, part.drafted_by_source),
                (result.accepted_by_source, part.accepted_by_source),
            ):
                for source, count in theirs.items():
                    mine[source] = mine.get(source, 0) + count
        return result

    def add_times(self, *, parts: int, draft: float, verify: float, accept: float, engine: float) -> None:
        """Add this request's share of a round's seconds, the round having ``parts`` requests."""
        self.draft_seconds += draft / parts
        self.verify_seconds += verify / parts
        self.accept_seconds += accept / parts
        self.engine_seconds += engine / parts

    def count_position(self, depth: int, count: int = 1) -> None:
        """Add ``count`` accepted tokens at ``depth`` (0: children of the root)."""
        while len(self.accepted_by_position) <= depth:
            self.accepted_by_position.append(0)
        self.accepted_by_position[depth] += count


@dataclass(frozen=True)
class TokenLogprob:
    """token_id and its log-probability under the target; top: the most likely tokens at that position, best first.

    Log-probabilities are of the model's own distribution, before temperature, penalties and truncation.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class RequestTiming:
    """Times in seconds on the clock of `time.perf_counter`.

    started: when the request first left the queue; 0 if it never did. token_times: when each output token was emitted.
    """

    arrival: float
    token_times: list[float] = field(default_factory=list)
    finished: float = 0.0
    started: float = 0.0

    @property
    def ttft(self) -> float:
        """Time to first token, from arrival."""
        return self.token_times[0] - self.arrival if self.token_times else 0.0

    @property
    def decode_seconds(self) -> float:
        """From the first token to the last."""
        return self.token_times[-1] - self.token_times[0] if self.token_times else 0.0


@dataclass
class RequestOutput:
    """The answer to one request.

    stop_reason: the stop string or token id that ended it; None for the model's own end of sequence, or for length.
    seed: the seed that was used, given or drawn; with it the same text comes again.
    error: why the request could not go on, if finish_reason is "error"; what was committed before stays.
    impossible: the error lies in what was asked for, and would come again.
    cached_tokens: prompt tokens that were in the prefix cache. preemptions: times that the request had to make way.
    lossy: a lossy acceptance rule was at work, so the text is not what the target alone would have written.
    """

    request_id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None
    seed: int
    lossy: bool
    statistics: SpeculationStats
    timing: RequestTiming
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None
    impossible: bool = False
    cached_tokens: int = 0
    preemptions: int = 0

    def raise_for_error(self) -> RequestOutput:
        """This answer itself, or OutriderError if the request could not go on."""
        if self.finish_reason == "error":
            raise OutriderError(self.error)
        return self

    def first_difference(self, other: RequestOutput) -> int | None:
        """Index of the first token at which two answers differ (one may just be longer); None if they are equal."""
        for index, (a, b) in enumerate(zip(self.token_ids, other.token_ids, strict=False)):
            if a != b:
                return index
        lengths = len(self.token_ids), len(other.token_ids)
        return None if lengths[0] == lengths[1] else min(lengths)


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer: what one round added.

    text: new text (may be empty while a stop string or an unfinished character is pending). token_ids: new tokens.
    drafted: for each of them, whether it was an accepted draft token. output: the whole answer, on the last piece.
    """

    text: str
    token_ids: list[int]
    drafted: list[bool]
    output: RequestOutput | None = None
