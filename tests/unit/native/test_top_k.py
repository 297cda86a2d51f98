"""The native top-k against PyTorch's, on every instruction set."""

from __future__ import annotations

import pytest
import torch

from outrider.executors.base import Executor
from tests.support.models import random_model
from tests.support.native import available_isas

if not available_isas():
    pytest.skip("the native extension is not built", allow_module_level=True)

from outrider.executors.native.executor import NativeExecutor

ISAS = pytest.mark.parametrize("isa", available_isas())


def build(isa: str) -> NativeExecutor:
    return NativeExecutor(random_model("llama", num_layers=1), kv_tokens=16, isa=isa)


@ISAS
@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 8, 8), (3, 63, 1), (5, 64, 7), (17, 1000, 8), (2, 151936, 40)])
def test_agrees_with_torch(isa: str, rows: int, columns: int, k: int) -> None:
    """Ids exactly. Log-probabilities to 1e-4: up to 10,000 float32 additions in a row, each off by 6e-8 at most."""
    executor = build(isa)
    logits = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * 5
    ids, logprobs = executor.top_k(logits, k)
    wanted_ids, wanted = Executor.top_k(executor, logits, k)
    assert ids.tolist() == wanted_ids.tolist()
    assert torch.allclose(logprobs, wanted, atol=1e-4, rtol=0)


@ISAS
def test_equals_go_to_the_lower_id_and_minus_infinity_comes_last(isa: str) -> None:
    logits = torch.full((1, 200), -torch.inf)
    logits[0, [150, 3, 77]] = torch.tensor([2.0, 2.0, 1.0])
    ids, logprobs = build(isa).top_k(logits, 4)
    assert ids[0, :3].tolist() == [3, 150, 77]
    odds = torch.tensor([2.0, 2.0, 1.0]).exp()
    assert torch.allclose(logprobs[0, :3].exp(), odds / odds.sum())
    assert logprobs[0, 3] == -torch.inf


@ISAS
def test_a_row_does_not_depend_on_its_neighbours(isa: str) -> None:
    executor = build(isa)
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(1))
    _, together = executor.top_k(logits, 5)
    for row in range(9):
        assert torch.equal(executor.top_k(logits[row : row + 1], 5)[1][0], together[row])


def test_room_is_checked() -> None:
    with pytest.raises(ValueError, match="top_k"):
        build(available_isas()[0]).top_k(torch.zeros(1, 4), 5)
