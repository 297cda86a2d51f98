"""Names that a configuration may hold."""

from __future__ import annotations

import pytest

from outrider.core.config import SpeculativeConfig
from outrider.core.errors import UnknownNameError
from outrider.engine.names import check_names


@pytest.mark.parametrize(
    ("config", "executor", "expected"),
    [
        (SpeculativeConfig(method="autto"), "auto", "did you mean 'auto'?"),
        (SpeculativeConfig(method="sufix"), "auto", "did you mean 'suffix'? Known: auto, draft_model"),
        (SpeculativeConfig(), "cuda", "unknown executor 'cuda'. Known: auto, native, torch."),
    ],
)
def test_an_unknown_name_lists_every_known_one_auto_included(
    config: SpeculativeConfig, executor: str, expected: str
) -> None:
    with pytest.raises(UnknownNameError) as caught:
        check_names(config, executor)
    assert expected in str(caught.value)


def test_known_names_pass() -> None:
    check_names(SpeculativeConfig(method="auto"), "auto")
    check_names(SpeculativeConfig(method="suffix+recycle"), "native")
