"""Which number format and device the torch executor computes in."""

from __future__ import annotations

import torch

from outrider.core.errors import ConfigError, UnknownNameError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_device(name: str | torch.device) -> torch.device:
    """The device called ``name``; raises ConfigError if it is malformed or absent."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {str(name)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def resolve_dtype(name: str | torch.dtype, device: str | torch.device = "cpu") -> torch.dtype:
    """The dtype called ``name``. "auto" is bfloat16, except on a CPU that would only emulate it: there, float32.

    Raises UnknownNameError, or ConfigError for a torch.dtype that is not a floating-point format of `DTYPES`.
    """
    if isinstance(name, torch.dtype):
        if name not in DTYPES.values():
            raise ConfigError(f"dtype {name} is not supported; choose one of {', '.join(DTYPES)}")
        return name
    if name == "auto":
        on_cpu = torch.device(device).type == "cpu"
        return torch.float32 if on_cpu and not cpu_has_bfloat16() else torch.bfloat16
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, ["auto", *DTYPES])
    return DTYPES[name]


def cpu_has_bfloat16() -> bool:
    """Whether this CPU has bfloat16 dot products (AVX512_BF16 or AMX on x86, BF16 on Arm)."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
