"""Configuration of a model from the metadata of a GGUF file."""

from __future__ import annotations

from outrider.core.errors import ModelFileError, UnsupportedModelError
from outrider.models.config import ModelConfig, RopeScaling
from outrider.models.families import FAMILIES, GGUF_FAMILIES, no_rope_layers
from outrider.models.gguf import GGUFFile

_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ROPE_FACTORS = "rope_freqs.weight"


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """Raises UnsupportedModelError for an architecture or a feature that is not supported, else as `GGUFFile`."""
    arch = file.string("general.architecture")
    if arch not in GGUF_FAMILIES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {arch!r} is not supported; supported are {', '.join(GGUF_FAMILIES)}"
        )
    family = FAMILIES[GGUF_FAMILIES[arch]]
    _refuse_unsupported(file, arch)
    if "token_embd.weight" not in file.tensors:
        raise ModelFileError(f"{file.path}: the tensor 'token_embd.weight' is missing")
    hidden, heads = file.integer(f"{arch}.embedding_length"), file.integer(f"{arch}.attention.head_count")
    layers = file.integer(f"{arch}.block_count")
    kv_heads = file.integer(f"{arch}.attention.head_count_kv", heads)
    for name, value in (("embedding_length", hidden), ("head_count", heads), ("head_count_kv", kv_heads)):
        if value < 1:
            raise ModelFileError(f"{file.path}: {name} is {value}; the file is corrupt")
    head_dim = file.integer(f"{arch}.attention.key_length", hidden // heads)
    rotary = file.integer(f"{arch}.rope.dimension_count", head_dim)
    if rotary != head_dim or file.integer(f"{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: rotary embeddings of {rotary} and heads of {head_dim} dimensions differ; not supported"
        )
    window = file.integer(f"{arch}.attention.sliding_window", 0) or None
    max_position = file.integer(f"{arch}.context_length")
    bias = {part: f"blk.0.{part}.bias" in file.tensors for part in ("attn_q", "attn_output", "ffn_up")}
    ends = [file.integer(f"tokenizer.ggml.{key}", -1) for key in _END_KEYS]
    bos = file.integer("tokenizer.ggml.bos_token_id", -1)
    return ModelConfig(
        family="mistral" if window else GGUF_FAMILIES[arch],
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=file.integer(f"{arch}.feed_forward_length"),
        rms_norm_eps=file.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=file.number(f"{arch}.rope.freq_base", 10000.0),
        max_position=max_position,
        tie_embeddings="output.weight" not in file.tensors,
        rope_scaling=_rope_scaling(file, arch, max_position, head_dim),
        qkv_bias=family.qkv_bias or bias["attn_q"],
        o_bias=bias["attn_output"],
        mlp_bias=bias["ffn_up"],
        qk_norm=family.qk_norm,
        sliding_window=window,
        no_rope_layers=no_rope_layers({}, layers) if family.nope else (),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end >= 0)),
        bos_token_id=bos if bos >= 0 else None,
    )


def _refuse_unsupported(file: GGUFFile, arch: str) -> None:
    if file.integer(f"{arch}.expert_count", 0) > 0:
        raise UnsupportedModelError(f"{file.path}: mixture-of-experts models are not supported")
    if file.integer(f"{arch}.attention.sliding_window", 0) and arch != "llama":
        raise UnsupportedModelError(f"{file.path}: a sliding window in a GGUF of architecture {arch} is not supported")


def _rope_scaling(file: GGUFFile, arch: str, max_position: int, head_dim: int) -> RopeScaling | None:
    if ROPE_FACTORS in file.tensors:
        from outrider.models.quants import dequantize

        info = file.tensors[ROPE_FACTORS]
        factors = dequantize(info.kind, file.data(ROPE_FACTORS), info.shape).tolist()
        if info.shape != (head_dim // 2,):
            raise ModelFileError(f"{file.path}: tensor {ROPE_FACTORS!r} has shape {info.shape}, not {(head_dim // 2,)}")
        return RopeScaling("factors", 1.0, factors=tuple(factors))
    prefix = f"{arch}.rope.scaling"
    kind = file.string(f"{prefix}.type", "none")
    if kind == "none" and f"{arch}.rope.scale_linear" in file.fields:  # how files before 2024 spell linear scaling
        return RopeScaling("linear", file.number(f"{arch}.rope.scale_linear"))
    factor = file.number(f"{prefix}.factor", 1.0)
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{file.path}: rope scaling {kind!r} is not supported; supported are linear and yarn"
        )
    return RopeScaling(
        kind,
        factor,
        original_max_position=file.integer(f"{prefix}.original_context_length", max_position),
        beta_fast=file.number(f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=file.number(f"{prefix}.yarn_beta_slow", 1.0),
    )
