"""The torch executor against Hugging Face transformers, on small random models of every family.

Both compute in float32 and round at every step, in different orders. With logits that spread by about 1 that leaves
differences of 1e-6 to 1e-5; a row that saw a wrong key differs by 1e-2 and more (the last test shows it). The tolerance
of 1e-4 tells the two apart with a wide margin on either side.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.loader import Model
from tests.parity.torch_support import grow_tree, on, path_to, prefill, tokens
from tests.support.models import VARIANTS, hf_config, random_model

TOLERANCE = 1e-4
VOCABULARY = 128


@cache
def model(variant: str) -> Model:
    return random_model(variant)


@cache
def theirs(variant: str) -> Any:
    """The same weights in transformers, float32, attention written out."""
    ours = model(variant)
    values = hf_config(ours.config)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    state = {name: ours.weights.tensor(name, torch.float32) for name in ours.weights.names()}
    missing = reference.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    return reference.eval()


@torch.no_grad()
def their_logits(variant: str, sequence: Sequence[int]) -> torch.Tensor:
    return theirs(variant)(torch.tensor([sequence])).logits[0]


def executor_of(variant: str, **options: Any) -> TorchExecutor:
    return TorchExecutor(model(variant), dtype="float32", kv_tokens=1024, **options)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_node_of_a_tree_is_as_if_its_path_stood_alone(variant: str, seed: int) -> None:
    rng = random.Random(seed)
    executor = executor_of(variant)
    prompt = tokens(rng, rng.randrange(1, 40), VOCABULARY)
    seq = prefill(executor, prompt, chunk=rng.randrange(1, 30))
    tree, rows = grow_tree(rng, tokens(rng, 6, VOCABULARY), 14, VOCABULARY)
    logits = executor.forward([on(seq, tree)]).logits
    for row in range(len(tree.tokens)):
        assert_close(logits[row], their_logits(variant, prompt + path_to(tree, row))[-1])
    executor.commit(seq, rows)
    committed = prompt + path_to(tree, rows[-1])
    last = executor.forward([Segment.chain(seq, [7])]).logits[0]
    assert_close(last, their_logits(variant, [*committed, 7])[-1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_several_sequences_of_different_lengths(variant: str) -> None:
    rng = random.Random(3)
    executor = executor_of(variant)
    prompts = [tokens(rng, length, VOCABULARY) for length in (0, 3, 50, 17)]
    handles = [prefill(executor, prompt) for prompt in prompts]
    trees = [grow_tree(rng, tokens(rng, 3, VOCABULARY), extra, VOCABULARY)[0] for extra in (4, 0, 7, 0)]
    logits = executor.forward([on(seq, tree) for seq, tree in zip(handles, trees, strict=True)]).logits
    row = 0
    for prompt, tree in zip(prompts, trees, strict=True):
        for node in range(len(tree.tokens)):
            assert_close(logits[row], their_logits(variant, prompt + path_to(tree, node))[-1])
            row += 1
    assert row == len(logits)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_long_prompts_in_chunks(variant: str, chunk: int) -> None:
    """100 tokens: several windows of 12, and past Llama 3's original context of 64."""
    sequence = tokens(random.Random(4), 100, VOCABULARY)
    executor = executor_of(variant)
    seq = executor.open()
    parts = []
    for start in range(0, len(sequence), chunk):
        part = sequence[start : start + chunk]
        parts.append(executor.forward([Segment.chain(seq, part)]).logits)
        executor.commit(seq, range(len(part)))
    assert_close(torch.cat(parts), their_logits(variant, sequence))


@pytest.mark.parametrize("variant", ["llama", "qwen3", "smollm3"])
def test_hidden_states(variant: str) -> None:
    """Layer i is the residual stream after i blocks. transformers gives the last one after the final norm."""
    executor = executor_of(variant)
    layers = executor.config.num_layers
    prompt = tokens(random.Random(5), 20, VOCABULARY)
    seq = prefill(executor, prompt[:8])
    tree = Segment(seq, [*prompt[8:], 1, 2], [*range(-1, 11), 4, -1], logits=[3])
    output = executor.forward([tree], hidden_layers=range(layers + 1))
    assert output.logits.shape == (1, VOCABULARY)
    assert list(output.hidden) == list(range(layers + 1))
    assert {tuple(x.shape) for x in output.hidden.values()} == {(14, executor.config.hidden_size)}
    reference = theirs(variant)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        for layer in range(layers):
            assert_close(output.hidden[layer][:12], expected[layer][0, 8:])
        assert_close(reference.model.norm(output.hidden[layers][:12]), expected[layers][0, 8:])


def test_rows_without_logits_are_left_out() -> None:
    rng = random.Random(6)
    executor = executor_of("llama")
    handles = [executor.open() for _ in range(3)]
    prompts = [tokens(rng, 9, VOCABULARY) for _ in handles]
    wanted: list[tuple[int, ...]] = [(2, 8), (), (0,)]
    segments = [Segment.chain(*parts) for parts in zip(handles, prompts, wanted, strict=True)]
    expected = [their_logits("llama", prompt)[list(rows)] for prompt, rows in zip(prompts, wanted, strict=True)]
    assert_close(executor.forward(segments).logits, torch.cat(expected))


def test_the_tolerance_is_sharp() -> None:
    """A row that sees one wrong token, 20 places back, is far outside the tolerance."""
    sequence = tokens(random.Random(7), 30, VOCABULARY)
    other = [*sequence[:9], (sequence[9] + 1) % VOCABULARY, *sequence[10:]]
    difference = (their_logits("llama", sequence) - their_logits("llama", other))[-1].abs().max()
    assert difference > 100 * TOLERANCE
