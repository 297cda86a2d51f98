"""A small target with its texts and their hidden states in memory, for drafters to learn from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from outrider.train.config import TrainConfig
from outrider.train.data import Sample
from outrider.train.features import Features
from outrider.train.identity import Origin
from outrider.train.modules.base import DrafterModule
from outrider.train.modules.build import new_module
from outrider.train.modules.shape import Shape
from outrider.train.modules.target import Target
from tests.support.models import random_model

LENGTH = 40
CONFIG = TrainConfig(
    epochs=2, batch_tokens=160, learning_rate=2e-2, draft_steps=3, held_out=0.1, measurements=3, checkpoint_minutes=0.0
)
ORIGIN = Origin("the small target")


def small_target() -> Model:
    """Seven small blocks over 128 tokens, the likeliest of them far ahead of the others."""
    model = random_model("llama", num_layers=7, hidden_size=32, num_heads=2, num_kv_heads=1, max_position=64)
    tensors = {name: model.weights.tensor(name, torch.float32) for name in model.weights.names()}
    tensors["model.norm.weight"] *= 6
    return replace(model, weights=TensorWeights(tensors))


class MemoryStore:
    """Texts that the target wrote, greedily after two random tokens, with all its hidden states."""

    def __init__(self, model: Model, count: int) -> None:
        self.model = model
        executor = TorchExecutor(model, dtype="float32", kv_tokens=256)
        generator = torch.Generator().manual_seed(7)
        self._features = [self._write(executor, generator) for _ in range(count)]
        self.samples = [Sample(f.tokens.tolist(), [(2, len(f.tokens))]) for f in self._features]

    def read_many(self, indices: Iterable[int]) -> Iterator[Features]:
        return (self._features[index] for index in indices)

    def _write(self, executor: TorchExecutor, generator: torch.Generator) -> Features:
        start = torch.randint(0, 5, (2,), generator=generator).tolist()
        length = int(torch.randint(LENGTH // 2, LENGTH, (1,), generator=generator))
        seq = executor.open()
        tokens, states = list(start), []
        layers = range(self.model.config.num_layers + 1)
        following = list(start)
        while len(tokens) <= length:
            output = executor.forward([Segment.chain(seq, following, [len(following) - 1])], layers)
            executor.commit(seq, range(len(following)))
            states.append(output.hidden)
            following = [int(output.logits.argmax())]
            tokens += following
        executor.close(seq)
        hidden = {layer: torch.cat([state[layer] for state in states]).bfloat16() for layer in layers}
        mask = torch.arange(length) >= 2
        return Features(torch.tensor(tokens[:length]), hidden, mask)


def small_module(method: str, store: MemoryStore, dtype: torch.dtype = torch.float32) -> DrafterModule:
    shape = Shape(draft_vocab=100, num_heads=3) if method == "medusa" else Shape(draft_vocab=100)
    return new_module(method, Target.load(store.model), shape, store.samples, seed=3, dtype=dtype)
