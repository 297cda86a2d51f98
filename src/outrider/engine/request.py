"""One running request: its tokens, its stop rules, its statistics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.core.errors import ContextLengthError, NoTokenLeftError, OutriderError, UsageError
from outrider.core.sampling import SamplingParams, SamplingState
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import SequenceView
from outrider.engine.outputs import Delta, RequestOutput, RequestTiming, SpeculationStats, TokenLogprob
from outrider.engine.stops import OutputStream
from outrider.grammar import mask_for

if TYPE_CHECKING:
    from outrider.engine.speculators import Speculation
    from outrider.models.loader import Model


class Request:
    """Created by `Engine.new_request`.

    seq: the executor's handle while the request is running, None otherwise.
    page_digests: names of the full pages of its text (see `PrefixCache`). entered_pages: how many pages of its sequence
        the cache has seen.
    client: who asked for it; clients take turns (see `Waiting`). turn: its number among all requests that were started;
        None as long as it never was.
    cached_tokens: prompt tokens that were in the prefix cache when the request was started. preemptions: times that it
        had to make way.
    """

    def __init__(
        self,
        request_id: int,
        model: Model,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        speculation: Speculation,
        tenant: str,
        client: str,
        priority: int,
        max_context: int,
        lossy: bool,
    ) -> None:
        """Raises ContextLengthError if the prompt leaves no room for a token, SamplingParamsError for bad token ids or
        a constraint on the output that cannot be used.
        """
        vocab_size = model.config.vocab_size
        _check_prompt(prompt, vocab_size, max_context)
        self.id = request_id
        self.priority = priority
        self.client = client
        self.turn: int | None = None
        self.speculation = speculation
        self.lossy = lossy
        mask = mask_for(model, params, tenant)
        self.sampling = SamplingState(params, vocab_size, prompt, model.config.eos_token_ids, mask)
        self.max_tokens = min(params.max_tokens or max_context, max_context - len(prompt))
        if params.min_tokens > self.max_tokens:
            raise ContextLengthError(
                f"min_tokens={params.min_tokens} does not fit: the context of {max_context} leaves {self.max_tokens} "
                f"tokens after a prompt of {len(prompt)}"
            )
        self.output = OutputStream(self.sampling, self.max_tokens, model.tokenizer)
        self.view = SequenceView(
            request_id, tenant, list(prompt), len(prompt), self.sampling, self.output.remaining - 1
        )
        self.seq: int | None = None
        self.page_digests: list[bytes] = []
        self.entered_pages = 0
        self.cached_tokens = 0
        self.preemptions = 0
        self.error: str | None = None
        self.impossible = False
        self.statistics = SpeculationStats()
        self.timing = RequestTiming(arrival=time.perf_counter())
        self.logprobs: list[TokenLogprob] | None = [] if params.logprobs is not None else None
        self._delta_tokens: list[int] = []
        self._delta_drafted: list[bool] = []

    @property
    def prompt(self) -> list[int]:
        return self.view.tokens[: self.view.num_prompt_tokens]

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def may_start_cached(self) -> bool:
        """Whether its prefix may be taken from a cache."""
        return not self.speculation.drafter.wants.whole_prompt

    def admitted(self, found: int, turn: int) -> None:
        """The request runs from now on; ``found`` tokens of it were in the prefix cache. turn: used if it is the first
        time.
        """
        if self.turn is None:
            self.turn = turn
            self.timing.started = time.perf_counter()
            self.cached_tokens = found

    def emit(self, tree: DraftTree, path: Sequence[int], token: int) -> list[int]:
        """Emit the accepted nodes of ``tree`` and the token after them, up to a stop. Returns the tokens emitted."""
        emitted: list[int] = []
        now = time.perf_counter()
        for node in (*path, None):
            following = token if node is None else tree.tokens[node]
            emitted.append(following)
            self.view.tokens.append(following)
            self.timing.token_times.append(now)
            self._delta_tokens.append(following)
            self._delta_drafted.append(node is not None)
            goes_on = self.output.push(following)
            if node is not None:
                self._count_accepted(tree, node, depth=len(emitted) - 1)
            if not goes_on:
                break
        self._count_round(tree, len(emitted), accepted=min(len(path), len(emitted)))
        self.view.room = self.output.remaining - 1
        if self.finished:
            self.timing.finished = now
        return emitted

    def fail(self, error: Exception) -> None:
        """End the request because the model's answer for it cannot be used, or never came."""
        self.error = str(error) if isinstance(error, OutriderError) else f"{type(error).__name__}: {error}"
        self.impossible = isinstance(error, NoTokenLeftError)
        self.output.abort("error")
        self.timing.finished = time.perf_counter()

    def abort(self) -> None:
        """End the request with what was committed so far."""
        if not self.finished:
            self.output.abort()
            self.timing.finished = time.perf_counter()

    def take_delta(self) -> Delta:
        """What was added since the last call, with the whole answer if the request has ended."""
        delta = Delta(
            self.output.take_text(), self._delta_tokens, self._delta_drafted, self.result() if self.finished else None
        )
        self._delta_tokens, self._delta_drafted = [], []
        return delta

    def result(self) -> RequestOutput:
        """The answer; only for a request that has ended."""
        assert self.output.finish_reason is not None
        return RequestOutput(
            request_id=self.id,
            prompt_token_ids=self.prompt,
            token_ids=list(self.output.token_ids),
            text=self.output.text,
            finish_reason=self.output.finish_reason,
            stop_reason=self.output.stop_reason,
            seed=self.sampling.seed,
            lossy=self.lossy,
            statistics=self.statistics,
            timing=self.timing,
            logprobs=self.logprobs,
            error=self.error,
            impossible=self.impossible,
            cached_tokens=self.cached_tokens,
            preemptions=self.preemptions,
        )

    def _count_accepted(self, tree: DraftTree, node: int, depth: int) -> None:
        self.statistics.accepted += 1
        self.statistics.count_position(depth)
        for source in tree.sources[node]:
            counts = self.statistics.accepted_by_source
            counts[source] = counts.get(source, 0) + 1

    def _count_round(self, tree: DraftTree, emitted: int, *, accepted: int) -> None:
        statistics = self.statistics
        statistics.rounds += 1
        statistics.committed += emitted
        statistics.drafted += len(tree)
        statistics.drafted_rounds += bool(tree.tokens)
        outcome = (len(tree), accepted)
        statistics.rounds_by_draft[outcome] = statistics.rounds_by_draft.get(outcome, 0) + 1
        for sources in tree.sources:
            for source in sources:
                statistics.drafted_by_source[source] = statistics.drafted_by_source.get(source, 0) + 1


