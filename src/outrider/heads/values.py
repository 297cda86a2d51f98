"""The keys of a head's config.json, and what they say about the model that runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from outrider.core.errors import HeadMismatchError, ModelFileError
from outrider.models.config import Fusion, ModelConfig, RopeScaling
from outrider.models.config_hf import config_from_values

if TYPE_CHECKING:
    from outrider.heads.head import Head

OWN = "outrider"
"""Key under which `written` keeps what no public layout has a key for. Other engines pass it over."""

_ACCURACIES = "accept_by_depth"
_RANKED = "accept_by_rank"
_SUM_SLACK = 1e-3
"""What rounded numbers that make up a whole may come to beyond it."""
_BLOCK = "model.layers.0."


def model_of(head: Head, *, kind: str, first_norm: bool, final_norm: bool) -> ModelConfig:
    """The model that a head runs. Raises HeadMismatchError unless it is built as its method's layouts say."""
    config = head.config
    built = config is not None and config.fusion is not None and config.fusion.kind == kind
    if config is None or not built or (config.first_norm, config.final_norm) != (first_norm, final_norm):
        raise HeadMismatchError(f"{head.label}: its model is not that of {head.method} drafters")
    return config


def read_config(
    values: Mapping[str, Any],
    names: Collection[str],
    target: ModelConfig,
    where: str,
    *,
    fusion: Fusion,
    final_norm: bool,
) -> ModelConfig:
    """The model that a head runs, from the keys of a config.json and the canonical ``names`` of its tensors.

    Biases and norms of queries and keys are those that have tensors: engines disagree about the keys for them. A head
    may be used in the target's whole context, since positions matter relative to each other only.
    """
    config = config_from_values(dict(values), "llama", where)
    return replace(
        config,
        tie_embeddings=False,
        max_position=max(config.max_position, target.max_position),
        qkv_bias=f"{_BLOCK}self_attn.q_proj.bias" in names,
        o_bias=f"{_BLOCK}self_attn.o_proj.bias" in names,
        mlp_bias=f"{_BLOCK}mlp.down_proj.bias" in names,
        qk_norm=f"{_BLOCK}self_attn.q_norm.weight" in names,
        fusion=fusion,
        first_norm=f"{_BLOCK}input_layernorm.weight" in names,
        final_norm=final_norm,
    )


def written(head: Head, config: ModelConfig) -> dict[str, Any]:
    """Keys of a config.json in the form of transformers' LlamaConfig, and `OWN`."""
    if config.sliding_window is not None or config.no_rope_layers:
        raise HeadMismatchError(
            f"{head.label}: a drafter with a sliding window, or with layers without rotary embedding, "
            "cannot be written in this layout"
        )
    biased = config.qkv_bias or config.o_bias
    return {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _rope_values(config.rope_scaling),
        "max_position_embeddings": config.max_position,
        "attention_bias": biased,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": config.bos_token_id,
        "torch_dtype": dtype_of(head),
        OWN: own_values(head),
    }


def own_values(head: Head) -> dict[str, Any]:
    """Of the target, what it takes to refuse a head of another one; and how good the head was found to be."""
    values: dict[str, Any] = {
        "method": head.method,
        "target_hidden_size": head.hidden_size,
        "target_num_layers": head.num_layers,
        "target_vocab_size": head.vocab_size,
        _ACCURACIES: list(head.accept_by_depth),
    }
    if head.accept_by_rank:
        values[_RANKED] = [list(ranks) for ranks in head.accept_by_rank]
    return values


def own_accuracies(values: Mapping[str, Any], where: str) -> tuple[float, ...]:
    """`Head.accept_by_depth` as `own_values` wrote it; empty in checkpoints of others."""
    chances = _chances(_own(values, _ACCURACIES))
    if chances is None:
        raise ModelFileError(f"{where}: {OWN}.{_ACCURACIES} must be a list of numbers from 0 to 1")
    return chances


def own_ranked_accuracies(values: Mapping[str, Any], num_heads: int, where: str) -> tuple[tuple[float, ...], ...]:
    """`Head.accept_by_rank` as `own_values` wrote it, for a head with ``num_heads``; empty in checkpoints of others."""
    found = _own(values, _RANKED)
    ranked = [_chances(ranks) for ranks in found] if isinstance(found, list) else [None]
    chances = tuple(ranks for ranks in ranked if ranks and sum(ranks) <= 1 + _SUM_SLACK)
    if len(chances) < len(ranked):
        raise ModelFileError(
            f"{where}: {OWN}.{_RANKED} must be a list of lists of numbers from 0 to 1, none of which adds up to more "
            "than 1"
        )
    if len(chances) not in (0, num_heads):
        raise ModelFileError(f"{where}: {OWN}.{_RANKED} is of {len(chances)} heads, but the drafter has {num_heads}")
    return chances


def _own(values: Mapping[str, Any], key: str) -> object:
    """A list that `own_values` wrote; an empty one in checkpoints of others."""
    own = values.get(OWN)
    return own.get(key, []) if isinstance(own, dict) else []


def _chances(found: object) -> tuple[float, ...] | None:
    """``found``, if it is a list of numbers from 0 to 1."""
    if not isinstance(found, list) or not all(isinstance(x, (int, float)) and 0 <= x <= 1 for x in found):
        return None
    return tuple(map(float, found))


def own_value(values: Mapping[str, Any], key: str, default: int, where: str) -> int:
    """A number that `own_values` wrote; ``default`` in checkpoints of others."""
    own = values.get(OWN) or {}
    value = own.get(key, default) if isinstance(own, dict) else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFileError(f"{where}: {OWN}.{key} must be a whole number")
    return value


def dtype_of(head: Head) -> str:
    """Name of the tensors' type, as ``torch_dtype`` has it; the widest where there are several."""
    import torch

    widest = max((tensor.dtype for tensor in head.tensors.values()), key=lambda d: d.itemsize, default=torch.float32)
    return str(widest).removeprefix("torch.")


def _rope_values(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.kind == "factors":
        raise HeadMismatchError("rotary frequencies given one by one have no key in config.json; train with plain rope")
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    keys = {**asdict(scaling), "rope_type": scaling.kind}
    keys["original_max_position_embeddings"] = keys.pop("original_max_position")
    return {key: value for key, value in keys.items() if key not in ("kind", "factors") and value is not None}
