"""Attention of chains against the same written out, with all keys of a row in one softmax."""

from __future__ import annotations

import pytest
import torch

from outrider.train.modules.attention import Grid, attend

HEADS, KV_HEADS, SIZE = 4, 2, 8
LENGTHS = (9, 5, 1)


def grid() -> Grid:
    longest = max(LENGTHS)
    slots = torch.cat([torch.arange(length) + number * longest for number, length in enumerate(LENGTHS)])
    return Grid(len(LENGTHS), longest, slots)


def problem(own: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Queries, keys, values, own keys and own values of some chains, all differentiable; and which rows those are."""
    generator = torch.Generator().manual_seed(own)
    chosen = torch.tensor([0, 3, 4, 8, 9, 13, 14])
    rows, chains = sum(LENGTHS), len(chosen)
    shapes = [(chains, HEADS), (rows, KV_HEADS), (rows, KV_HEADS), (chains, own, KV_HEADS), (chains, own, KV_HEADS)]
    return [torch.randn(*shape, SIZE, generator=generator).requires_grad_() for shape in shapes], chosen


def chained(tensors: list[torch.Tensor], chosen: torch.Tensor) -> torch.Tensor:
    queries, keys, values, own_keys, own_values = tensors
    where = grid()
    spread = [where.spread(x, where.slots).repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values)]
    return attend(queries, *spread, own_keys, own_values, where, where.slots[chosen])


def written_out(tensors: list[torch.Tensor], chosen: torch.Tensor) -> torch.Tensor:
    queries, keys, values, own_keys, own_values = tensors
    starts = torch.tensor([sum(LENGTHS[:n]) for n in range(len(LENGTHS)) for _ in range(LENGTHS[n])])
    out = []
    for number, row in enumerate(chosen.tolist()):
        seen = slice(int(starts[row]), row + 1)
        k = torch.cat((keys[seen], own_keys[number])).repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = torch.cat((values[seen], own_values[number])).repeat_interleave(HEADS // KV_HEADS, dim=1)
        weights = (torch.einsum("hd,nhd->hn", queries[number], k) / SIZE**0.5).softmax(-1)
        out.append(torch.einsum("hn,nhd->hd", weights, v))
    return torch.stack(out)


@pytest.mark.parametrize("own", [0, 1, 3])
def test_values_and_gradients(own: int) -> None:
    tensors, chosen = problem(own)
    results = []
    for attention in (chained, written_out):
        out = attention(tensors, chosen)
        mixed = (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum()
        results.append((out, torch.autograd.grad(mixed, tensors)))
    torch.testing.assert_close(*results)


def test_rows_find_their_way_back() -> None:
    where = grid()
    rows = torch.randn(sum(LENGTHS), 2, 3)
    assert torch.equal(where.gather(where.spread(rows, where.slots), where.slots), rows)
