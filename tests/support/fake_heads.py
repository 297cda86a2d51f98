"""Learned drafters over the fake target. They are right exactly if they are given the right feature with each token.

The fake target's logits depend on the last three tokens. A hidden state of it tells the last two (as angles, so that
no norm can hide them), and a fake head's logits are the target's for those two and the row's own token: with a feature
of another position they are those of another text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from outrider.core.config import LEARNED
from outrider.drafters import DRAFTERS, assemble
from outrider.drafters.base import Drafter, DrafterContext
from outrider.executors.base import ForwardOutput, Segment, check_features
from outrider.heads.head import FEATURES, Head
from outrider.models.config import Fusion, ModelConfig
from outrider.models.loader import Model
from tests.support.fake_executor import FakeExecutor
from tests.support.fakes import VOCAB, OpenFake, fake_config, random_logits

LAYERS = fake_config().num_layers
HEADS = 3
EAGLE3_LAYERS = (1, 2, 4)
DRAFT_IDS = torch.tensor([token for token in range(VOCAB) if token % 7 != 5])


def encoded(history: Sequence[int], vocab_size: int = VOCAB) -> torch.Tensor:
    """[8]: an angle for each of the last two tokens, and something of no meaning."""
    values = torch.full((8,), 0.5)
    for place, token in enumerate(reversed(history[-2:])):
        angle = 2 * math.pi * token / vocab_size
        values[2 * place : 2 * place + 2] = torch.tensor([math.cos(angle), math.sin(angle)])
    values[2 * len(history[-2:]) : 4] = 0
    return values


def decoded(feature: torch.Tensor, vocab_size: int = VOCAB) -> list[int]:
    """The tokens, in the order of the text."""
    tokens: list[int] = []
    for place in (1, 0):
        x, y = feature[2 * place : 2 * place + 2].tolist()
        if abs(x) + abs(y) > 1e-6:
            tokens.append(round(math.atan2(y, x) / (2 * math.pi) * vocab_size) % vocab_size)
    return tokens


def hidden(layer: int, history: Sequence[int]) -> torch.Tensor:
    """The fake target's states: layer 1 tells the last token, layer 2 the one before it, the last layer both."""
    values = encoded(history)
    if layer < LAYERS:
        values[:4] *= torch.tensor([layer == 1, layer == 1, layer == 2, layer == 2])
    return values


class FakeHeadExecutor(FakeExecutor):
    """A row's logits are ``logits`` of the two tokens that its feature tells, and its own."""

    def __init__(self, config: ModelConfig, logits: Callable[[Sequence[int]], torch.Tensor], **options: int) -> None:
        super().__init__(config, logits, **options)
        self._features: dict[int, list[torch.Tensor]] = {}

    def forward(
        self, segments: Sequence[Segment], hidden_layers: Sequence[int] = (), features: torch.Tensor | None = None
    ) -> ForwardOutput:
        check_features(self.config, segments, features)
        assert features is not None
        rows = iter(features)
        for segment in segments:
            assert len(self._features.setdefault(segment.seq, [])) == self.pending(segment.seq)
            self._features[segment.seq].extend(next(rows) for _ in segment.tokens)
        try:
            return super().forward(segments, hidden_layers)
        except BaseException:
            for segment in segments:
                del self._features[segment.seq][self.pending(segment.seq) :]
            raise

    def commit(self, seq: int, rows: Sequence[int]) -> None:
        super().commit(seq, rows)
        self._features[seq] = []

    def close(self, seq: int) -> None:
        super().close(seq)
        self._features.pop(seq, None)

    def row_logits(self, seq: int, row: int) -> torch.Tensor:
        return self._logits(self._seen(seq, row))

    def row_hidden(self, layer: int, seq: int, row: int) -> torch.Tensor:
        return encoded(self._seen(seq, row), self.config.vocab_size).clone()

    def _seen(self, seq: int, row: int) -> list[int]:
        return [*decoded(self._features[seq][row], self.config.vocab_size), self._pending[seq][row][0]]


