"""Writing a head in a public layout: config.json and one file of safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core.errors import ConfigError
from outrider.heads import LAYOUTS
from outrider.heads.checkpoint import CONFIG
from outrider.models.cache import replacing

if TYPE_CHECKING:
    from outrider.heads.head import Head


def save_head(head: Head, folder: Path, layout: str | None = None) -> None:
    """Write ``head`` into ``folder``, which is made if need be; files of the same names are replaced, each at once.

    layout: a name of `LAYOUTS`; None for the method's own, which has the method's name. Tensors keep their type.
    Raises UnknownNameError, ConfigError for a layout of other methods, and HeadMismatchError for a head whose tensors
    do not fit each other, or of which the layout could not say all that matters.
    """
    from safetensors.torch import save

    name = layout or head.method
    writer = LAYOUTS.get(name)()
    if head.method not in writer.methods:
        fitting = [each for each in LAYOUTS.names() if head.method in LAYOUTS.get(each).methods]
        raise ConfigError(f"layout {name!r} holds no {head.method} drafter; choose one of {', '.join(fitting)}")
    head.check_tensors()
    files = writer.write(head)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / files.weights) as part:
        tensors = {key: tensor.contiguous() for key, tensor in files.tensors.items()}
        # save_file would make a file that nobody else may read.
        part.write_bytes(save(tensors, metadata={"format": "pt"}))
    with replacing(folder / CONFIG) as part:
        part.write_text(json.dumps(files.values, indent=2) + "\n", encoding="utf-8")
