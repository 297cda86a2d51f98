"""Weights in a GGUF file, under canonical names and in canonical row order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from outrider.core.errors import ModelFileError
from outrider.models.config import ModelConfig
from outrider.models.config_gguf import ROPE_FACTORS
from outrider.models.families import FAMILIES
from outrider.models.gguf import GGUFFile
from outrider.models.quants import dequantize
from outrider.models.weights import FLOAT_KINDS, RawTensor, Weights, check_tensors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NOT_WEIGHTS = {ROPE_FACTORS}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def canonical_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name that has none is returned as it is."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match["layer"], match["part"], match["kind"]
    if layer is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else name
    return f"model.layers.{layer}.{_LAYER[part]}.{kind}" if part in _LAYER else name


class GGUFWeights(Weights):
    """Tensors of a GGUF file. Raises ModelFileError unless they are exactly those that ``config`` calls for."""

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._names: Mapping[str, str] = {
            canonical_name(name): name for name in file.tensors if name not in _NOT_WEIGHTS
        }
        shapes = {name: file.tensors[stored].shape for name, stored in self._names.items()}
        check_tensors(config, shapes, str(file.path))

    def names(self) -> Iterable[str]:
        return self._names

    def are_floats(self) -> bool:
        return all(self._file.tensors[stored].kind in FLOAT_KINDS for stored in self._names.values())

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        raw = self.raw(name)
        return dequantize(raw.kind, raw.data, raw.shape, dtype)

    def raw(self, name: str) -> RawTensor:
        """As the file stores it, but with the rows in canonical order: quantised rows are moved whole."""
        if name not in self._names:
            raise ModelFileError(f"{self._file.path}: there is no tensor {name!r}")
        stored = self._names[name]
        info, data = self._file.tensors[stored], self._file.data(stored)
        heads = self._paired_heads(name)
        if heads:
            data = _halves_from_pairs(data, info.shape[0], heads)
        return RawTensor(info.kind, info.shape, data)

    def _paired_heads(self, name: str) -> int:
        """Number of heads in a tensor whose rows are stored as rotary pairs; 0 for every other tensor."""
        if not FAMILIES[self._config.family].gguf_pairs:
            return 0
        if ".q_proj." in name:
            return self._config.num_heads
        return self._config.num_kv_heads if ".k_proj." in name else 0


def _halves_from_pairs(data: npt.NDArray[np.uint8], rows: int, heads: int) -> npt.NDArray[np.uint8]:
    """Reorder each head's rows from (0, d/2, 1, d/2+1, …) to (0, 1, …): the order in which halves are rotated."""
    import numpy as np

    per_head = rows // heads
    pairs = data.reshape(heads, per_head // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1)
