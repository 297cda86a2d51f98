"""Drafters under training: to heads and back, what they start from, and what cannot be trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from outrider.core.errors import ConfigError, HeadMismatchError, UnknownNameError
from outrider.heads.load import load_head
from outrider.heads.save import save_head
from outrider.models.config import OUTPUT
from outrider.train.batches import collate
from outrider.train.data import Sample
from outrider.train.modules import MODULES
from outrider.train.modules.base import DrafterModule
from outrider.train.modules.build import draft_vocabulary, module_from_head, new_module
from outrider.train.modules.medusa import Medusa
from outrider.train.modules.shape import Goal, Shape
from outrider.train.modules.target import Target
from tests.support.drafting import MemoryStore, small_module, small_target
from tests.support.heads import assert_same_head, random_head

GOAL = Goal(3, 0.8)


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore(small_target(), 4)


def moved(module: DrafterModule) -> DrafterModule:
    """The same with every tensor changed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return module


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("method", MODULES.names())
def test_a_head_and_back(method: str, own_output: bool, store: MemoryStore, tmp_path: Path) -> None:
    target = Target.load(store.model)
    shape = Shape(draft_vocab=100, own_output=own_output)
    module = moved(new_module(method, target, shape, store.samples, dtype=torch.float32))
    head = module.to_head(torch.float32)
    head.check_fits(store.model.config, "target")
    head.check_tensors()
    batch = collate(list(store.read_many(range(4))), module.feature_layers, module.last_layer)
    again = module_from_head(head, target, dtype=torch.float32)
    assert_same_head(again.to_head(torch.float32), head)
    assert torch.equal(again.loss(batch, GOAL).loss, module.loss(batch, GOAL).loss)
    save_head(module.to_head(), tmp_path)
    assert_same_head(replace(load_head(tmp_path, store.model.config, "target"), source=""), module.to_head())


