"""Names of number formats and devices."""

from __future__ import annotations

import pytest
import torch

from outrider.core.errors import ConfigError, UnknownNameError
from outrider.executors.torch import dtype as module
from outrider.executors.torch.dtype import resolve_device, resolve_dtype


@pytest.mark.parametrize(("has", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_on_a_cpu_depends_on_its_instructions(
    monkeypatch: pytest.MonkeyPatch, has: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(module, "cpu_has_bfloat16", lambda: has)
    assert resolve_dtype("auto", "cpu") is expected
    assert resolve_dtype("auto", "cuda") is torch.bfloat16


def test_what_counts_as_bfloat16_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, expected in (({"avx512_f": True}, False), ({"amx_bf16": True}, True), ({"bf16": True}, True)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert module.cpu_has_bfloat16() is expected


def test_names_and_dtypes() -> None:
    assert resolve_dtype("float16") is torch.float16
    assert resolve_dtype(torch.float32) is torch.float32
    with pytest.raises(UnknownNameError, match="unknown dtype 'bfloat'; did you mean 'bfloat16'"):
        resolve_dtype("bfloat")
    with pytest.raises(ConfigError, match=r"torch\.int8 is not supported"):
        resolve_dtype(torch.int8)


@pytest.mark.parametrize("name", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device '{name}' cannot be used"):
        resolve_device(name)
