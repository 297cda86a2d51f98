"""A head made ready for another engine: in the layout that it reads, with all that it does not lend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.core.errors import HeadMismatchError, UnknownNameError
from outrider.heads.standalone import standalone
from outrider.models.config import OUTPUT

if TYPE_CHECKING:
    from outrider.heads.head import Head
    from outrider.models.weights import Weights

ENGINES: Mapping[str, Mapping[str, str]] = {
    "vllm": {"eagle3": "eagle3", "eagle": "eagle", "medusa": "medusa"},
    "sglang": {"eagle3": "eagle3", "eagle": "eagle-sglang"},
    "speculators": {"eagle3": "speculators", "eagle": "speculators"},
}
"""Engine, or library, -> method -> the layout that it takes (see `LAYOUTS`)."""

_LENDS_OUTPUT = ("eagle",)
"""Methods whose heads are lent the target's output matrix by every engine."""


def for_engine(head: Head, target: Weights, engine: str) -> tuple[Head, str]:
    """The head as ``engine`` can run it, and the layout in which to save it.

    target: the weights of the model that it drafts for, of which it may need the output matrix. Raises
    UnknownNameError for another engine, HeadMismatchError for a head that the engine would refuse or run differently.
    """
    if engine not in ENGINES:
        raise UnknownNameError("engine", engine, tuple(ENGINES))
    layout = ENGINES[engine].get(head.method)
    if layout is None:
        fitting = ", ".join(ENGINES[engine])
        raise HeadMismatchError(f"{head.label}: {engine} runs no {head.method} heads made for it; it runs {fitting}")
    fusion = head.config.fusion if head.config is not None else None
    if layout == "eagle" and fusion is not None and fusion.bias:
        raise HeadMismatchError(f"{head.label}: vLLM runs EAGLE-1 without the bias that this head has; use sglang")
    if layout == "speculators" and head.method in _LENDS_OUTPUT:
        return _with_whole_vocabulary(head), layout
    if head.method in _LENDS_OUTPUT:
        return head, layout
    # vLLM (0.32) makes room for the map of a reduced Medusa vocabulary, and then refuses a file that fills it.
    return standalone(head, target, whole_vocabulary=head.method == "medusa"), layout


def _with_whole_vocabulary(head: Head) -> Head:
    """A head that borrows rows of the target's output matrix is the same with all of them, and guesses no worse."""
    if head.draft_ids is None or head.config is None or OUTPUT in head.tensors:
        return head
    return replace(head, draft_ids=None, config=replace(head.config, logits_size=None))
