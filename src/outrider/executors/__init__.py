"""Executors: what runs a model. One implementation per package, chosen by name through the registry."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from outrider.core.errors import UnknownNameError
from outrider.core.registry import Registry

if TYPE_CHECKING:
    from outrider.executors.base import ExecutorFactory

AUTO = "auto"

EXECUTORS: Registry[ExecutorFactory] = Registry(
    "executor",
    {
        "native": "outrider.executors.native.executor:NativeExecutor",
        "torch": "outrider.executors.torch.executor:TorchExecutor",
    },
)


def check_executor(name: str) -> str:
    """Return ``name`` if it is an executor that can be asked for; raise UnknownNameError otherwise."""
    if name != AUTO and name not in EXECUTORS.names():
        raise UnknownNameError("executor", name, (AUTO, *EXECUTORS.names()))
    return name


def choose_executor(name: str, *, dtype: str, device: str) -> str:
    """The executor that ``name`` stands for.

    "auto" is the native one on a CPU, where it was built and the dtype is left to it, and the torch one otherwise.
    """
    if name != AUTO:
        return EXECUTORS.check(name)
    if dtype != "auto" or device != "cpu":
        return "torch"
    from outrider.executors.native import ISA, require, why_unavailable

    if os.environ.get(ISA):
        require()  # who names an instruction set does not want another executor
    return "native" if why_unavailable() is None else "torch"
