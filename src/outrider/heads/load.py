"""From a name to a head: a local checkpoint or a hub id, in any of the layouts in `LAYOUTS`."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import HeadMismatchError, ModelFileError, ModelNotFoundError
from outrider.heads import LAYOUTS
from outrider.heads.checkpoint import Checkpoint
from outrider.heads.values import own_accuracies, own_ranked_accuracies

if TYPE_CHECKING:
    from outrider.heads.base import Layout
    from outrider.heads.head import Head
    from outrider.models.config import ModelConfig


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_WANTED = ("*.json", "*.safetensors", "*.bin", "*.pt")
"""Files of a repository: pickles too, since many public heads are nothing else, and they are read as tensors alone."""


def locate_head(name: str) -> Path:
    """The folder or file that ``name`` stands for: a path, or a hub id ``org/name``, which is fetched if need be.

    Raises ModelNotFoundError.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    if _HUB_ID.fullmatch(name) is None:
        raise ModelNotFoundError(
            f"{name}: there is no such file or folder, and it is no hub id (org/name) either; a model that is to draft "
            "by itself is named with method 'draft_model'"
        )
    from outrider.models.hub import snapshot

    return snapshot(name, patterns=_WANTED)


def load_head(path: str | Path, target: ModelConfig, name: str) -> Head:
    """Read a head and check that it fits its target, before anything runs.

    path: a folder with config.json and tensors, or one file of tensors. target, name: the model that it drafts for.
    Tensors keep the file's type (float32, float16 or bfloat16).

    Raises ModelNotFoundError, ModelFileError (cut short, or in no known layout), UnsupportedModelError (a variant that
    is not implemented) or HeadMismatchError (made for another target, quantised, or tensors that do not fit).
    """
    checkpoint = Checkpoint(Path(path).expanduser())
    layout, _ = _recognise(checkpoint)
    head = layout.read(checkpoint, target)
    values, where = checkpoint.values, str(checkpoint.path)
    head = replace(
        head,
        accept_by_depth=own_accuracies(values, where),
        accept_by_rank=own_ranked_accuracies(values, head.num_heads, where),
    )
    head.check_fits(target, name)
    head.check_tensors()
    return head


def head_method(path: str | Path) -> str:
    """The method of the head at ``path``, without reading its tensors. Raises as `load_head`."""
    return _recognise(Checkpoint(Path(path).expanduser()))[1]


def _recognise(checkpoint: Checkpoint) -> tuple[Layout, str]:
    for name in LAYOUTS.names():
        layout = LAYOUTS.get(name)()
        method = layout.method(checkpoint)
        if method is not None:
            return layout, method
    quantised = [name for name in checkpoint.names if name.endswith((".qweight", ".weight_packed", ".weight_scale"))]
    if quantised:
        raise HeadMismatchError(
            f"{checkpoint.path}: tensor {quantised[0]!r} is that of a quantised drafter, which is not supported; name "
            "one in float32, float16 or bfloat16"
        )
    some = ", ".join(sorted(checkpoint.names)[:4])
    raise ModelFileError(
        f"{checkpoint.path}: not a drafter in a layout that is known ({', '.join(LAYOUTS.names())}); its tensors are "
        f"{some}, …; a whole model is named with method 'draft_model'"
    )
