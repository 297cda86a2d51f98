"""The Drafter contract: propose trees for a batch of requests, and learn from what was committed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.core.errors import ConfigError
from outrider.core.noise import Stream
from outrider.core.tree import DraftTree
from outrider.drafters.read_once import ReadOnce

if TYPE_CHECKING:
    import torch

    from outrider.core.config import SpeculativeConfig
    from outrider.core.sampling import SamplingState
    from outrider.executors.base import Dense, Executor
    from outrider.models.config import ModelConfig
    from outrider.models.loader import Model


@dataclass(frozen=True)
class Wants:
    """What a drafter needs to be told about the target's forward passes. It may change its mind in `Drafter.observe`.

    top_k: the target's k most likely next tokens at every row that has logits, in rounds for which the drafter was
        asked to propose; 0: none.
    hidden_layers: hidden states of these layers (numbered as in `ForwardOutput`), for prompt rows too.
    whole_prompt: nothing may be missing of the prompt's hidden states, so that no part of it may come from a cache.
    """

    top_k: int = 0
    hidden_layers: tuple[int, ...] = ()
    whole_prompt: bool = False


@dataclass(frozen=True)
class Budget:
    """Limits of one round, for each request: draft nodes and depth at most.

    price: seconds that the coming round takes with so many draft nodes, of all requests together, drafting not counted.
        None: not known, or not to matter. requests: those that emit a token in that round, drafted for or not.
    least_chance: half the chance that a node's path must have of being accepted to pay for its row. A drafter that
        chooses its nodes may leave out what it finds less likely.
    """

    nodes: int
    depth: int
    price: Callable[[float], float] | None = field(default=None, compare=False)
    requests: int = field(default=1, compare=False)
    least_chance: float = field(default=0.0, compare=False)


@dataclass
class SequenceView:
    """What a drafter may see of one running request. One object lives as long as the request; read-only for drafters.

    tokens: prompt and output so far; the last one is the root of the next round's tree.
    room: longest path that can still be of use (the request's remaining tokens and context).
    sampling: the request's transform and noise. A drafter that samples turns its own logits into q with
        ``sampling.logprobs(logits, path)``.
    noise_stream: the noise to draw children with in the coming round, keyed by (sampling.seed, position, token id).
        Under ``coupled`` it is the target's own, which makes draft and target agree as often as possible.
    """

    request_id: int
    tenant: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingState
    room: int = 0
    noise_stream: int = Stream.TARGET


@dataclass(frozen=True)
class Observation:
    """What happened to one request in one forward pass, told after its commit.

    A chunk of a long prompt that is not its last one gives an observation with nothing but ``context`` and ``hidden``.

    view: the request, its tokens already extended by ``committed``.
    committed: tokens that were added, the correction or bonus token last.
    rows: tokens of the rows that were verified: the root first, then the tree's nodes (row i+1 is node i).
    path: rows that were accepted, the root (row 0) first.
    tree: what was verified; empty after a plain round.
    top_ids, top_logprobs: [rows, top_k] int64 and float32, best first, if wanted and if the drafter was asked.
    context: tokens that the same pass forwarded before the root.
    start: position of the first row, context included. What lies before it may never have been observed: the prefix
        cache had it. And after a request had to make way, rows are observed again that were observed before.
    hidden: layer -> [len(context) + rows, H], if wanted, the context first.
    finished: the request has ended; the drafter will be told so by `Drafter.close` too.
    """

    view: SequenceView
    committed: Sequence[int]
    rows: Sequence[int]
    path: Sequence[int]
    tree: DraftTree = field(default_factory=DraftTree)
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None
    context: Sequence[int] = ()
    start: int = 0
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
    finished: bool = False


class Drafter(ABC):
    """Proposes draft trees. State is kept per request, or per tenant, never across tenants.

    A drafter decides nothing about the text: whatever it proposes, the same tokens are committed. It may raise from
    any method; the engine then goes on without it for that round and counts the failure.
    """

    name: str
    wants: Wants = Wants()
    default_tokens: int = 8
    """Draft nodes per round, unless the configuration says otherwise."""
    needs_model: bool = False
    """Whether building it loads a model, which is not done on a single request's demand."""
    accept_by_depth: Sequence[float] = ()
    """Chance that a node of depth 1, 2, … is accepted where its parent was, if that has been measured beforehand."""
    deepest: int | None = None
    """Depth that a draft can have at most, whatever the budget; None: any."""
    minds_price: bool = False
    """Whether `propose` itself keeps to what pays at ``Budget.price``, so that nobody need limit its depth."""

    @classmethod
    def kv_config(cls, context: DrafterContext) -> ModelConfig | None:
        """Configuration of the model that it will run in an executor with a KV cache; None: it opens none.

        Asked before anything is opened, so that all that keeps KV fits in the memory that is set for it. What has to be
        read for that is left in ``context.read``.
        """
        return None

    def open(self, view: SequenceView) -> None:  # noqa: B027  (optional hook)
        """A request starts; its prompt is in ``view.tokens``."""

    @abstractmethod
    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        """One tree (possibly empty) for each view, within ``budget`` and ``view.room``."""

    def observe(self, observations: Sequence[Observation]) -> None:  # noqa: B027  (optional hook)
        """Learn from what was committed; the first round of a request, which ends its prefill, included.

        A drafter that wants hidden states and does not pay is left out: after a `pause` it may miss rounds.
        """

    def take_failures(self) -> Mapping[str, frozenset[int]]:
        """Ids of requests that lost a draft, or part of one, since the last call, by a failure that the drafter got
        around by itself, as a cascade does with a member's: by the name of the drafter at fault.
        """
        return {}

    def pause(self, view: SequenceView) -> None:  # noqa: B027  (optional hook)
        """A request goes on later, or without this drafter for a while. What is dear to keep and can be made again
        should go.
        """

    def close(self, view: SequenceView) -> None:  # noqa: B027  (optional hook)
        """A request ends, normally or not. Must free all that `open` took, and must not raise for unknown requests."""


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter is built from.

    config: the user's configuration. target: the target model. open_executor: builds an executor of the engine's kind
    for another model (None: for the target itself), for drafters that run a model of their own.
    read: models and heads that were read for `Drafter.kv_config`, to be run by the drafter that is built next.
    """

    config: SpeculativeConfig
    target: Model
    open_executor: OpenExecutor
    read: ReadOnce = field(default_factory=ReadOnce, compare=False)


class OpenExecutor(ABC):
    """Builds an executor for a drafter's own model, sized for the engine's batch and context."""

    @abstractmethod
    def __call__(self, model: Model) -> Executor: ...

    def head(self, model: Model) -> Executor:
        """One for a model that reads the target's hidden states: see `Executor.open_head`."""
        raise ConfigError("this engine runs no learned drafters")

    def dense(self, weight: torch.Tensor) -> Dense:
        """A product with a matrix of its own: see `Executor.dense`."""
        raise ConfigError("this engine runs no learned drafters")

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For logits that were made with `dense`: see `Executor.top_k`."""
        raise ConfigError("this engine runs no learned drafters")
