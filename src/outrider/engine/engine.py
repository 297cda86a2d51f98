"""The engine: rounds of plan -> propose -> forward -> accept -> commit -> emit over the running batch.

One kind of round serves everything. A running request has tokens that are not in the KV cache yet: its prompt at first,
later just the last committed token, the root. A round forwards those and the draft tree below the root in one pass.
While more of a prompt is left than its share of the round, that share is a chunk, and it emits nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outrider.core.errors import ContextLengthError, NonFiniteLogitsError
from outrider.core.tenants import DEFAULT_TENANT
from outrider.core.tree import EMPTY, DraftTree
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler
from outrider.engine.share import NO_DRAFT, Draft, Share, distribute
from outrider.engine.stats import EngineStats

if TYPE_CHECKING:
    from outrider.acceptance.base import AcceptanceRule, Verdict
    from outrider.core.config import EngineConfig, SpeculativeOverride
    from outrider.core.sampling import SamplingParams
    from outrider.drafters.base import Observation
    from outrider.drafters.health import AcceptanceWatch
    from outrider.engine.planner import Planner
    from outrider.engine.prefix_cache import PrefixCache
    from outrider.engine.speculators import Proposal, Speculators
    from outrider.executors.base import Executor
    from outrider.models.loader import Model

log = logging.getLogger(__name__)


class Engine:
    """Runs requests to their end. Contains no model code and no special case for any drafter or rule."""

    def __init__(
        self,
        model: Model,
        executor: Executor,
        cache: PrefixCache,
        speculators: Speculators,
        rule: AcceptanceRule,
        planner: Planner,
        watch: AcceptanceWatch,
        config: EngineConfig,
    ) -> None:
        self._model = model
        self._executor = executor
        self._cache = cache
        self._speculators = speculators
        self._rule = rule
        self._planner = planner
        self._watch = watch
        self._config = config
        self._scheduler = Scheduler(executor, cache, config)
        self._stats = EngineStats(kv_tokens_total=executor.total_tokens)
        self._next_id = 0
        self._observe_seconds = 0.0

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine was made, brought up to date at the end of every round. Not to be changed."""
        return self._stats

    def new_request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        tenant: str = DEFAULT_TENANT,
        priority: int = 0,
        speculation: SpeculativeOverride | None = None,
        client: str | None = None,
    ) -> Request:
        """A request that can be run, not queued yet.

        tenant: prefix cache and drafters share what they remember within a tenant, never across. priority: a lower one
        is served first. speculation: what to draft with in place of the engine's own. client: who takes turns with
        others of the same priority; default: the tenant.
        Raises ContextLengthError, SamplingParamsError, or ConfigError for speculation that cannot be had.
        """
        request = Request(
            self._next_id,
            self._model,
            prompt,
            params,
            speculation=self._speculators.choose(speculation, tenant),
            tenant=tenant,
            client=tenant if client is None else client,
            priority=priority,
            max_context=self._executor.max_context,
            lossy=not self._rule.lossless,
        )
        need = len(request.view.tokens) + request.max_tokens
        if need > self._executor.total_tokens:
            raise ContextLengthError(
                f"prompt and answer need {need} tokens of KV cache, which holds {self._executor.total_tokens}: "
                "lower max_tokens or raise kv_tokens or kv_cache_memory"
            )
        self._next_id += 1
        return request

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._scheduler.submit(request)
        self._count_requests()

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        tenant: str = DEFAULT_TENANT,
        priority: int = 0,
        speculation: SpeculativeOverride | None = None,
    ) -> Request:
        """`new_request` and `submit` in one."""
        request = self.new_request(prompt, params, tenant, priority, speculation)
        self.submit(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, with what it has committed."""
        request.abort()
        self._release(request)
        self._count_requests()

    def step(self) -> list[Request]:
        """One round. Returns the requests that it emitted tokens for, or that it ended; ended ones have left the batch.

        Whatever the executor or the rule raises ends the requests of the batch, finish reason "error"; the engine can
        go on with others. What is no Exception (a Ctrl-C) is passed on, with nothing of the round left behind.
        """
        started = time.perf_counter()
        try:
            shares = self._plan()
        except Exception as error:
            # If nobody runs, it was the next request in line that could not be started.
            first = self._scheduler.waiting.first
            return self._batch_failed(self._scheduler.running or ([first] if first else []), error)
        if not shares:
            return []
        proposed = time.perf_counter()
        judged = [share for share in shares if not share.chunk]
        try:
            with self._rows_dropped_on_error(shares):
                self._forward(shares)
                verified = time.perf_counter()
                verdicts = self._accept(judged)
                accepted = time.perf_counter()
                emitted = self._commit(shares, verdicts)
            committed = time.perf_counter()
            observations = self._observations(shares, verdicts, emitted)
        except Exception as error:
            return self._batch_failed([share.request for share in shares], error)
        self._speculators.observe(observations)
        observed = time.perf_counter()
        self._observe_seconds = (observed - committed) / len(shares)
        for share in judged:
            if share.request.finished:
                self._release(share.request)
        seconds = {
            "draft": proposed - started + observed - committed,
            "verify": verified - proposed,
            "accept": accepted - verified,
            "engine": committed - accepted + time.perf_counter() - observed,
        }
        if len(judged) == len(shares):
            self._planner.observe_beside(seconds["accept"] + seconds["engine"])
        self._stats.add_times(**seconds)
        for share in shares:
            share.request.statistics.add_times(parts=len(shares), **seconds)
        self._count_requests()
        return [share.request for share in judged]

    # -- plan and propose ----------------------------------------------------------------------------------------------

    def _plan(self) -> list[Share]:
        """Who takes part in the round, with which rows: decoding requests, chunks of prompts, and drafts."""
        self._admit()
        decoding, preempted = self._scheduler.secure_roots()
        self._make_wait(preempted)
        above = {request.id: 1 for request in decoding}
        chunks, preempted = self._scheduler.chunks(self._rows_for_prompts(decoding), decoding)
        self._make_wait(preempted)
        above |= chunks
        taking_part = [request for request in self._scheduler.running if request.id in above]
        ready = [request for request in taking_part if above[request.id] == self._scheduler.unforwarded(request)]
        drafts = self._propose(ready, above, self._config.max_batched_tokens - sum(above.values()))
        shares = [self._share(request, above[request.id], drafts.get(request.id)) for request in taking_part]
        self._scheduler.make_room([(share.request, share.rows) for share in shares])
        return shares

    def _rows_for_prompts(self, decoding: Sequence[Request]) -> int:
        """Rows that are left for prompts, those for drafts set aside, in a round that is not to keep others waiting."""
        rows = self._config.max_batched_tokens - len(decoding)
        if not decoding or not self._scheduler.filling:
            return rows
        drafts = sum(request.speculation.full.nodes for request in decoding)
        usual = len(decoding) + self._stats.planner_budget
        return self._planner.chunk_beside(usual, max(rows - drafts, (rows + 1) // 2))

    def _admit(self) -> None:
        for request in self._scheduler.admit():
            if not request.preemptions:
                prompt = request.view.num_prompt_tokens
                queried = prompt if self._config.enable_prefix_caching and request.may_start_cached else 0
                self._stats.count_started(prompt, queried, request.cached_tokens)
                self._speculators.open(request)

    def _make_wait(self, preempted: Sequence[Request]) -> None:
        for request in preempted:
            self._stats.preemptions += 1
            self._speculators.pause(request)

    def _propose(self, ready: Sequence[Request], above: Mapping[int, int], most: int) -> dict[int, Draft]:
        """Drafts by request id for all of ``ready``, cut down to what pays, to ``most`` nodes and to the KV there is.

        above: rows of each request before its draft.
        """
        for request in ready:
            request.view.noise_stream = self._rule.draft_stream(request.sampling.position)
        vocab_size = self._model.config.vocab_size
        proposals = self._speculators.propose(ready, len(ready), self._planner.price, vocab_size)
        if not proposals:
            self._stats.count_planned(len(ready), 0, 0)
            return {request.id: NO_DRAFT for request in ready}
        asked = [request for request in ready if request.id in proposals]
        trees = self._selected(asked, proposals, len(ready), most)
        rows = {r.id: self._rows_for(trees[r.id], proposals[r.id]) for r in asked}
        fits = self._scheduler.fit_drafts([(r, above[r.id], rows.get(r.id, 0)) for r in ready])
        drafts: dict[int, Draft] = {}
        for request in ready:
            proposal = proposals.get(request.id)
            if proposal is None:
                drafts[request.id] = NO_DRAFT
                continue
            tree = trees[request.id]
            if fits[request.id] < rows[request.id]:
                # Parents come first.
                tree = EMPTY if self._must_stay_whole(tree) else tree.keep(set(range(fits[request.id])))
            drafts[request.id] = Draft(tree, proposal.tree, proposal.seconds)
        proposed = sum(len(draft.proposed) for draft in drafts.values())
        self._stats.count_planned(len(ready), proposed, sum(len(draft.tree) for draft in drafts.values()))
        return drafts

    def _selected(
        self, asked: Sequence[Request], proposals: Mapping[int, Proposal], batch_size: int, most: int
    ) -> dict[int, DraftTree]:
        """The proposed trees without the nodes that the planner leaves out, ``most`` nodes in all."""
        trees = [proposals[request.id].tree for request in asked]
        if any(map(self._must_stay_whole, trees)):
            chosen: list[DraftTree] = []
            for request, tree in zip(asked, trees, strict=True):
                chosen.append(tree if self._rows_for(tree, proposals[request.id]) <= most else EMPTY)
                most -= len(chosen[-1])
        else:
            chosen = self._planner.select(asked, trees, batch_size, most)
        return {request.id: tree for request, tree in zip(asked, chosen, strict=True)}

    def _must_stay_whole(self, tree: DraftTree) -> bool:
        """Whether the rule needs all of the tree or nothing of it."""
        return self._rule.needs_all_proposals and bool(tree.logprobs)

    def _rows_for(self, tree: DraftTree, proposal: Proposal) -> int:
        """Rows that there has to be room for, or the tree is cut.

        One that must stay whole counts with all nodes that were asked for: an end token that was drawn makes it
        shorter, and a draft that is verified or not for what was drawn would bias the rule.
        """
        return proposal.most if self._must_stay_whole(tree) else len(tree)

    def _share(self, request: Request, rows: int, draft: Draft | None) -> Share:
        assert request.seq is not None
        start = self._executor.length(request.seq)
        tokens = request.view.tokens[start : start + rows]
        return Share(request, start, tokens, draft or NO_DRAFT, chunk=draft is None)

    # -- forward, commit, emit -----------------------------------------------------------------------------------------

    @contextmanager
    def _rows_dropped_on_error(self, shares: Sequence[Share]) -> Iterator[None]:
        """A round that fails must leave no pending rows: the next one would take them for its own."""
        try:
            yield
        except BaseException:
            for share in shares:
                if share.request.seq is not None:
                    self._executor.commit(share.request.seq, ())
            raise

    def _batch_failed(self, requests: Sequence[Request], error: Exception) -> list[Request]:
        """End the requests of a round that could not be finished. Returns them."""
        ended = list(requests)
        log.error("a round of %d requests failed", len(ended), exc_info=error)
        for request in ended:
            if not request.finished:
                request.fail(error)
            self._release(request)
        self._count_requests()
        return ended

    def _forward(self, shares: Sequence[Share]) -> None:
        started = time.perf_counter()
        segments = [share.segment() for share in shares]
        layers = {layer for share in shares for layer in share.request.speculation.drafter.wants.hidden_layers}
        output = self._executor.forward(segments, sorted(layers))
        distribute(output, shares, segments)
        rows = sum(share.rows for share in shares if len(share.tokens) == 1)
        prompt_rows = sum(share.rows for share in shares) - rows
        self._planner.observe_forward(rows, prompt_rows, time.perf_counter() - started)

    def _accept(self, judged: Sequence[Share]) -> dict[int, Verdict]:
        """Verdicts by `id` of the share. A request whose own logits are broken ends here; the others go on."""
        verdicts: dict[int, Verdict] = {}
        for share in judged:
            try:
                verdicts[id(share)] = self._rule.accept([share.candidate()])[0]
            except NonFiniteLogitsError as error:
                share.request.fail(error)
        return verdicts

    def _commit(self, shares: Sequence[Share], verdicts: Mapping[int, Verdict]) -> dict[int, list[int]]:
        """Keep the accepted rows' KV and emit the tokens. Returns them by `id` of the share; none for broken ones."""
        emitted: dict[int, list[int]] = {}
        # A round with prompt rows in it does not tell what drafts are worth.
        nodes = [len(share.tree) for share in shares] if all(len(share.tokens) == 1 for share in shares) else []
        for share in shares:
            request, verdict = share.request, verdicts.get(id(share))
            assert request.seq is not None
            if request.finished:
                self._executor.commit(request.seq, ())
                continue
            self._executor.commit(request.seq, share.accepted_rows(verdict))
            tokens: list[int] = []
            if verdict is not None:
                tokens = request.emit(share.tree, verdict.path, verdict.token)
                if request.logprobs is not None:
                    request.logprobs.extend(share.logprobs(verdict, len(tokens)))
                self._learn(share, verdict, tokens, nodes)
            self._cache.enter(request)
            emitted[id(share)] = tokens
        return emitted

    def _observations(
        self, shares: Sequence[Share], verdicts: Mapping[int, Verdict], emitted: Mapping[int, list[int]]
    ) -> list[tuple[Request, Observation]]:
        """What drafters are to be told of the round. Requests whose own logits were broken are left out."""
        return [
            (share.request, share.observation(self._executor, verdicts.get(id(share)), emitted[id(share)]))
            for share in shares
            if id(share) in emitted
        ]

    def _learn(self, share: Share, verdict: Verdict, emitted: Sequence[int], nodes: Sequence[int]) -> None:
        """Count what a request's part of the round came to, and let planner and pace see it.

        nodes: of each request's tree; empty for a round that does not tell what they are worth.
        """
        request, draft = share.request, share.draft
        self._stats.count_emitted(share.tree, verdict.path, len(emitted))
        if draft.seconds is None:
            return
        self._watch.observe(share.tree, verdict.path)
        self._planner.observe_committed(request, draft.proposed, emitted)
        pace = request.speculation.pace(request)
        pace.observe_committed(draft.proposed, emitted)
        if nodes:
            profit = self._planner.profit(share.tree, len(emitted), nodes)
            pace.observe_profit(len(nodes), profit - draft.seconds - self._observe_seconds)

    def _release(self, request: Request) -> None:
        """Take a request that has ended out of the batch or the queue."""
        if self._scheduler.remove(request):
            self._speculators.close(request)
            self._planner.forget(request)

    def _count_requests(self) -> None:
        self._stats.running = len(self._scheduler.running)
        self._stats.waiting = len(self._scheduler.waiting)
        self._stats.kv_tokens_used = self._cache.used_tokens
        self._stats.drafter_failures = self._speculators.failures
        self._stats.failures_by_drafter = dict(self._speculators.failures_by_drafter)
