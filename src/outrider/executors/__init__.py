"""Executors: what runs a model. One implementation per module, chosen by name through the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.registry import Registry

if TYPE_CHECKING:
    from outrider.executors.base import ExecutorFactory

EXECUTORS: Registry[ExecutorFactory] = Registry(
    "executor",
    {
        "native": "outrider.executors.native.executor:NativeExecutor",
        "torch": "outrider.executors.torch.executor:TorchExecutor",
    },
)