def _check_prompt(prompt: Sequence[int], vocab_size: int, max_context: int) -> None:
    if not prompt:
        raise UsageError("the prompt has no tokens; give at least one")
    if len(prompt) >= max_context:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens; the context holds {max_context}, the answer included: shorten it"
        )
    for token in prompt:
        if not 0 <= token < vocab_size:
            raise UsageError(f"the prompt holds token {token}; the vocabulary ends at {vocab_size - 1}")


def trim(tree: DraftTree, room: int, end_ids: frozenset[int], *, chain: bool) -> DraftTree:
    """Cut what cannot be of use, whatever the drafter: nodes deeper than ``room``, nodes below a token that ends the
    request and, where the rule judges chains only, every child but the first.

    The cut depends on a node's ancestors and on its place among its siblings, never on the node's own token, so that it
    does not bias a rule that needs the proposals as they were drawn.
    """
    kept: set[int] = set()
    open_parents = {ROOT}
    depths = {ROOT: 0}
    with_child: set[int] = set()
    for node, parent in enumerate(tree.parents):
        if parent not in open_parents or depths[parent] >= room or (chain and parent in with_child):
            continue
        kept.add(node)
        with_child.add(parent)
        depths[node] = depths[parent] + 1
        if tree.tokens[node] not in end_ids:
            open_parents.add(node)
    return tree if len(kept) == len(tree) else tree.keep(kept)
