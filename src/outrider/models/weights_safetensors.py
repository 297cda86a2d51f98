"""Weights in safetensors files: one, or several with an index."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from outrider.models.config import OUTPUT, ModelConfig
from outrider.models.config_hf import read_json
from outrider.models.weights import FLOAT_KINDS, RawTensor, Weights, check_tensors

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class SafetensorsWeights(Weights):
    """Tensors of a folder. Raises ModelFileError unless they are exactly those that ``config`` calls for."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._places: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        prediction = _prediction_modules(folder, config)
        for file in weight_files(folder):
            handle = self._files[file] = _open(folder / file)
            for name in handle.keys():  # noqa: SIM118  (a handle is not iterable)
                if name.startswith(prediction):
                    continue
                if name.endswith(".rotary_emb.inv_freq"):  # buffers that old checkpoints saved; the config says as much
                    continue
                if name == OUTPUT and config.tie_embeddings:
                    continue
                view = handle.get_slice(name)
                if view.get_dtype() not in FLOAT_KINDS:
                    raise UnsupportedModelError(
                        f"{folder / file}: tensor {name!r} is of type {view.get_dtype()}; "
                        f"supported are {', '.join(FLOAT_KINDS)}"
                    )
                shapes[name] = tuple(view.get_shape())
                self._places[name] = file
        check_tensors(config, shapes, str(folder))

    def names(self) -> Iterable[str]:
        return self._places

    def are_floats(self) -> bool:
        return True  # others are refused when the folder is opened

    def _load(self, name: str) -> torch.Tensor:
        if name not in self._places:
            raise ModelFileError(f"{self._folder}: there is no tensor {name!r}")
        tensor: torch.Tensor = self._files[self._places[name]].get_tensor(name)
        return tensor

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._load(name).to(dtype)

    def raw(self, name: str) -> RawTensor:
        import torch

        tensor = self._load(name).contiguous()
        kind = self._files[self._places[name]].get_slice(name).get_dtype()
        return RawTensor(kind, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy())


def _prediction_modules(folder: Path, config: ModelConfig) -> tuple[str, ...]:
    """Beginnings of the names of multi-token prediction modules, which are a drafter's (`outrider.heads.mtp`)."""
    path = folder / "config.json"
    count = read_json(path).get("num_nextn_predict_layers") if path.exists() else None
    if not isinstance(count, int):
        return ()
    behind = range(config.num_layers, config.num_layers + count)
    return ("model.mtp_layers.", *(f"model.layers.{layer}." for layer in behind))


def weight_files(folder: Path) -> list[str]:
    """Names of the files that hold the weights. Raises ModelNotFoundError, telling what to do about pickled ones."""
    if (folder / INDEX).exists():
        places = read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelFileError(f"{folder / INDEX}: it has no weight_map")
        files = sorted(set(places.values()))
        for file in files:
            if not (folder / file).exists():
                raise ModelNotFoundError(f"{folder / file}: missing, but named in {INDEX}")
        return files
    if (folder / SINGLE).exists():
        return [SINGLE]
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise UnsupportedModelError(
            f"{folder}: only pickled weights ({pickled[0]}), which can run code when loaded; "
            "convert them to safetensors (load with transformers, then save_pretrained)"
        )
    raise ModelNotFoundError(f"{folder}: no {SINGLE}, no {INDEX} and no GGUF file in this folder")


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(f"{path}: not a complete safetensors file ({error})") from None