def test_a_head_keeps_what_it_was(store: MemoryStore) -> None:
    module = small_module("mtp", store)
    head = module.to_head(torch.float32)
    before = {name: tensor.clone() for name, tensor in head.tensors.items()}
    moved(module)
    assert all(torch.equal(head.tensors[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("method", MODULES.names())
def test_the_seed_decides_how_it_starts(method: str, store: MemoryStore) -> None:
    target = Target.load(store.model)
    state = torch.random.get_rng_state()
    heads = [new_module(method, target, Shape(draft_vocab=90), store.samples, seed=s).to_head() for s in (1, 1, 2)]
    assert_same_head(heads[0], heads[1])
    if method != "medusa":
        assert any(not torch.equal(heads[0].tensors[name], heads[2].tensors[name]) for name in heads[0].tensors)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp"])
def test_a_new_drafter_starts_as_a_good_linear_guess(method: str) -> None:
    store = MemoryStore(small_target(), 40)
    module = small_module(method, store)
    batch = collate(list(store.read_many(range(40))), module.feature_layers, module.last_layer)
    before = module.loss(batch, GOAL).tally
    module.prepare([batch])
    after = module.loss(batch, GOAL).tally
    assert after.hits[0] / after.asked[0] > before.hits[0] / before.asked[0] + 0.1
    assert after.entropy[0] < 0.8 * before.entropy[0]


@pytest.mark.parametrize("method", MODULES.names())
def test_a_drafter_that_exists_is_not_started_anew(method: str, store: MemoryStore) -> None:
    module = module_from_head(small_module(method, store).to_head(), Target.load(store.model), dtype=torch.float32)
    head = module.to_head(torch.float32)
    batch = collate(list(store.read_many(range(4))), module.feature_layers, module.last_layer)
    module.prepare([batch, batch])
    for name, tensor in module.to_head(torch.float32).tensors.items():
        torch.testing.assert_close(tensor, head.tensors[name])


def test_medusa_is_what_its_formula_says(store: MemoryStore) -> None:
    """Head k, x + silu(W x + b) on the normed state, guesses the token k places after the label."""
    module = moved(small_module("medusa", store))
    assert isinstance(module, Medusa)
    batch = collate(list(store.read_many([0, 1])), module.feature_layers, module.last_layer)
    outcome = module.loss(batch, GOAL)
    head = module.to_head(torch.float32)
    x = module.target.normed(batch.features)
    wanted = module.wanted(batch)
    first = len(store.samples[0].tokens) - 2
    for k in range(3):
        y = x + F.silu(
            F.linear(x, head.tensors[f"heads.{k}.blocks.0.weight"], head.tensors[f"heads.{k}.blocks.0.bias"])
        )
        logs = (y @ module.output().T).log_softmax(-1)
        total, rows = 0.0, 0
        for row in range(len(batch)):
            end = first if row < first else len(batch)
            if row + k < end and batch.learned[row + k] and module.places[batch.labels[row + k]] >= 0:
                total -= float((wanted.probs[row + k] * logs[row]).sum())
                rows += 1
        assert outcome.tally.learned[k] == rows > 0
        assert float(outcome.tally.entropy[k]) == pytest.approx(total, rel=1e-4)


def test_a_chain_ends_at_what_cannot_be_drafted(store: MemoryStore) -> None:
    module = small_module("eagle3", store)
    batch = collate(list(store.read_many(range(4))), module.feature_layers, module.last_layer)
    missing = int(batch.labels[batch.learned][5])
    module.places[missing] = -1
    outcome = module.loss(batch, GOAL)
    guessed = batch.learned & (batch.labels != missing)
    rows = guessed.nonzero().flatten().tolist()
    assert outcome.tally.learned[0] == len(rows)
    assert outcome.tally.asked[0] == int(batch.learned.sum()) > len(rows)
    following = [row for row in rows if batch.left[row] >= 1]
    assert outcome.tally.learned[1] == sum(bool(guessed[row + 1]) for row in following)
    assert outcome.tally.asked[1] == sum(bool(batch.learned[row + 1]) for row in following)


def test_what_is_not_learned_does_not_count(store: MemoryStore) -> None:
    """Nothing behind the last position that is learned changes loss or gradients."""
    module = small_module("eagle3", store)
    texts = list(store.read_many(range(2)))
    cut = [replace(text, mask=text.mask & (torch.arange(len(text.mask)) < 12)) for text in texts]
    short = [
        replace(text, tokens=text.tokens[:14], mask=text.mask[:14], hidden={n: h[:14] for n, h in text.hidden.items()})
        for text in cut
    ]
    losses = [module.loss(collate(some, module.feature_layers, module.last_layer), GOAL).loss for some in (cut, short)]
    torch.testing.assert_close(*losses)


def test_the_draft_vocabulary_is_what_is_learned_most() -> None:
    samples = [Sample([9, 9, 9, 9, 5, 5, 7, 7, 7, 3], [(4, 10)]), Sample([1, 1, 1, 7, 5], [(0, 5)])]
    assert draft_vocabulary(samples, 2, 12).tolist() == [5, 7]
    assert draft_vocabulary(samples, 3, 12).tolist() == [1, 5, 7]
    assert draft_vocabulary(samples, 12, 12).tolist() == list(range(12))
    with pytest.raises(ConfigError, match="draft_vocab=13"):
        draft_vocabulary(samples, 13, 12)


def test_a_smaller_mlp_takes_the_strongest_neurons(store: MemoryStore) -> None:
    shape = Shape(draft_vocab=0, intermediate_size=10)
    head = new_module("mtp", Target.load(store.model), shape, store.samples).to_head()
    assert head.config is not None
    assert head.config.intermediate_size == 10
    assert head.draft_ids is None
    down = store.model.weights.tensor("model.layers.6.mlp.down_proj.weight", torch.float32)
    chosen = down.norm(dim=0).topk(10).indices.sort().values
    up = store.model.weights.tensor("model.layers.6.mlp.up_proj.weight", torch.float32)
    assert torch.equal(head.tensors["model.layers.0.mlp.up_proj.weight"], up[chosen].bfloat16())


def test_heads_that_cannot_be_trained(store: MemoryStore) -> None:
    target = Target.load(store.model)
    config = store.model.config
    with pytest.raises(HeadMismatchError, match="one block"):
        module_from_head(random_head("eagle", config, num_layers=2), target)
    with pytest.raises(HeadMismatchError, match="an embedding of its own"):
        module_from_head(random_head("eagle3", config, own_output=True, own_embedding=True), target)
    with pytest.raises(HeadMismatchError, match="hidden size"):
        module_from_head(random_head("mtp", replace(config, hidden_size=48)), target)
    uneven = random_head("medusa", config, num_heads=2, num_blocks=1)
    tensors = {**uneven.tensors, "heads.0.output.weight": target.output.float()}
    with pytest.raises(HeadMismatchError, match="one kind"):
        module_from_head(replace(uneven, tensors=tensors), target)


def test_the_targets_own_embedding_may_come_along(store: MemoryStore) -> None:
    target = Target.load(store.model)
    head = random_head("eagle3", store.model.config, own_output=True)
    tensors = {**head.tensors, "model.embed_tokens.weight": target.embedding}
    again = module_from_head(replace(head, tensors=tensors), target).to_head()
    assert "model.embed_tokens.weight" not in again.tensors
    assert OUTPUT in again.tensors


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"draft_vocab": -1}, "draft_vocab=-1"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"intermediate_size": 0}, "intermediate_size=0"),
        ({"own_output": 1}, "own_output=1"),
    ],
)
def test_bad_shapes(values: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Shape(**values)  # type: ignore[arg-type]


def test_options_that_would_be_ignored(store: MemoryStore) -> None:
    target = Target.load(store.model)
    with pytest.raises(ConfigError, match="num_heads is for medusa; mtp would ignore it"):
        new_module("mtp", target, Shape(num_heads=3), store.samples)
    with pytest.raises(ConfigError, match="intermediate_size is for eagle3, eagle, mtp; medusa"):
        new_module("medusa", target, Shape(intermediate_size=3), store.samples)
    with pytest.raises(UnknownNameError, match="did you mean 'medusa'"):
        new_module("medusae", target, Shape(), store.samples)


def test_a_target_of_few_layers_has_no_eagle3() -> None:
    from tests.support.models import random_model

    with pytest.raises(ConfigError, match="too few"):
        new_module("eagle3", Target.load(random_model("llama")), Shape(draft_vocab=0), [])
