"""Weights of a model, read tensor by tensor, under canonical names, whatever file they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


@dataclass(frozen=True)
class RawTensor:
    """A tensor as the file stores it. kind: "F32", "BF16", "Q4_K", … shape: logical. data: its bytes, a view."""

    kind: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class Weights(ABC):
    """Tensors by canonical name (see `outrider.models.config.weight_shapes`)."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Canonical names of all tensors in the file."""

    @abstractmethod
    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One tensor, dequantised through float32 and rounded to ``dtype``. Raises ModelFileError if it is missing."""

    @abstractmethod
    def raw(self, name: str) -> RawTensor:
        """One tensor as the file stores it, for executors that pack quantised weights themselves."""


class TensorWeights(Weights):
    """Weights that are in memory already: models built in tests, and heads under training."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Iterable[str]:
        return self._tensors

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        from outrider.core.errors import ModelFileError

        if name not in self._tensors:
            raise ModelFileError(f"the weights hold no tensor {name!r}")
        return self._tensors[name].to(dtype)

    def raw(self, name: str) -> RawTensor:
        import torch

        values = self.tensor(name, torch.float32).contiguous()
        return RawTensor("F32", tuple(values.shape), values.numpy().reshape(-1).view("uint8"))
