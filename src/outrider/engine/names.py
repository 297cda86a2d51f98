"""Names that a configuration may hold, checked without loading what they stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.acceptance import RULES
from outrider.drafters import check_method
from outrider.executors import check_executor

if TYPE_CHECKING:
    from outrider.core.config import SpeculativeConfig


def check_names(config: SpeculativeConfig, executor: str = "auto") -> None:
    """Raise UnknownNameError for a method, acceptance rule or executor that does not exist."""
    for member in config.members:
        check_method(member)
    RULES.check(config.acceptance)
    check_executor(executor)