class OpenFakeHeads(OpenFake):
    """Opens fake heads, with logits near the target's (``noise`` 0: the same), and keeps them to be looked at."""

    def __init__(
        self,
        noise: float = 0.0,
        logits: Callable[[Sequence[int]], torch.Tensor] = random_logits,
        **options: int,
    ) -> None:
        super().__init__(noise)
        self.logits = logits
        self.options = options
        self.opened: list[FakeHeadExecutor] = []
        self.products = 0

    def head(self, model: Model) -> FakeHeadExecutor:
        columns = DRAFT_IDS if model.config.num_logits < VOCAB else torch.arange(VOCAB)

        def logits(history: Sequence[int]) -> torch.Tensor:
            return (self.logits(history) + self._noise * random_logits(history, seed=99, scale=1.0))[columns]

        self.opened.append(FakeHeadExecutor(model.config, logits, **self.options))
        return self.opened[-1]

    def dense(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor) -> torch.Tensor:
            assert x.dtype == torch.float32
            self.products += 1
            # A row at a time: `Dense` promises that the number of rows makes no difference.
            return torch.stack([weight.float() @ row for row in x])

        return product

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = logits.topk(min(k, logits.shape[1]))
        return ids, values - logits.logsumexp(-1, keepdim=True)


def drafted_logits(history: Sequence[int]) -> torch.Tensor:
    """Logits of a target that never says a token outside DRAFT_IDS."""
    logits = torch.full((VOCAB,), -40.0)
    logits[DRAFT_IDS] = random_logits(history)[DRAFT_IDS]
    return logits


def fake_head(method: str, max_position: int = 512, vocab_size: int = VOCAB) -> Head:
    """A head for `fake_model`. But for Medusa's, its matrices are never looked at, except the one that joins layers."""
    if method == "medusa":
        return counting_head()
    shape = {"num_layers": 1, "tie_embeddings": False, "first_norm": False, "max_position": max_position}
    shape["vocab_size"] = vocab_size
    sizes = {"method": method, "hidden_size": 8, "num_layers": LAYERS, "vocab_size": vocab_size}
    if method == "eagle3":
        config = fake_config(**shape, fusion=Fusion("attend"), logits_size=len(DRAFT_IDS))
        join = torch.zeros(8, 24)
        for place, layer in ((0, 0), (1, 0), (2, 1), (3, 1)):
            join[place, 8 * layer + place] = 1
        tensors = {FEATURES: join, "lm_head.weight": torch.zeros(len(DRAFT_IDS), 8)}
        return Head(**sizes, feature_layers=EAGLE3_LAYERS, tensors=tensors, draft_ids=DRAFT_IDS, config=config)
    config = fake_config(**shape, fusion=Fusion("project", norms=method == "mtp", bias=method == "eagle"))
    return Head(**sizes, feature_layers=(LAYERS,), tensors={}, normed=True, config=config)


def counting_logits(history: Sequence[int]) -> torch.Tensor:
    """A target that counts: each token is followed by the next one, with others near it."""
    distance = (torch.arange(VOCAB) - history[-1] - 1) % VOCAB
    return -2.0 * torch.minimum(distance, VOCAB - distance).float()


def counting_head(shift: int = 0) -> Head:
    """Heads that know how `counting_logits` goes on from a state; with ``shift``, from one that many tokens later."""
    tensors: dict[str, torch.Tensor] = {}
    for k in range(HEADS):
        tensors[f"heads.{k}.blocks.0.weight"] = torch.zeros(8, 8)
        tensors[f"heads.{k}.blocks.0.bias"] = torch.zeros(8)
        angles = 2 * math.pi * (torch.arange(VOCAB) - 2 - k + shift) / VOCAB
        output = torch.zeros(VOCAB, 8)
        output[:, 0], output[:, 1] = 20 * torch.cos(angles), 20 * torch.sin(angles)
        tensors[f"heads.{k}.output.weight"] = output
    return Head("medusa", 8, LAYERS, VOCAB, (LAYERS,), tensors, normed=True)


def build_with_heads(context: DrafterContext) -> Drafter:
    """`drafters.build`, with the fake heads for learned members."""
    learned = [name for name in LEARNED if name in context.config.members]
    made: dict[str, Drafter] = {name: DRAFTERS.get(name)(context, fake_head(name)) for name in learned}  # type: ignore[call-arg]
    return assemble(context.config.members, context, made)
