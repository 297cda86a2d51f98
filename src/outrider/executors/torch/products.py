"""Matrix products whose rows come out the same, bit for bit, however many rows there are.

No library promises this. What its kernels do can be observed, though, and the shapes chosen here keep to those whose
kernels add up in one order. Observed with PyTorch 2.13 on x86 CPUs with AVX-512, bfloat16 and float32, one thread and
several (tests/parity/test_torch_row_invariance.py holds it):

- oneDNN with packed weights: every number of rows agrees, except one row alone, which takes a kernel of its own.
- Batched products in bfloat16 (oneDNN): any number of rows, and up to 1,024 terms, which are added in ascending order
  two at a time.
- Batched products in float32 (MKL): any multiple of 4 rows with any multiple of 16 columns, and up to 192 terms, which
  are added in ascending order.

Terms that are zero leave a sum's bits alone, after the others or between the groups that a kernel adds in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F

from outrider.executors.base import check_rows

MIN_ROWS = 4
"""Fewest rows of a product with weights. Four rows also take no longer than one: the kernel for one is the slower."""

COLUMN_MULTIPLE = 16
"""Keys are padded to a multiple of this."""


@dataclass(frozen=True)
class Arithmetic:
    """How batched products of one dtype are shaped.

    rows: their number is padded to a multiple of this. block: terms that are left to one product; longer sums are split
    at multiples of this position. group: terms that a kernel may add in one step; aligned groups of positions are never
    torn apart.
    """

    rows: int
    block: int
    group: int


_FLOAT32 = Arithmetic(rows=4, block=128, group=1)
_FLOAT16 = Arithmetic(rows=1, block=768, group=4)


def arithmetic_of(dtype: torch.dtype) -> Arithmetic:
    return _FLOAT32 if dtype == torch.float32 else _FLOAT16


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class Linear:
    """x [rows, in] -> x @ weight.T + bias [rows, out].

    On a CPU the weight is kept in oneDNN's own layout, which halves the time of small batches (a plain matrix is laid
    out anew in every call) and gives the same bits.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, MIN_ROWS) if self._packed else weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return y
        return F.linear(x, self._weight, self._bias)


class TorchDense:
    """`outrider.executors.base.Dense` in the dtype and on the device of ``weight`` [n, k]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._k = weight.shape[1]
        self._like = weight.new_empty(0)
        self._linear = Linear(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        check_rows(x, self._k)
        with torch.inference_mode():
            rows = F.pad(x, (0, 0, 0, max(0, MIN_ROWS - len(x)))).to(self._like)
            y = self._linear(rows)[: len(x)]
        return y.to("cpu", torch.float32, copy=True)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def dot(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [batch, rows, d], keys [batch, columns, d] -> [batch, rows, columns]; columns: see COLUMN_MULTIPLE."""
    return _bmm(queries, keys.transpose(1, 2))


def weighted_sum(weights: torch.Tensor, values: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
    """weights [batch, rows, columns], values [batch, columns, d] -> [batch, rows, d].

    edges: columns at which the blocks of the sum begin, and the number of columns; blocks are added up in float32.
    """
    if len(edges) == 2:
        return _bmm(weights, values)
    blocks = [slice(*pair) for pair in pairwise(edges)]
    total = _bmm(weights[..., blocks[0]], values[:, blocks[0]]).float()
    for block in blocks[1:]:
        total += _bmm(weights[..., block], values[:, block])
    return total.to(weights.dtype)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = a.shape[1]
    padding = -rows % arithmetic_of(a.dtype).rows
    return torch.bmm(F.pad(a, (0, 0, 0, padding)), b)[:, :rows] if padding else torch.bmm(a, b)
