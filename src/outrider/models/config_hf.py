"""Configuration of a model from the config.json (and generation_config.json) of a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from outrider.models.config import ModelConfig, RopeScaling
from outrider.models.families import FAMILIES, SAME_BLOCKS, Family, no_rope_layers

_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
_MUST_BE: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "use_mrope": (False,),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (1,),
    "quantization_config": (None,),
}
"""Keys whose other values ask for mathematics that is not implemented."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelNotFoundError or ModelFileError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelNotFoundError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelFileError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelFileError(f"{path}: not a JSON object")
    return values


def config_from_folder(folder: Path) -> ModelConfig:
    """Read config.json and, for the ids that end a text, generation_config.json.

    Raises UnsupportedModelError for an architecture or a feature that is not supported, ModelFileError for values that
    are missing or make no sense.
    """
    path = folder / "config.json"
    values = read_json(path)
    name = str(values.get("model_type"))
    family = SAME_BLOCKS.get(name, name)
    if family not in FAMILIES:
        raise UnsupportedModelError(
            f"{path}: model type {name!r} is not supported; supported are {', '.join((*FAMILIES, *SAME_BLOCKS))}"
        )
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return config_from_values(values, family, str(path), generation.get("eos_token_id"))


def config_from_values(values: dict[str, Any], family: str, where: str, more_ends: Any = None) -> ModelConfig:
    """From the keys of a config.json, read as those of ``family``, whatever their ``model_type`` says.

    where: the file, for messages. more_ends: ids that end a text (one, a list, or None), beside ``eos_token_id``.
    Raises as `config_from_folder`.
    """
    try:
        ends = _ids(more_ends) + _ids(values.get("eos_token_id"))
        return _config(family, FAMILIES[family], values, tuple(dict.fromkeys(ends)))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{where}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelFileError(f"{where}: {_explain(error)}") from None


def _explain(error: Exception) -> str:
    return f"the key {error} is missing" if isinstance(error, KeyError) else str(error)


def _ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(each) for each in value] if isinstance(value, list) else [int(value)]


def _config(name: str, family: Family, values: dict[str, Any], ends: tuple[int, ...]) -> ModelConfig:
    for key, allowed in _MUST_BE.items():
        if key in values and values[key] is not None and values[key] not in allowed:
            raise UnsupportedModelError(f"{key}={_short(values[key])} is not supported")
    values = {**family.defaults, **values}
    rope = {"rope_theta": values.get("rope_theta"), **_object(values, "rope_parameters")}
    hidden, layers, heads, inner = (_size(values, key) for key in _REQUIRED[1:])
    kv_heads = _size(values, "num_key_value_heads", heads)
    max_position = _size(values, "max_position_embeddings", 2048)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    window, window_layers = _window(family, values, layers)
    bias = [bool(values.get(key, False)) and key in family.bias_keys for key in ("attention_bias", "mlp_bias")]
    return ModelConfig(
        family=name,
        vocab_size=_size(values, "vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_size(values, "head_dim", hidden // heads),
        intermediate_size=inner,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope["rope_theta"] or 10000.0),
        max_position=max_position,
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        rope_scaling=_rope_scaling(_object(values, "rope_scaling") or rope, max_position),
        qkv_bias=family.qkv_bias or bias[0],
        o_bias=bias[0],
        mlp_bias=bias[1],
        qk_norm=family.qk_norm,
        sliding_window=window,
        window_layers=window_layers,
        no_rope_layers=no_rope_layers(values, layers) if family.nope else (),
        eos_token_ids=ends,
        bos_token_id=values.get("bos_token_id"),
    )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={_short(value)} must be a whole number of at least 1")
    return value


def _object(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}={_short(value)} must be a JSON object")
    return value


def _window(family: Family, values: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    window = values.get("sliding_window")
    if family.window is None or window is None or (family.window_switch and not values.get(family.window_switch)):
        return None, ()
    kinds = values.get("layer_types")
    flags = tuple(kind == "sliding_attention" for kind in kinds) if kinds else family.window(values, layers)
    if len(flags) != layers:
        raise ValueError(f"layer_types names {len(flags)} layers, but the model has {layers}")
    if not any(flags):
        return None, ()
    return _size(values, "sliding_window"), () if all(flags) else flags


def _rope_scaling(values: Mapping[str, Any], max_position: int) -> RopeScaling | None:
    """From ``rope_scaling``, or from ``rope_parameters``, its name since transformers 5."""
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn") or not values.get("truncate", True):
        raise UnsupportedModelError(f"rope scaling {_short(dict(values))} is not supported")
    original = int(values.get("original_max_position_embeddings") or max_position)
    factor = values.get("factor")
    if kind == "linear":
        return RopeScaling("linear", float(values["factor"]))
    return RopeScaling(
        kind=kind,
        factor=float(max_position / original if factor is None else factor),
        original_max_position=original,
        low_freq_factor=float(values.get("low_freq_factor") or 1.0),
        high_freq_factor=float(values.get("high_freq_factor") or 4.0),
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(values),
    )


def _attention_factor(values: Mapping[str, Any]) -> float | None:
    """YaRN's scale of the attention logits if the file says more than the default 0.1 ln(factor) + 1 of the paper."""
    given = values.get("attention_factor")
    if given is not None:
        return float(given)
    scale, scale_all = values.get("mscale"), values.get("mscale_all_dim")
    if not scale or not scale_all:
        return None
    growth = 0.1 * math.log(max(float(values["factor"]), 1.0))
    return float((growth * scale + 1) / (growth * scale_all + 1))
