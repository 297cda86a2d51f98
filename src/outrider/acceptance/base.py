"""The acceptance contract: (tree, target logits, sampling state, noise) -> accepted path and next token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from outrider.core.noise import Stream, fresh_stream

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from outrider.core.config import SpeculativeConfig
    from outrider.core.sampling import SamplingState
    from outrider.core.tree import DraftTree


@dataclass(frozen=True)
class Candidate:
    """One sequence's round, to be judged.

    tree: what was drafted; may be empty (plain decoding).
    logits: [1 + len(tree), V] float32, the target's: row 0 follows the root, row i+1 follows node i.
    sampling: the request's transform, seed and position.
    """

    tree: DraftTree
    logits: torch.Tensor
    sampling: SamplingState

    def __post_init__(self) -> None:
        rows = self.logits.shape[0]
        if rows != 1 + len(self.tree):
            raise ValueError(f"{len(self.tree)} draft nodes need {1 + len(self.tree)} rows, not {rows}")

    @cached_property
    def rows(self) -> npt.NDArray[np.float32]:
        """The logits as an array over the same memory: a step down the tree then costs no call into PyTorch."""
        rows: npt.NDArray[np.float32] = self.logits.detach().numpy()
        return rows


@dataclass(frozen=True)
class Verdict:
    """path: accepted nodes, top down. token: the correction, or the bonus token if the path ends at a leaf."""

    path: tuple[int, ...]
    token: int

    def rows(self) -> list[int]:
        """Accepted rows of the forward pass, the root (row 0) first."""
        return [0, *(node + 1 for node in self.path)]


class AcceptanceRule(ABC):
    """Decides what of a draft is kept. Sees no text, no stop rule and no other sequence.

    lossless: tokens have the target's distribution exactly.
    trees: whether the rule can judge a tree; a rule that cannot is given chains only.
    noise_stream: the noise that sampling drafters must draw with; `draft_stream` says which part of it in which round.
        A rule that compares p with q (rejection, block) needs draft noise that is independent of its own.
    needs_all_proposals: a tree whose nodes carry the distribution they were drawn from must be verified as drawn: to
        leave out nodes because of *which* tokens were drawn would bias the rule. The engine then trims by depth only.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    noise_stream: ClassVar[Stream] = Stream.TARGET
    needs_all_proposals: ClassVar[bool] = False

    def __init__(self, config: SpeculativeConfig | None = None) -> None:  # noqa: B027  (most rules have none)
        """``config`` carries the settings of rules that have any; None: defaults."""

    def draft_stream(self, position: int) -> int:
        """The noise that sampling drafters must draw with in the round whose first token has ``position``.

        It is `noise_stream` itself for a rule that shares the target's noise. For the others it is another stream each
        round: what a rule saw of a rejected position's noise must not come back when that position is drafted again.
        """
        return self.noise_stream if self.noise_stream is Stream.TARGET else fresh_stream(self.noise_stream, position)

    @abstractmethod
    def accept(self, candidates: Sequence[Candidate]) -> list[Verdict]:
        """Judge every sequence of the batch on its own. Raises NonFiniteLogitsError for a broken target row."""
