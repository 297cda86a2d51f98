"""Matrix products whose rows come out the same, bit for bit, however many rows there are.

No library promises this. What its kernels do can be observed, though, and the shapes chosen here keep to those whose
kernels add up in one order. Observed with PyTorch 2.13 on x86 CPUs with AVX-512, bfloat16 and float32, one thread and
several (tests/parity/test_torch_row_invariance.py holds it):

- oneDNN with packed weights: every number of rows agrees, except one row alone, which takes a kernel of its own.
- Batched products in bfloat16 (oneDNN): any number of rows and of terms, up to 1,024 terms.
- Batched products in float32 (MKL): any multiple of 4 rows with any multiple of 16 columns; up to 192 terms.

Zeros that follow the terms of a sum leave its bits alone, so short sums may be padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

MIN_ROWS = 4
"""Fewest rows of a product with weights. Four rows also take no longer than one: the kernel for one is the slower."""

COLUMN_MULTIPLE = 16
"""Keys are padded to a multiple of this."""

_ROW_MULTIPLE = {torch.float32: 4}
_MAX_TERMS = {torch.float32: 128}
_MAX_TERMS_16_BIT = 1024


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


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def dot(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [batch, rows, d], keys [batch, columns, d] -> [batch, rows, columns]; columns: see COLUMN_MULTIPLE."""
    return _bmm(queries, keys.transpose(1, 2))


def weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [batch, rows, columns], values [batch, columns, d] -> [batch, rows, d].

    Long sums are taken in blocks that start at fixed columns, added up in float32.
    """
    columns = weights.shape[-1]
    block = _MAX_TERMS.get(weights.dtype, _MAX_TERMS_16_BIT)
    if columns <= block:
        return _bmm(weights, values)
    total = _bmm(weights[..., :block], values[:, :block]).float()
    for start in range(block, columns, block):
        total += _bmm(weights[..., start : start + block], values[:, start : start + block])
    return total.to(weights.dtype)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    rows = a.shape[1]
    padding = -rows % _ROW_MULTIPLE.get(a.dtype, 1)
    return torch.bmm(F.pad(a, (0, 0, 0, padding)), b)[:, :rows] if padding else torch.bmm(a, b)
