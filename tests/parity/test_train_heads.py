"""A drafter under training computes what the executor computes for it once it is saved: on the target's features, and
on its own output, at every draft position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.heads.head import FEATURES, Head
from outrider.heads.load import load_head
from outrider.heads.save import save_head
from outrider.models.config import Fusion
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from outrider.train.batches import collate
from outrider.train.data import Sample
from outrider.train.features import Features
from outrider.train.modules.build import new_module
from outrider.train.modules.chain import ChainModule
from outrider.train.modules.shape import Shape
from outrider.train.modules.target import Target
from tests.support.models import random_model

BOUND = 2e-4
STEPS = 4
LENGTHS = (24, 13, 19)


def rounded(model: Model) -> Model:
    """The same with an embedding and an output matrix that bfloat16, in which training holds them, can hold."""
    tensors = {name: model.weights.tensor(name, torch.float32) for name in model.weights.names()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name].bfloat16().float()
    return replace(model, weights=TensorWeights(tensors))


class Setting:
    """A target, texts with its hidden states, and a drafter of one method whose every tensor matters."""

    def __init__(self, method: str, dtype: torch.dtype = torch.float32) -> None:
        self.model = rounded(random_model("llama", num_layers=7))
        self.executor = TorchExecutor(self.model, dtype="float32", kv_tokens=512)
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randint(0, 128, (length,), generator=generator) for length in LENGTHS]
        samples = [Sample(text.tolist(), [(1, len(text))]) for text in texts]
        shape = Shape(draft_vocab=48 if method == "eagle3" else 0, intermediate_size=80)
        module = new_module(method, Target.load(self.model), shape, samples, dtype=dtype)
        assert isinstance(module, ChainModule)
        self.module = module
        with torch.no_grad():
            for parameter in module.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
        self.texts = [self._features(text) for text in texts]

    def _features(self, text: torch.Tensor) -> Features:
        layers = range(self.model.config.num_layers + 1)
        seq = self.executor.open()
        output = self.executor.forward([Segment.chain(seq, text.tolist())], layers)
        self.executor.close(seq)
        return Features(text, output.hidden, torch.ones(len(text), dtype=torch.bool))


def open_saved(setting: Setting, folder: Path) -> tuple[Head, TorchExecutor]:
    save_head(setting.module.to_head(torch.float32), folder)
    head = load_head(folder, setting.model.config, "target")
    assert head.config is not None
    tensors = {name: tensor for name, tensor in head.tensors.items() if name != FEATURES}
    model = Model(head.method, head.config, TensorWeights(tensors))
    return head, setting.executor.open_head(model, kv_tokens=2048, max_context=256)


def served_features(setting: Setting, head: Head, text: Features) -> torch.Tensor:
    """The features of a text's rows as a drafter makes them, [T, H] float32."""
    joined = torch.cat([text.hidden[layer] for layer in head.feature_layers], dim=-1)
    if FEATURES in head.tensors:
        return setting.executor.dense(head.tensors[FEATURES])(joined.float())
    assert head.normed
    weight = setting.model.weights.tensor("model.norm.weight", torch.float32)
    eps = setting.model.config.rms_norm_eps
    return joined * (joined.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


@pytest.mark.parametrize(
    ("method", "norm_first"), [("eagle3", False), ("eagle3", True), ("eagle", False), ("mtp", False)]
)
def test_every_step_is_what_the_executor_computes(method: str, norm_first: bool, tmp_path: Path) -> None:
    setting = Setting(method)
    module = setting.module
    if norm_first:
        module.config = replace(module.config, fusion=Fusion("attend", norm_before_residual=True))
    head, executor = open_saved(setting, tmp_path)
    batch = collate(setting.texts, module.feature_layers, module.last_layer)
    with torch.no_grad():
        steps = list(module.steps(batch, torch.ones(len(batch), dtype=torch.bool), STEPS))
        logits = [module.outgoing(step.state) @ module.output().T for step in steps]
    assert len(steps) == STEPS
    compared = 0
    first = 0
    for text in setting.texts:
        tokens, features = text.tokens.tolist(), served_features(setting, head, text)
        for base in range(len(tokens) - 2):
            seq = executor.open()
            executor.forward([Segment.chain(seq, tokens[1 : base + 1])], features=features[:base]) if base else None
            executor.commit(seq, range(base))
            feature, parent = features[base : base + 1], -1
            for number, step in enumerate(steps):
                place = (step.bases == first + base).nonzero().flatten()
                if not len(place):
                    break
                row = Segment(seq, [tokens[base + 1 + number]], [parent])
                output = executor.forward([row], [1], feature)
                assert (output.hidden[1] - step.state[place]).abs().max() < BOUND, (method, base, number)
                assert (output.logits - logits[number][place]).abs().max() < BOUND
                feature, parent = output.hidden[1].float(), number
                compared += 1
            executor.close(seq)
        first += len(tokens) - 2
    assert compared == sum(len(step.bases) for step in steps) > 3 * len(batch)
