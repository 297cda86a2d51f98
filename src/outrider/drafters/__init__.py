"""Drafters: what proposes tokens. One per module, chosen by name through the registry.

`build` makes the drafter that a `SpeculativeConfig` asks for; names joined by ``+`` make a cascade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.core.config import AUTO, LEARNED
from outrider.core.errors import ConfigError, UnknownNameError
from outrider.core.registry import Registry

if TYPE_CHECKING:
    from outrider.drafters.base import Drafter, DrafterContext
    from outrider.models.config import ModelConfig

DRAFTERS: Registry[type[Drafter]] = Registry(
    "speculative method",
    {
        "none": "outrider.drafters.none:NoDrafter",
        "ngram": "outrider.drafters.ngram:NgramDrafter",
        "suffix": "outrider.drafters.suffix:SuffixDrafter",
        "recycle": "outrider.drafters.recycle:RecycleDrafter",
        "lookahead": "outrider.drafters.lookahead:LookaheadDrafter",
        "draft_model": "outrider.drafters.draft_model:DraftModelDrafter",
        "eagle": "outrider.drafters.eagle:EagleDrafter",
        "eagle3": "outrider.drafters.eagle:Eagle3Drafter",
        "mtp": "outrider.drafters.mtp:MtpDrafter",
        "medusa": "outrider.drafters.medusa:MedusaDrafter",
    },
)


def build(context: DrafterContext) -> Drafter:
    """The drafter that ``context.config.method`` names. Every class is built as ``cls(context)``.

    Raises UnknownNameError, naming the nearest known method.
    """
    return assemble(context.config.members, context, {})


def assemble(
    members: Sequence[str], context: DrafterContext, made: dict[str, Drafter], *, load_models: bool = True
) -> Drafter:
    """The drafter that ``members`` name, a cascade if there are several. ``context.config.method`` plays no part.

    One that reads hidden states is let rest while it does not pay, unless the configuration is not to be adapted.

    made: drafters that exist already, by name, which are used again; those built now are added. load_models: False to
    raise ConfigError for a drafter that would have to load a model first. ``auto`` then makes do with what is made.
    Raises UnknownNameError for an unknown name.
    """
    from outrider.drafters.cascade import Cascade
    from outrider.drafters.resting import Resting

    at_hand = [name for name in LEARNED if name in made][:1]
    names = _names(members, _learned(context) if load_models and "auto" in members else at_hand)
    for name in names:
        if name not in made:
            if DRAFTERS.get(name).needs_model and not load_models:
                raise ConfigError(
                    f"method {name!r} needs a model that is not loaded; it must be part of the speculative config that "
                    "the engine is started with"
                )
            made[name] = DRAFTERS.get(name)(context)  # type: ignore[call-arg]
    drafters = [made[name] for name in names]
    if len(drafters) > 1:
        return Cascade(drafters, context.config.tree_width)
    follows = context.config.adaptive and drafters[0].wants.hidden_layers
    return Resting(drafters[0]) if follows else drafters[0]


def kv_configs(context: DrafterContext) -> list[ModelConfig]:
    """Of the models that the drafters of ``context.config`` will open executors with a KV cache for, one each.

    Raises as `assemble`. What had to be read is kept in ``context.read``.
    """
    members = context.config.members
    names = _names(members, _learned(context) if "auto" in members else ())
    found = [DRAFTERS.get(name).kv_config(context) for name in names]
    return [config for config in found if config is not None]


def _names(members: Sequence[str], learned: Sequence[str]) -> list[str]:
    """The drafters that ``members`` stand for, once each. learned: those that ``auto`` has beside its own."""
    names: list[str] = []
    for member in members:
        names.extend((*AUTO, *learned) if member == "auto" else [check_method(member)])
    return list(dict.fromkeys(names))


def _learned(context: DrafterContext) -> Sequence[str]:
    """The learned drafter that is part of ``auto``, if one is there."""
    from outrider.drafters.heads import best_head

    best = best_head(context)
    return [] if best is None else [best]


def check_method(name: str) -> str:
    """Return ``name`` if it is a method that can be asked for; raise UnknownNameError otherwise."""
    if name not in methods():
        raise UnknownNameError("speculative method", name, methods())
    return name


def methods() -> tuple[str, ...]:
    """Every name that ``method`` takes."""
    return ("auto", *DRAFTERS.names())
