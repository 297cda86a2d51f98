"""The files of a head: the keys of its config.json, and tensors that are read one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import HeadMismatchError, ModelFileError, ModelNotFoundError
from outrider.models.config_hf import read_json

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
PICKLES = (".pt", ".bin", ".pth")


class TensorFile(ABC):
    """Tensors by the names that the file gives them."""

    @abstractmethod
    def names(self) -> Collection[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor: ...


class Checkpoint:
    """A folder with tensors, or one file of tensors, and the config.json that lies with it (``values``; empty if none).

    Raises ModelNotFoundError if there is nothing, ModelFileError for a file that is cut short or holds other things.
    """

    def __init__(self, path: Path) -> None:
        folder = path if path.is_dir() else path.parent
        if not path.exists():
            raise ModelNotFoundError(f"{path}: there is no such file or folder")
        self.path = path
        self.values: dict[str, Any] = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
        self._places: dict[str, TensorFile] = {}
        for file in _weight_files(folder) if path.is_dir() else [path]:
            opened = _open(file)
            self._places |= dict.fromkeys(opened.names(), opened)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    @property
    def names(self) -> Collection[str]:
        return self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._places[name].shape(name)

    def tensor(self, name: str) -> torch.Tensor:
        """Raises HeadMismatchError for one that is not of floats, or a single number."""
        import torch

        tensor = self._places[name].tensor(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise HeadMismatchError(
                f"{self.path}: tensor {name!r} is of type {kind}; quantised drafters are not supported, so name one in "
                "float32, float16 or bfloat16"
            )
        if not tensor.ndim:
            raise HeadMismatchError(f"{self.path}: tensor {name!r} is a single number; no drafter has one")
        return tensor

    def whole_numbers(self, name: str) -> torch.Tensor:
        """A tensor of ids or of a mask, as int64. Raises HeadMismatchError for one of floats."""
        tensor = self._places[name].tensor(name)
        if tensor.is_floating_point() or tensor.ndim != 1:
            raise HeadMismatchError(f"{self.path}: tensor {name!r} must be one row of whole numbers")
        return tensor.long()


class _Safetensors(TensorFile):
    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._handle: Any = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{path}: not a complete safetensors file ({error}); get it again") from None

    def names(self) -> Collection[str]:
        return list(self._handle.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle.get_slice(name).get_shape())

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handle.get_tensor(name)
        return tensor


class _Pickle(TensorFile):
    """Loaded with ``weights_only`` and nothing else: a pickle can run any code, and this refuses all but tensors."""

    def __init__(self, path: Path) -> None:
        import pickle

        import torch

        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            raise ModelFileError(
                f"{path}: this pickle holds more than tensors, and loading it could run code; convert it to "
                "safetensors where you trust it"
            ) from None
        except Exception as error:  # there is nothing that a broken pickle may not fail with
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelFileError(f"{path}: not a complete file of tensors ({reason}); get it again") from None
        if isinstance(loaded, dict) and "optimizers" in loaded:
            raise ModelFileError(
                f"{path.parent}: the training of this drafter has not ended; the same 'outrider train' goes on with it"
            )
        if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
            raise ModelFileError(f"{path}: not a table of tensors by name")
        self._tensors: Mapping[str, torch.Tensor] = loaded

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def _open(path: Path) -> TensorFile:
    if path.suffix == ".safetensors":
        return _Safetensors(path)
    if path.suffix in PICKLES:
        return _Pickle(path)
    raise ModelFileError(
        f"{path}: a drafter's tensors lie in .safetensors, {', '.join(PICKLES)}, or in a folder of them"
    )


def _weight_files(folder: Path) -> list[Path]:
    """Safetensors are preferred to pickles."""
    for index in INDEXES:
        if (folder / index).exists():
            places = read_json(folder / index).get("weight_map")
            if not isinstance(places, dict) or not places:
                raise ModelFileError(f"{folder / index}: it has no weight_map")
            files = [folder / str(name) for name in sorted(set(places.values()))]
            missing = [file for file in files if not file.exists()]
            if missing:
                raise ModelNotFoundError(f"{missing[0]}: missing, but named in {index}")
            return files
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    for suffixes in ((".safetensors",), PICKLES):
        files = sorted(file for file in folder.iterdir() if file.suffix in suffixes)
        if len(files) == 1:
            return files
        if files:
            listed = ", ".join(file.name for file in files)
            raise ModelNotFoundError(f"{folder}: several files of tensors ({listed}); name the one that is the drafter")
    raise ModelNotFoundError(f"{folder}: no drafter here: neither {WEIGHTS} nor any other file of tensors")
