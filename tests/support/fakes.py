"""Stand-ins for the parts around the engine: a target computed from the history alone, and drafters of every temper.

The fake target's logits are a function of the tokens a row can see, so that two runs can be compared bit for bit: a
difference is the engine's fault, never the numerics'.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.acceptance import RULES
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters import assemble
from outrider.drafters.base import Budget, Drafter, DrafterContext, Observation, OpenExecutor, SequenceView
from outrider.drafters.health import AcceptanceWatch
from outrider.engine.engine import Engine
from outrider.engine.planner import Planner
from outrider.engine.prefix_cache import PrefixCache
from outrider.engine.price import ForwardPrice
from outrider.engine.speculators import Speculators
from outrider.executors.base import CostCurve, Executor
from outrider.models.config import ModelConfig
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from tests.support.fake_executor import FakeExecutor as TextExecutor
from tests.support.fake_executor import last_token

VOCAB = 32
EOS = 2
WORDS = ["<unk>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz .!"][:VOCAB]


class WordStream:
    """Incremental decoding of `WordTokenizer`: every token is final text at once."""

    def __init__(self, skip_special: bool) -> None:
        self._skip = skip_special

    def push(self, token: int) -> str:
        return "" if self._skip and token < 3 else WORDS[token]

    def flush(self) -> str:
        return ""


class WordTokenizer:
    """One character a token; the first three are special."""

    vocab_size = VOCAB

    def stream(self, skip_special_tokens: bool = True) -> WordStream:
        return WordStream(skip_special_tokens)

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(character) for character in text]


def fake_config(**changes: object) -> ModelConfig:
    shape = {
        "family": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 8,
        "num_layers": 4,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "intermediate_size": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "max_position": 512,
        "tie_embeddings": True,
        "eos_token_ids": (EOS,),
    }
    return ModelConfig(**(shape | changes))  # type: ignore[arg-type]


def fake_model(name: str = "fake", *, tokenizer: bool = True, **changes: object) -> Model:
    weights = TensorWeights({"model.norm.weight": torch.full((8,), 0.7)})
    return Model(name, fake_config(**changes), weights, WordTokenizer() if tokenizer else None)  # type: ignore[arg-type]


def random_logits(history: Sequence[int], seed: int = 0, scale: float = 2.5) -> torch.Tensor:
    """Logits [VOCAB] that depend on the last three tokens and nothing else."""
    return torch.tensor(_normal((seed, *history[-3:])) * scale, dtype=torch.float32)


@functools.cache
def _normal(key: tuple[int, ...]) -> npt.NDArray[np.float64]:
    return np.random.default_rng(key).normal(size=VOCAB)


class FakeExecutor(TextExecutor):
    """`fake_executor.FakeExecutor` for the fake model. Pages hold one token, unless a test asks for more."""

    def __init__(
        self,
        logits: Callable[[Sequence[int]], torch.Tensor] = random_logits,
        *,
        kv_tokens: int = 8192,
        max_context: int = 512,
        page_size: int = 1,
        hidden: Callable[[int, Sequence[int]], torch.Tensor] = last_token,
    ) -> None:
        config = fake_config(max_position=max_context)
        sizes = {"kv_tokens": kv_tokens, "max_context": max_context, "page_size": page_size}
        super().__init__(config, logits, hidden=hidden, **sizes)


class OpenFake(OpenExecutor):
    """Opens fake executors for drafters, with logits near the target's (``noise`` 0: the same)."""

    def __init__(self, noise: float = 1.0) -> None:
        self._noise = noise

    def __call__(self, model: Model) -> FakeExecutor:
        def logits(history: Sequence[int]) -> torch.Tensor:
            return random_logits(history) + self._noise * random_logits(history, seed=99, scale=1.0)

        return FakeExecutor(logits)


class ChaosDrafter(Drafter):
    """Random trees: right tokens, wrong ones, end tokens, wide and deep; reproducible by seed."""

    name = "chaos"

    def __init__(self, seed: int = 0, logits: Callable[[Sequence[int]], torch.Tensor] = random_logits) -> None:
        self._random = random.Random(seed)
        self._logits = logits
        self.observed: list[Observation] = []

    def propose(self, views: Sequence[SequenceView], budget: Budget) -> list[DraftTree]:
        return [self._tree(view, budget) for view in views]

    def observe(self, observations: Sequence[Observation]) -> None:
        self.observed.extend(observations)

    def _tree(self, view: SequenceView, budget: Budget) -> DraftTree:
        tokens: list[int] = []
        parents: list[int] = []
        for _ in range(self._random.randint(0, budget.nodes)):
            parent = self._random.choice([ROOT, *range(len(tokens)), len(tokens) - 1])
            token = self._token(view, DraftTree(tokens, parents).path(parent) if parent != ROOT else [], tokens)
            if not any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
                parents.append(parent)
                tokens.append(token)
        return DraftTree(tokens, parents, [self._random.random() for _ in tokens])

    def _token(self, view: SequenceView, path: Sequence[int], tokens: Sequence[int]) -> int:
        if self._random.random() < 0.3:
            return self._random.choice([EOS, self._random.randrange(VOCAB)])
        history = [*view.tokens, *(tokens[node] for node in path)]
        return int(self._logits(history).topk(2).indices[self._random.randint(0, 1)])


def make_engine(
    drafter: Drafter,
    *,
    config: SpeculativeConfig | None = None,
    executor: Executor | None = None,
    engine_config: EngineConfig | None = None,
    model: Model | None = None,
    price: CostCurve | None = None,
) -> Engine:
    """An engine over a fake target, whose requests may choose any drafter that needs no model."""
    config = config or SpeculativeConfig(num_speculative_tokens=8)
    executor = executor or FakeExecutor()
    engine_config = engine_config or EngineConfig()
    model = model or fake_model(max_position=executor.max_context)
    rule = RULES.get(config.acceptance)(config)
    context = DrafterContext(config, model, OpenFake())
    made: dict[str, Drafter] = {drafter.name: drafter}
    return Engine(
        model,
        executor,
        PrefixCache(executor, enabled=engine_config.enable_prefix_caching),
        Speculators(
            drafter,
            config,
            lambda members: assemble(members, context, made, load_models=False),
            chains_only=not rule.trees,
        ),
        rule,
        Planner(ForwardPrice(lambda: price) if price else None, adaptive=config.adaptive),
        AcceptanceWatch(),
        engine_config,
    )


def run(engine: Engine, requests: Sequence[object], limit: int = 10_000) -> None:
    """Step until every request has ended."""
    for _ in range(limit):
        if all(request.finished for request in requests):  # type: ignore[attr-defined]
            return
        engine.step()
    raise AssertionError("requests did not end")
