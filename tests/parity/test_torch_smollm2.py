"""The torch executor on SmolLM2-135M itself, against transformers with the same weights in float32.

Logits of this model reach 37; after 30 blocks of rounding in different orders the two agree to about 5e-6 of that, and
are held to 1e-4 of the largest one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.fetch import list_aliases
from outrider.models.loader import Model, load_model
from tests.parity.torch_support import grow_tree, on, path_to, prefill
from tests.support.models import hf_config

TOLERANCE = 1e-4
TEXT = (
    "The harbour was quiet. Three boats lay at the pier, and a man in a blue coat counted crates aloud: one, two, "
    "three. def count(crates):\n    return sum(1 for crate in crates if crate.sealed)\n"
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Model:
    if "smollm2-135m" not in {status.alias.name for status in list_aliases() if status.fetched}:
        pytest.skip("smollm2-135m is not fetched (`outrider models fetch smollm2-135m`)")
    return load_model("smollm2-135m")


@pytest.fixture(scope="module")
def theirs(model: Model) -> Any:
    values = hf_config(model.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    state = {name: model.weights.tensor(name, torch.float32) for name in model.weights.names()}
    assert set(reference.load_state_dict(state, strict=False).missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    return reference.eval()


@torch.no_grad()
def logits_of(reference: Any, sequence: Sequence[int]) -> torch.Tensor:
    return reference(torch.tensor([sequence])).logits[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE, f"off by {error:.2g} of the largest logit"


def test_text_and_trees(model: Model, theirs: Any) -> None:
    assert model.tokenizer is not None
    text = model.tokenizer.encode(TEXT)
    executor = TorchExecutor(model, dtype="float32", kv_tokens=256)
    whole = logits_of(theirs, text)
    assert_close(executor.forward([Segment.chain(executor.open(), text)]).logits, whole)
    rng = random.Random(0)
    for length in (1, 25, len(text) - 6):
        seq = prefill(executor, text[:length], chunk=20)
        tree, rows = grow_tree(rng, text[length : length + 6], 10, model.config.vocab_size)
        logits = executor.forward([on(seq, tree)]).logits
        assert_close(logits[rows], whole[length : length + 6])
        for row in rng.sample([row for row in range(16) if row not in rows], 4):
            assert_close(logits[row], logits_of(theirs, text[:length] + path_to(tree, row))[-1])
        executor.close(seq)


def test_hidden_states(model: Model, theirs: Any) -> None:
    assert model.tokenizer is not None
    text = model.tokenizer.encode(TEXT)[:24]
    executor = TorchExecutor(model, dtype="float32", kv_tokens=64)
    hidden = executor.forward([Segment.chain(executor.open(), text)], hidden_layers=(0, 1, 15, 29)).hidden
    with torch.no_grad():
        expected = theirs(torch.tensor([text]), output_hidden_states=True).hidden_states
    for layer, rows in hidden.items():
        assert_close(rows, expected[layer][0])
