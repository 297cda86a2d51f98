"""The engine: rounds of plan -> propose -> forward -> accept -> commit -> emit over the running batch.

One kind of round serves everything. A running request has tokens that are not in the KV cache yet: its prompt at first,
later just the last committed token, the root. A round forwards those and the draft tree below the root in one pass.
While more of a prompt is left than one chunk, the request's share of the round is a chunk, and it emits nothing.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.core.errors import ContextLengthError, DraftError, NonFiniteLogitsError
from outrider.core.tree import DraftTree
from outrider.engine.request import Request, trim
from outrider.engine.share import Draft, Share, distribute

if TYPE_CHECKING:
    from outrider.acceptance.base import AcceptanceRule, Verdict
    from outrider.core.config import EngineConfig
    from outrider.core.sampling import SamplingParams
    from outrider.drafters.base import Budget, Drafter, Observation
    from outrider.engine.health import AcceptanceWatch
    from outrider.engine.planner import Planner
    from outrider.executors.base import Executor
    from outrider.models.loader import Model

log = logging.getLogger(__name__)


class Engine:
    """Runs requests to their end. Contains no model code and no special case for any drafter or rule."""

    def __init__(
        self,
        model: Model,
        executor: Executor,
        drafter: Drafter,
        rule: AcceptanceRule,
        planner: Planner,
        watch: AcceptanceWatch,
        config: EngineConfig,
    ) -> None:
        self._model = model
        self._executor = executor
        self._drafter = drafter
        self._rule = rule
        self._planner = planner
        self._watch = watch
        self._config = config
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._reserved: dict[int, int] = {}
        self._next_id = 0
        self._failures = 0

    def new_request(self, prompt: Sequence[int], params: SamplingParams, tenant: str = "default") -> Request:
        """A request that can be run, not queued yet. Raises ContextLengthError or SamplingParamsError."""
        request = Request(
            self._next_id,
            self._model,
            prompt,
            params,
            tenant=tenant,
            max_context=self._executor.max_context,
            lossy=not self._rule.lossless,
        )
        need = self._need(request)
        if need > self._executor.total_tokens:
            raise ContextLengthError(
                f"prompt and answer need {need} tokens of KV cache, which holds {self._executor.total_tokens}: "
                "lower max_tokens or raise kv_tokens"
            )
        self._next_id += 1
        return request

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def add(self, prompt: Sequence[int], params: SamplingParams, tenant: str = "default") -> Request:
        """`new_request` and `submit` in one."""
        request = self.new_request(prompt, params, tenant)
        self.submit(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, with what it has committed."""
        request.abort()
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._running:
            self._release(request)

    def step(self) -> list[Request]:
        """One round. Returns the requests that it emitted tokens for; those that have ended have left the batch."""
        started = time.perf_counter()
        self._admit()
        if not self._running:
            return []
        drafts = self._propose()
        proposed = time.perf_counter()
        shares = [self._share(request, drafts.get(request.id)) for request in self._running]
        with self._rows_dropped_on_error(shares):
            self._forward(shares)
            verified = time.perf_counter()
            judged = [share for share in shares if not share.chunk]
            verdicts = self._accept(judged)
            accepted = time.perf_counter()
            observations = self._commit(shares, verdicts)
            committed = time.perf_counter()
        self._call_drafter(lambda: self._drafter.observe(observations), [share.request for share in judged])
        observed = time.perf_counter()
        for share in judged:
            if share.request.finished:
                self._release(share.request)
        for share in shares:
            share.request.statistics.add_times(
                parts=len(shares),
                draft=proposed - started + observed - committed,
                verify=verified - proposed,
                accept=accepted - verified,
                engine=committed - accepted + time.perf_counter() - observed,
            )
        return [share.request for share in judged]

    # -- plan and propose ----------------------------------------------------------------------------------------------

    def _need(self, request: Request) -> int:
        """KV tokens that a request may come to use, in whole pages, draft rows included."""
        page = self._executor.page_size
        longest = len(request.view.tokens) + request.max_tokens + self._planner.max_nodes
        return (longest + page) // page * page

    def _admit(self) -> None:
        """Start waiting requests, oldest first, while batch and KV cache have room for all they may need."""
        while self._waiting and len(self._running) < self._config.max_batch_size:
            request = self._waiting[0]
            need = self._need(request)
            if sum(self._reserved.values()) + need > self._executor.total_tokens:
                return
            self._waiting.popleft()
            request.seq = self._executor.open()
            self._reserved[request.id] = need
            self._running.append(request)
            self._open_drafter(request)

    def _open_drafter(self, request: Request) -> None:
        self._call_drafter(lambda: self._drafter.open(request.view), [request])

    def _unforwarded(self, request: Request) -> list[int]:
        assert request.seq is not None
        return request.view.tokens[self._executor.length(request.seq) :]

    def _propose(self) -> dict[int, Draft]:
        """Drafts by request id, for the requests whose root is in this round, cut down to what pays."""
        chunk = self._config.prefill_chunk
        ready = [r for r in self._running if r.view.room > 0 and len(self._unforwarded(r)) <= chunk]
        budget = self._planner.budget(len(self._running))
        if not ready or not budget.nodes:
            return {}
        started = time.perf_counter()
        proposals: list[DraftTree] = []
        views = [request.view for request in ready]
        for view in views:
            view.noise_stream = self._rule.draft_stream(view.sampling.position)

        def ask() -> None:
            answer = self._drafter.propose(views, budget)
            if len(answer) != len(views):
                raise DraftError(f"{len(answer)} draft trees for {len(views)} requests")
            proposals.extend(answer)

        self._call_drafter(ask, ready)
        if not proposals:
            return {}
        failed = self._drafter.take_failures()
        _count_failure([request for request in self._running if request.id in failed])
        trees = [self._checked(request, tree, budget) for request, tree in zip(ready, proposals, strict=True)]
        self._planner.observe_draft(trees, time.perf_counter() - started)
        chosen = trees
        if not (self._rule.needs_all_proposals and any(tree.logprobs for tree in trees)):
            chosen = self._planner.select(ready, trees)
        return {r.id: Draft(tree, whole) for r, tree, whole in zip(ready, chosen, trees, strict=True)}

    def _checked(self, request: Request, tree: DraftTree, budget: Budget) -> DraftTree:
        """The tree without useless nodes, its sources filled in; an empty one if the drafter broke its contract."""
        try:
            tree.check(self._model.config.vocab_size)
            if len(tree) > budget.nodes:
                raise DraftError(f"{len(tree)} draft nodes, more than the {budget.nodes} asked for")
        except Exception as error:  # what is no tree at all fails in ways of its own
            self._drafter_failed(error, [request])
            return DraftTree()
        if not tree.sources:
            tree = replace(tree, sources=[(self._drafter.name,)] * len(tree))
        return trim(tree, request.view.room, request.sampling.end_ids, chain=not self._rule.trees)

    def _share(self, request: Request, draft: Draft | None) -> Share:
        tokens = self._unforwarded(request)
        if len(tokens) > self._config.prefill_chunk:
            return Share(request, tokens[: self._config.prefill_chunk], chunk=True)
        return Share(request, tokens, draft or Draft())

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

    def _forward(self, shares: Sequence[Share]) -> None:
        started = time.perf_counter()
        segments = [share.segment() for share in shares]
        output = self._executor.forward(segments, self._drafter.wants.hidden_layers)
        distribute(output, shares, segments)
        if all(len(share.tokens) == 1 for share in shares):
            self._planner.observe_forward(sum(len(s.tokens) for s in segments), time.perf_counter() - started)

    def _accept(self, judged: Sequence[Share]) -> dict[int, Verdict]:
        """Verdicts by `id` of the share. A request whose own logits are broken ends here; the others go on."""
        verdicts: dict[int, Verdict] = {}
        for share in judged:
            try:
                verdicts[id(share)] = self._rule.accept([share.candidate()])[0]
            except NonFiniteLogitsError as error:
                share.request.fail(error)
        return verdicts

    def _commit(self, shares: Sequence[Share], verdicts: dict[int, Verdict]) -> list[Observation]:
        """Keep the accepted rows' KV, emit the tokens, and say what happened."""
        observations: list[Observation] = []
        for share in shares:
            request, verdict = share.request, verdicts.get(id(share))
            assert request.seq is not None
            if request.finished:
                self._executor.commit(request.seq, ())
                continue
            self._executor.commit(request.seq, share.accepted_rows(verdict))
            emitted: list[int] = []
            if verdict is not None:
                emitted = request.emit(share.tree, verdict.path, verdict.token)
                if request.logprobs is not None:
                    request.logprobs.extend(share.logprobs(verdict, len(emitted)))
                self._planner.observe_committed(request, share.draft.proposed, emitted)
                self._watch.observe(share.tree, verdict.path)
            observations.append(share.observation(self._drafter.wants, self._executor, verdict, emitted))
        return observations

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        del self._reserved[request.id]
        if request.seq is not None:
            self._executor.close(request.seq)
            request.seq = None
        self._call_drafter(lambda: self._drafter.close(request.view), [])
        self._planner.forget(request)

    def _call_drafter(self, call: Callable[[], object], affected: Sequence[Request]) -> None:
        """Run a drafter's method. Whatever it raises costs this round's draft and nothing else."""
        try:
            call()
        except Exception as error:
            self._drafter_failed(error, affected)

    def _drafter_failed(self, error: Exception, affected: Sequence[Request]) -> None:
        """Count a failure for the requests whose draft it cost. Said at the first one, the second, the fourth, …"""
        _count_failure(affected)
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            reason = str(error) if isinstance(error, DraftError) else f"{type(error).__name__}: {error}"
            log.warning(
                "drafter %s failed (%s), %d times so far; the round goes on without its draft",
                self._drafter.name,
                reason,
                self._failures,
            )


def _count_failure(requests: Sequence[Request]) -> None:
    for request in requests:
        request.statistics.failures += 1
