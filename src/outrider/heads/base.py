"""The Layout contract: one way in which heads are written down."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.heads.checkpoint import WEIGHTS

if TYPE_CHECKING:
    import torch

    from outrider.heads.checkpoint import Checkpoint
    from outrider.heads.head import Head
    from outrider.models.config import ModelConfig


@dataclass(frozen=True)
class Files:
    """What a layout writes. values: of config.json. tensors: of the one safetensors file, called ``weights``."""

    values: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    weights: str = WEIGHTS


class Layout(ABC):
    """Reads and writes heads in one public form. ``methods``: those that it can hold."""

    methods: tuple[str, ...]

    @abstractmethod
    def method(self, checkpoint: Checkpoint) -> str | None:
        """The method of the head that lies there in this layout; None if it is in another one. Reads no tensors."""

    @abstractmethod
    def read(self, checkpoint: Checkpoint, target: ModelConfig) -> Head:
        """The head. What no file of this layout says, such as how many layers its target has, is as in ``target``.

        Whether it fits the target is for the caller to check. Raises HeadMismatchError for tensors that contradict each
        other, UnsupportedModelError for mathematics that is not implemented, and ModelFileError.
        """

    @abstractmethod
    def write(self, head: Head) -> Files:
        """Raises HeadMismatchError for a head of which this layout could not say all that matters."""
