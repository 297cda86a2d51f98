"""Which head a learned drafter runs: the one that ``model`` names, or the one that comes with the target."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from outrider.core.errors import ConfigError
from outrider.heads.load import head_method, load_head, locate_head
from outrider.heads.shipped import heads_at_hand

if TYPE_CHECKING:
    from pathlib import Path

    from outrider.core.config import SpeculativeConfig
    from outrider.drafters.base import DrafterContext
    from outrider.heads.head import Head

_log = logging.getLogger(__name__)


def head_for(context: DrafterContext, method: str, *, keep: bool = False) -> Head:
    """The head that the drafter of ``method`` is to run. keep: see `ReadOnce`.

    Raises ConfigError, naming ``outrider train``, if there is none, and what `locate_head` and `load_head` raise.
    """
    target = context.target
    named = _named(context.config)
    path = named[1] if named is not None and named[0] == method else heads_at_hand(target).get(method)
    if path is None:
        raise ConfigError(
            f"method {method!r} needs a drafter that was trained for {target.name}, and none comes with it; name one "
            f"as 'model', or make one: outrider train {target.name} --method {method}"
        )
    if not keep:
        _log.info("method %s drafts with %s", method, path)
    return context.read.get(("head", method, str(path)), lambda: load_head(path, target.config, target.name), keep=keep)


def best_head(context: DrafterContext) -> str | None:
    """The learned method that ``auto`` drafts with for this target: that of ``model``, else the best one at hand.

    Raises as `head_for`, but looks at no tensors.
    """
    named = _named(context.config)
    return named[0] if named is not None else next(iter(heads_at_hand(context.target)), None)


def _named(config: SpeculativeConfig) -> tuple[str, Path] | None:
    """Method and place of the head that ``model`` names. It names none where a draft model is among the members."""
    if config.model is None or "draft_model" in config.members:
        return None
    path = locate_head(config.model)
    method = head_method(path)
    if method not in config.members and "auto" not in config.members:
        raise ConfigError(
            f"{config.model} is a drafter of method {method!r}; method {config.method!r} would ignore it, so ask for "
            f"{method!r} or 'auto'"
        )
    return method, path
