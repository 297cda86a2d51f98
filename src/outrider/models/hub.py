"""Models of the Hugging Face hub, through its own client and into its own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from outrider.core.errors import ModelNotFoundError

_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]


def snapshot(
    repository: str, file: str | None = None, *, progress: bool = True, patterns: Sequence[str] = _PATTERNS
) -> Path:
    """Download (or find in the hub's cache) a repository's folder, or its one GGUF ``file``.

    patterns: the files of a folder that are wanted.

    Raises ModelNotFoundError if there is no such repository or file, or if the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted = f"{repository}:{file}" if file else repository
    try:
        with _bars(progress):
            if file:
                return Path(hf_hub_download(repository, file))
            folder = Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except LocalEntryNotFoundError:
        raise ModelNotFoundError(
            f"{wanted}: not in the local cache, and the hub cannot be reached; "
            "`outrider models` lists models that need no hub"
        ) from None
    except (OSError, ValueError) as error:  # the client's HTTP errors are OSErrors, a malformed id is a ValueError
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelNotFoundError(f"{wanted}: not available from the hub: {reason[0]}") from None
    if not (folder / "config.json").exists():
        raise ModelNotFoundError(
            f"{wanted}: this repository has no config.json; if it holds GGUF files, name one: {repository}:FILE.gguf"
        )
    return folder


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Silence the hub client's progress bars for a while, unless ``shown``."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silence = not shown and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            enable_progress_bars()
