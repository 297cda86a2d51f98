"""Medusa heads, as vLLM takes them and as the authors write them.

Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch

from outrider.core.errors import HeadMismatchError
from outrider.heads.base import Files, Layout
from outrider.heads.draft_ids import ascending, check_ids
from outrider.heads.head import Head
from outrider.heads.values import OWN, dtype_of, own_value, own_values
from outrider.models.config import OUTPUT

if TYPE_CHECKING:
    from outrider.heads.checkpoint import Checkpoint
    from outrider.models.config import ModelConfig

_TOKEN_MAP = "token_map"
"""vLLM's: the target's id of each column."""


class MedusaLayout(Layout):
    """vLLM's: ``blocks.K.layers.I``, ``lm_heads.K`` or one ``lm_head`` for all, and ``token_map``."""

    methods = ("medusa",)
    block = re.compile(r"(?:medusa_heads\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
    output = re.compile(r"(?:medusa_heads\.)?lm_heads\.(\d+)\.weight")

    def method(self, checkpoint: Checkpoint) -> str | None:
        return "medusa" if any(self.block.fullmatch(name) for name in checkpoint.names) else None

    def read(self, checkpoint: Checkpoint, target: ModelConfig) -> Head:
        where, values = str(checkpoint.path), checkpoint.values
        tensors = self._tensors(checkpoint)
        _add_biases(tensors)
        outputs = tuple(name for name in tensors if name == OUTPUT or name.endswith(".output.weight"))
        ids = checkpoint.whole_numbers(_TOKEN_MAP) if _TOKEN_MAP in checkpoint else None
        rows = len(tensors[outputs[0]]) if outputs and ids is None else target.vocab_size
        vocabulary: int = size if isinstance(size := values.get("vocab_size"), int) else rows
        vocabulary = own_value(values, "target_vocab_size", vocabulary, where)
        if ids is not None:
            check_ids(ids, vocabulary, f"{where}: {_TOKEN_MAP}")
            whole = [name for name in outputs if len(tensors[name]) > max(len(ids), int(ids.max()))]
            tensors |= {name: tensors[name][ids] for name in whole}
        return Head(
            method="medusa",
            hidden_size=tensors["heads.0.blocks.0.weight"].shape[-1] if "heads.0.blocks.0.weight" in tensors else 0,
            num_layers=own_value(values, "target_num_layers", target.num_layers, where),
            vocab_size=vocabulary,
            feature_layers=(target.num_layers,),
            normed=True,
            draft_ids=ascending(ids, vocabulary, tensors, outputs),
            tensors=tensors,
            source=where,
        )

    def write(self, head: Head) -> Files:
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in head.tensors.items():
            tensors[_public(name, "blocks.{0}.layers.{1}.{2}", "lm_heads.{0}.weight")] = tensor
        columns = head.vocab_size
        if head.draft_ids is not None:
            columns, tensors[_TOKEN_MAP] = len(head.draft_ids), head.draft_ids
        values = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": head.hidden_size,
            "vocab_size": head.vocab_size,
            "truncated_vocab_size": columns,
            "num_heads": head.num_heads,
            "num_hidden_layers": _num_blocks(head),
            "original_lm_head": not any(name.endswith(".output.weight") for name in head.tensors),
            "medusa_fc_bias": True,
            "torch_dtype": dtype_of(head),
            OWN: own_values(head),
        }
        return Files(values, tensors)

    def _tensors(self, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
        """By canonical name; what is under no name of this layout is the base model's, if it lies in the same file."""
        tensors: dict[str, torch.Tensor] = {}
        for name in checkpoint.names:
            if match := self.block.fullmatch(name):
                tensors[f"heads.{match[1]}.blocks.{match[2]}.{match[3]}"] = checkpoint.tensor(name)
            elif match := self.output.fullmatch(name):
                tensors[f"heads.{match[1]}.output.weight"] = checkpoint.tensor(name)
            elif name == OUTPUT:
                tensors[OUTPUT] = checkpoint.tensor(name)
        return tensors


class LmHeadLayout(MedusaLayout):
    """The authors': ``medusa_lm_head.pt`` or ``.safetensors``, each head a sequence of blocks and an output matrix."""

    block = re.compile(r"(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
    output = re.compile(r"(?:medusa_heads?\.)?(\d+)\.\d+\.weight")

    def write(self, head: Head) -> Files:
        shared = head.tensors.get(OUTPUT)
        if head.draft_ids is not None:
            raise HeadMismatchError(f"{head.label}: medusa_lm_head has no reduced vocabulary; write layout 'medusa'")
        last = _num_blocks(head)
        tensors = {
            _public(name, "{0}.{1}.linear.{2}", f"{{0}}.{last}.weight"): tensor
            for name, tensor in head.tensors.items()
            if name != OUTPUT
        }
        for k in range(head.num_heads):
            if f"{k}.{last}.weight" not in tensors:
                if shared is None:
                    raise HeadMismatchError(
                        f"{head.label}: in medusa_lm_head every head has an output matrix; add the "
                        "target's with outrider.heads.standalone"
                    )
                tensors[f"{k}.{last}.weight"] = shared.clone()
        values: dict[str, Any] = {"medusa_num_heads": head.num_heads, "medusa_num_layers": last, OWN: own_values(head)}
        return Files(values, tensors, "medusa_lm_head.safetensors")


def _public(name: str, block: str, output: str) -> str:
    """The public name of a canonical one: ``block`` of (head, block, "weight" or "bias"), ``output`` of the head."""
    parts = name.split(".")
    if parts[0] != "heads":
        return name
    return block.format(parts[1], parts[3], parts[4]) if parts[2] == "blocks" else output.format(parts[1])


def _num_blocks(head: Head) -> int:
    """Blocks of each head. Raises HeadMismatchError if they have different numbers, which no layout has keys for."""
    counts = dict.fromkeys(range(head.num_heads), 0)
    for name in head.tensors:
        parts = name.split(".")
        if parts[0] == "heads" and parts[2] == "blocks" and parts[4] == "weight":
            counts[int(parts[1])] += 1
    if len(set(counts.values())) > 1:
        raise HeadMismatchError(f"{head.label}: all heads must have the same number of blocks")
    return max(counts.values(), default=0)


def _add_biases(tensors: dict[str, torch.Tensor]) -> None:
    """vLLM's checkpoints may do without."""
    for name in [name for name in tensors if ".blocks." in name and name.endswith(".weight")]:
        bias = name.removesuffix("weight") + "bias"
        if bias not in tensors:
            tensors[bias] = torch.zeros(len(tensors[name]), dtype=tensors[name].dtype)
