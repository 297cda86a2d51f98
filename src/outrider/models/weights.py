"""Weights of a model, read tensor by tensor, under canonical names, whatever file they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.core.errors import ModelFileError, UnsupportedModelError
from outrider.models.config import ModelConfig, weight_shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


FLOAT_KINDS = ("F32", "F16", "BF16")


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

    @abstractmethod
    def are_floats(self) -> bool:
        """Whether every tensor is stored as float32, float16 or bfloat16."""


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise unless ``found`` (canonical name -> shape) is exactly what ``config`` calls for.

    ModelFileError for a tensor that is missing or of the wrong shape; UnsupportedModelError for one too many, which
    would mean mathematics that is not implemented.
    """
    if config.num_layers > len(found):
        raise ModelFileError(f"{where}: {config.num_layers} layers are promised, but there are {len(found)} tensors")
    wanted = weight_shapes(config)
    for name, shape in wanted.items():
        if name not in found:
            raise ModelFileError(f"{where}: the tensor {name!r} is missing")
        if tuple(found[name]) != shape:
            raise ModelFileError(f"{where}: tensor {name!r} has shape {tuple(found[name])}; {shape} is expected")
    for name in found:
        if name not in wanted:
            raise UnsupportedModelError(f"{where}: tensor {name!r} has no place in a {config.family} model")


class TensorWeights(Weights):
    """Weights that are in memory already: models built in tests, and heads under training."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> Iterable[str]:
        return self._tensors

    def are_floats(self) -> bool:
        return True

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        if name not in self._tensors:
            raise ModelFileError(f"the weights hold no tensor {name!r}")
        return self._tensors[name].to(dtype)

    def raw(self, name: str) -> RawTensor:
        import torch

        values = self.tensor(name, torch.float32).contiguous()
        return RawTensor("F32", tuple(values.shape), values.numpy().reshape(-1).view("uint8"))
