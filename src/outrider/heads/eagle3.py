"""EAGLE-3 checkpoints, as SpecForge and the authors write them and SGLang and vLLM take them.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test" (2025).
config.json has the keys of a LlamaConfig and ``draft_vocab_size``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outrider.core.errors import HeadMismatchError, ModelFileError, UnsupportedModelError
from outrider.heads.base import Files, Layout
from outrider.heads.draft_ids import MASK, OFFSETS, ascending, read_offsets, written_offsets
from outrider.heads.head import FEATURES, Head
from outrider.heads.names import public_tensors, read_tensors
from outrider.heads.values import model_of, own_value, read_config, written
from outrider.models.config import OUTPUT, Fusion

if TYPE_CHECKING:
    from outrider.heads.checkpoint import Checkpoint
    from outrider.models.config import ModelConfig

_LATER = (
    ("layers.", "model.layers."),
    ("fc.", "features."),
    ("norm.", "model.norm."),
    ("embed_tokens.", "model.embed_tokens."),
)
_MIDLAYER = (
    ("midlayer.input_layernorm.", "model.embed_norm."),
    ("midlayer.hidden_norm.", "model.feature_norm."),
    ("midlayer.", "model.layers.0."),
)
_NUMBERED = (
    ("layers.0.input_layernorm.", "model.embed_norm."),
    ("layers.0.hidden_norm.", "model.feature_norm."),
)
TABLE = _MIDLAYER + _NUMBERED + _LATER
"""The first layer is ``midlayer`` or ``layers.0``; its two norms are those of the embedding and of the feature."""
NUMBERED_TABLE = _NUMBERED + _LATER

_FROM_LAYERS = "eagle_aux_hidden_state_layer_ids"
_NOT_HERS = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's that training left in a checkpoint."""


def usual_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states that are fused if nothing else is said: low, middle and high. See `Head.feature_layers`."""
    return 2, num_layers // 2, num_layers - 3


class Eagle3Layout(Layout):
    """Written with ``midlayer``, which every engine knows; with ``layers.N`` if there are several layers."""

    methods = ("eagle3",)

    def method(self, checkpoint: Checkpoint) -> str | None:
        found = any(f"{layer}.hidden_norm.weight" in checkpoint for layer in ("midlayer", "layers.0", "model.layers.0"))
        return "eagle3" if found else None

    def read(self, checkpoint: Checkpoint, target: ModelConfig) -> Head:
        return read_eagle3(checkpoint, checkpoint.values, target)

    def write(self, head: Head) -> Files:
        config = model_of(head, kind="attend", first_norm=False, final_norm=True)
        values = {**written(head, config), "architectures": ["LlamaForCausalLMEagle3"], **fusion_values(head)}
        if head.feature_layers != usual_layers(head.num_layers):
            # SGLang has its own key for the same layers, and counts the block whose output they are.
            before = [layer - 1 for layer in head.feature_layers]
            values["eagle_config"] = {"use_aux_hidden_state": True, _FROM_LAYERS: before}
        table = TABLE if config.num_layers == 1 else NUMBERED_TABLE
        return Files(values, {**public_tensors(head.tensors, table), **written_offsets(head)})


def read_eagle3(checkpoint: Checkpoint, values: Mapping[str, Any], target: ModelConfig) -> Head:
    """A head whose configuration is ``values``, whatever the file has besides."""
    where = str(checkpoint.path)
    for key in ("norm_before_fc", "fc_norm", "norm_output"):
        if values.get(key) or _nested(checkpoint, values).get(key):
            raise UnsupportedModelError(
                f"{where}: {key}=true, a variant of EAGLE-3 with another norm, is not supported"
            )
    prefix = "model." if "model.fc.weight" in checkpoint else ""
    table = tuple((prefix + public, canonical) for public, canonical in TABLE)
    tensors = read_tensors(checkpoint, table, without=(OFFSETS, MASK, *_NOT_HERS))
    fusion = Fusion("attend", norm_before_residual=bool(values.get("norm_before_residual")))
    config = read_config(values, tensors, target, where, fusion=fusion, final_norm=True)
    ids = read_offsets(checkpoint, config.vocab_size)
    said = values.get("draft_vocab_size")
    if ids is not None and said not in (None, len(ids)):
        raise HeadMismatchError(f"{where}: draft_vocab_size={said!r}, but its map names {len(ids)} tokens")
    ids = ascending(ids, config.vocab_size, tensors, (OUTPUT,))
    width = values.get("target_hidden_size") or config.hidden_size
    if isinstance(width, bool) or not isinstance(width, int):
        raise ModelFileError(f"{where}: target_hidden_size must be a whole number")
    return Head(
        method="eagle3",
        hidden_size=width,
        num_layers=own_value(values, "target_num_layers", target.num_layers, where),
        vocab_size=config.vocab_size,
        feature_layers=_feature_layers(checkpoint, values, tensors, width, target),
        draft_ids=ids,
        tensors=tensors,
        config=replace(config, logits_size=None if ids is None else len(ids)),
        source=where,
    )


def _nested(checkpoint: Checkpoint, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """What SGLang keeps under a key of its own."""
    found = values.get("eagle_config") or {}
    if not isinstance(found, dict):
        raise ModelFileError(f"{checkpoint.path}: eagle_config must be an object")
    return found


def fusion_values(head: Head) -> dict[str, Any]:
    """Keys beyond a LlamaConfig's, in the words of vLLM, SpecForge and speculators."""
    values: dict[str, Any] = {
        "draft_vocab_size": head.vocab_size if head.draft_ids is None else len(head.draft_ids),
        "target_hidden_size": head.hidden_size,
        "norm_before_residual": _normed_residual(head),
    }
    if head.feature_layers != usual_layers(head.num_layers):
        values[_FROM_LAYERS] = list(head.feature_layers)
    return values


def _normed_residual(head: Head) -> bool:
    return head.config is not None and head.config.fusion is not None and head.config.fusion.norm_before_residual


def _feature_layers(
    checkpoint: Checkpoint, values: Mapping[str, Any], tensors: Mapping[str, Any], width: int, target: ModelConfig
) -> tuple[int, ...]:
    """In our numbering, which is vLLM's: layer i is what block i reads. SGLang's key names the block before."""
    if FEATURES not in tensors:
        raise UnsupportedModelError(
            f"{checkpoint.path}: no 'fc.weight'; EAGLE-3 without joined hidden states (use_aux_hidden_state=false) is "
            "not supported"
        )
    count, rest = divmod(tensors[FEATURES].shape[-1], width)
    own = values.get(_FROM_LAYERS)
    nested = _nested(checkpoint, values).get(_FROM_LAYERS)
    try:
        if own:
            layers = tuple(int(layer) for layer in own)
        elif nested:
            layers = tuple(int(layer) + 1 for layer in nested)
        else:
            layers = usual_layers(target.num_layers)
    except (TypeError, ValueError):
        raise ModelFileError(f"{checkpoint.path}: {_FROM_LAYERS} must be a list of layer numbers") from None
    if rest or len(layers) != count:
        raise HeadMismatchError(
            f"{checkpoint.path}: 'fc.weight' has {tensors[FEATURES].shape[-1]} columns, but it is to join "
            f"{len(layers)} hidden states of size {width}"
        )
    return layers
