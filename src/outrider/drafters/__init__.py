"""Drafters: what proposes tokens. One per module, chosen by name through the registry.

`build` makes the drafter that a `SpeculativeConfig` asks for; names joined by ``+`` make a cascade.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.config import AUTO
from outrider.core.registry import Registry

if TYPE_CHECKING:
    from outrider.drafters.base import Drafter, DrafterContext

DRAFTERS: Registry[type[Drafter]] = Registry(
    "speculative method",
    {
        "none": "outrider.drafters.none:NoDrafter",
        "ngram": "outrider.drafters.ngram:NgramDrafter",
        "suffix": "outrider.drafters.suffix:SuffixDrafter",
        "recycle": "outrider.drafters.recycle:RecycleDrafter",
        "draft_model": "outrider.drafters.draft_model:DraftModelDrafter",
    },
)


def build(context: DrafterContext) -> Drafter:
    """The drafter that ``context.config.method`` names. Every class is built as ``cls(context)``.

    Raises UnknownNameError, naming the nearest known method.
    """
    from outrider.drafters.cascade import Cascade

    names: list[str] = []
    for member in context.config.members:
        names.extend(AUTO if member == "auto" else [check_method(member)])
    names = list(dict.fromkeys(names))
    drafters = [DRAFTERS.get(name)(context) for name in names]  # type: ignore[call-arg]
    return drafters[0] if len(drafters) == 1 else Cascade(drafters, context.config.tree_width)


def check_method(name: str) -> str:
    """Return ``name`` if it is a method that can be asked for; raise UnknownNameError otherwise."""
    if name == "auto":
        return name
    return DRAFTERS.check(name)


def methods() -> tuple[str, ...]:
    """Every name that ``method`` takes."""
    return ("auto", *DRAFTERS.names())
