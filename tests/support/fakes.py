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
from outrider.core.errors import KVCacheFullError
from outrider.core.tree import ROOT, DraftTree
from outrider.drafters.base import Budget, Drafter, Observation, OpenExecutor, SequenceView
from outrider.drafters.calibration import Calibrator
from outrider.engine.engine import Engine
from outrider.engine.health import AcceptanceWatch
from outrider.engine.planner import ForwardPrice, Planner
from outrider.executors.base import COMMITTED, CostCurve, Executor, ForwardOutput, Segment
from outrider.models.config import ModelConfig
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights

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
        "num_layers": 1,
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
    return Model(name, fake_config(**changes), TensorWeights({}), WordTokenizer() if tokenizer else None)  # type: ignore[arg-type]


def random_logits(history: Sequence[int], seed: int = 0, scale: float = 2.5) -> torch.Tensor:
    """Logits [VOCAB] that depend on the last three tokens and nothing else."""
    return torch.tensor(_normal((seed, *history[-3:])) * scale, dtype=torch.float32)


@functools.cache
def _normal(key: tuple[int, ...]) -> npt.NDArray[np.float64]:
    return np.random.default_rng(key).normal(size=VOCAB)


class FakeExecutor(Executor):
    """Keeps histories in place of KV, and checks every call against the contract."""

    def __init__(
        self,
        logits: Callable[[Sequence[int]], torch.Tensor] = random_logits,
        *,
        kv_tokens: int = 8192,
        max_context: int = 512,
    ) -> None:
        self.config = fake_config(max_position=max_context)
        self._logits = logits
        self._kv_tokens = kv_tokens
        self._max_context = max_context
        self._committed: dict[int, list[int]] = {}
        self._pending: dict[int, list[tuple[int, int]]] = {}
        self._next = 0
        self.forwards = 0
        self.rows = 0

    def open(self) -> int:
        self._next += 1
        self._committed[self._next], self._pending[self._next] = [], []
        return self._next

    def close(self, seq: int) -> None:
        del self._committed[seq], self._pending[seq]

    def history(self, seq: int, row: int) -> list[int]:
        path: list[int] = []
        while row != COMMITTED:
            token, row = self._pending[seq][row]
            path.append(token)
        return [*self._committed[seq], *reversed(path)]

    def forward(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> ForwardOutput:
        assert len({s.seq for s in segments}) == len(segments)
        total = sum(len(s.tokens) for s in segments)
        if total > self.free_tokens:
            raise KVCacheFullError(f"{total} rows, room for {self.free_tokens}")
        self.forwards += 1
        self.rows += total
        rows: list[torch.Tensor] = []
        hidden: list[torch.Tensor] = []
        for segment in segments:
            first = len(self._pending[segment.seq])
            for i, (token, parent) in enumerate(zip(segment.tokens, segment.parents, strict=True)):
                assert COMMITTED <= parent < first + i
                self._pending[segment.seq].append((token, parent))
                assert len(self.history(segment.seq, first + i)) <= self._max_context
                hidden.append(torch.full((8,), float(token)))
            wanted = range(len(segment.tokens)) if segment.logits is None else segment.logits
            rows.extend(self._logits(self.history(segment.seq, first + i)) for i in wanted)
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
        return ForwardOutput(logits, {layer: torch.stack(hidden) for layer in hidden_layers})

    def commit(self, seq: int, rows: Sequence[int]) -> None:
        parent = COMMITTED
        for row in rows:
            token, own_parent = self._pending[seq][row]
            assert own_parent == parent, "not a path"
            self._committed[seq].append(token)
            parent = row
        self._pending[seq].clear()

    def truncate(self, seq: int, length: int) -> None:
        del self._committed[seq][length:]
        self._pending[seq].clear()

    def length(self, seq: int) -> int:
        return len(self._committed[seq])

    def pending(self, seq: int) -> int:
        return len(self._pending[seq])

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def page_size(self) -> int:
        return 1

    @property
    def total_tokens(self) -> int:
        return self._kv_tokens

    @property
    def free_tokens(self) -> int:
        return self._kv_tokens - sum(map(len, self._committed.values())) - sum(map(len, self._pending.values()))

    def check_integrity(self) -> None:
        assert self.free_tokens >= 0

    @property
    def open_sequences(self) -> int:
        return len(self._committed)


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
    """An engine over a fake target."""
    config = config or SpeculativeConfig(num_speculative_tokens=8)
    executor = executor or FakeExecutor()
    planner = Planner(config, drafter, Calibrator(), ForwardPrice(price) if price else None)
    rule = RULES.get(config.acceptance)(config)
    return Engine(
        model or fake_model(max_position=executor.max_context),
        executor,
        drafter,
        rule,
        planner,
        AcceptanceWatch(),
        engine_config or EngineConfig(),
    )


def run(engine: Engine, requests: Sequence[object], limit: int = 10_000) -> None:
    """Step until every request has ended."""
    for _ in range(limit):
        if all(request.finished for request in requests):  # type: ignore[attr-defined]
            return
        engine.step()
    raise AssertionError("requests did not end")
