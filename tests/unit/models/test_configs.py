"""Configurations from config.json and from GGUF metadata."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.core.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from outrider.models.config import ModelConfig, RopeScaling
from outrider.models.config_gguf import config_from_gguf
from outrider.models.config_hf import config_from_folder
from outrider.models.families import FAMILIES
from outrider.models.gguf import GGUFFile
from tests.support.models import VARIANTS, hf_config, llama3_factors, random_model, write_gguf


def from_json(tmp_path: Path, values: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return config_from_folder(tmp_path)


def values_of(variant: str = "llama", **changes: Any) -> dict[str, Any]:
    values = hf_config(random_model(variant).config) | changes
    return {key: value for key, value in values.items() if value is not ...}


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_json_says_all_there_is(tmp_path: Path, variant: str) -> None:
    config = random_model(variant).config
    assert from_json(tmp_path, hf_config(config)) == config


@pytest.mark.parametrize("variant", VARIANTS)
def test_gguf_says_all_there_is(tmp_path: Path, variant: str) -> None:
    model = random_model(variant)
    if variant == "qwen2-window":
        with pytest.raises(UnsupportedModelError, match="sliding window in a GGUF of architecture qwen2"):
            config_from_gguf(GGUFFile(write_gguf(model, tmp_path / "m.gguf")))
        return
    found = config_from_gguf(GGUFFile(write_gguf(model, tmp_path / "m.gguf")))
    expected = model.config
    if variant == "mistral":  # without a window nothing in the file tells it from llama, nor needs to
        expected = replace(expected, family="llama")
    if variant == "llama3-rope":
        factors = tuple(llama3_factors(model.config).tolist())
        expected = replace(expected, rope_scaling=RopeScaling("factors", 1.0, factors=factors))
    assert found.rms_norm_eps == pytest.approx(expected.rms_norm_eps, rel=1e-7)  # a float32 in the file
    assert replace(found, rms_norm_eps=expected.rms_norm_eps) == expected


def test_rope_parameters_of_transformers_5(tmp_path: Path) -> None:
    parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 12345.0}
    config = from_json(tmp_path, values_of(rope_theta=..., rope_parameters=parameters))
    assert config.rope_theta == 12345.0
    assert config.rope_scaling == RopeScaling("linear", 2.0)
    plain = from_json(tmp_path, values_of(rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 7.0}))
    assert plain.rope_theta == 7.0
    assert plain.rope_scaling is None


def test_rope_scaling_in_old_spelling(tmp_path: Path) -> None:
    config = from_json(tmp_path, values_of(rope_scaling={"type": "linear", "factor": 4.0}))
    assert config.rope_scaling == RopeScaling("linear", 4.0)


def test_yarn_takes_missing_lengths_from_the_context(tmp_path: Path) -> None:
    scaling = from_json(tmp_path, values_of(rope_scaling={"rope_type": "yarn", "factor": 4.0})).rope_scaling
    assert scaling is not None
    assert scaling.original_max_position == 512
    assert scaling.attention_factor is None
    by_ratio = {"rope_type": "yarn", "original_max_position_embeddings": 128, "factor": None}
    scaling = from_json(tmp_path, values_of(rope_scaling=by_ratio)).rope_scaling
    assert scaling is not None
    assert scaling.factor == 4.0


def test_yarn_attention_factor(tmp_path: Path) -> None:
    base = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    given = from_json(tmp_path, values_of(rope_scaling=base | {"attention_factor": 1.25})).rope_scaling
    assert given is not None
    assert given.attention_factor == 1.25
    ratio = from_json(tmp_path, values_of(rope_scaling=base | {"mscale": 2.0, "mscale_all_dim": 1.0})).rope_scaling
    assert ratio is not None
    assert ratio.attention_factor == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "long_factor": [1.0]},
        {"rope_type": "yarn", "factor": 2.0, "truncate": False},
    ],
)
def test_other_rope_scalings_are_refused_by_name(tmp_path: Path, scaling: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=f"rope scaling .*{scaling['rope_type']}"):
        from_json(tmp_path, values_of(rope_scaling=scaling))


def test_window_needs_its_switch(tmp_path: Path) -> None:
    values = values_of("qwen2", sliding_window=8, max_window_layers=1)
    assert from_json(tmp_path, values | {"use_sliding_window": False}).sliding_window is None
    on = from_json(tmp_path, values | {"use_sliding_window": True})
    assert [on.window(layer) for layer in range(3)] == [None, 8, 8]
    beyond = from_json(tmp_path, values | {"use_sliding_window": True, "max_window_layers": 3})
    assert beyond.sliding_window is None


def test_layer_types_win_over_max_window_layers(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = from_json(
        tmp_path, values_of("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3, layer_types=kinds)
    )
    assert [config.window(layer) for layer in range(3)] == [8, None, 8]
    with pytest.raises(ModelFileError, match="layer_types names 2 layers"):
        from_json(tmp_path, values_of("qwen2", sliding_window=8, use_sliding_window=True, layer_types=kinds[:2]))


def test_mistral_has_its_window_unless_told_otherwise(tmp_path: Path) -> None:
    assert from_json(tmp_path, values_of("mistral", sliding_window=...)).sliding_window == 4096
    assert from_json(tmp_path, values_of("mistral", sliding_window=None)).sliding_window is None


def test_head_dim_comes_from_the_file_the_family_or_the_width(tmp_path: Path) -> None:
    assert from_json(tmp_path, values_of(head_dim=...)).head_dim == 16
    assert from_json(tmp_path, values_of(head_dim=None)).head_dim == 16
    assert from_json(tmp_path, values_of(head_dim=48)).head_dim == 48
    assert from_json(tmp_path, values_of("qwen3", head_dim=...)).head_dim == 128


def test_biases_only_where_the_family_has_them(tmp_path: Path) -> None:
    llama = from_json(tmp_path, values_of(attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = from_json(tmp_path, values_of("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias) == (True, False, False)
    mistral = from_json(tmp_path, values_of("mistral", attention_bias=True))
    assert not mistral.qkv_bias


def test_smollm3_skips_every_fourth_layer_by_default(tmp_path: Path) -> None:
    config = from_json(tmp_path, values_of("smollm3", num_hidden_layers=8, no_rope_layers=...))
    assert config.no_rope_layers == (3, 7)


def test_end_ids_of_both_files(tmp_path: Path) -> None:
    assert from_json(tmp_path, values_of(eos_token_id=2)).eos_token_ids == (2,)
    assert from_json(tmp_path, values_of(eos_token_id=None)).eos_token_ids == ()
    assert from_json(tmp_path, values_of(eos_token_id=[2, 3]), {"eos_token_id": [7, 2]}).eos_token_ids == (7, 2, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt_oss"}, "'gpt_oss' is not supported; supported are llama, mistral"),
        ({"model_type": ...}, "not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act="gelu"'),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*gptq"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        from_json(tmp_path, values_of(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_attention_heads": True}, "num_attention_heads=true"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"rms_norm_eps": "small"}, "small"),
        ({"eos_token_id": "end"}, "end"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'factor' is missing"),
        ({"rope_scaling": 3}, "rope_scaling=3 must be"),
    ],
)
def test_broken_values_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message) as caught:
        from_json(tmp_path, values_of(**changes))
    assert "\n" not in str(caught.value)


def test_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        config_from_folder(tmp_path)
    for content in ("{", "[1]", "\udcff"):
        (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(ModelFileError, match=r"config\.json: not"):
            config_from_folder(tmp_path)


def test_gguf_refusals(tmp_path: Path) -> None:
    model = random_model("llama")
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"llama.expert_count": 8}, UnsupportedModelError, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "longrope"}, UnsupportedModelError, "'longrope'"),
    ]
    for metadata, kind, message in cases:
        path = write_gguf(model, tmp_path / "m.gguf", metadata=metadata)
        with pytest.raises(kind, match=message):
            config_from_gguf(GGUFFile(path))


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModelError, match="'mamba' is not supported; supported are llama, qwen2"):
        config_from_gguf(GGUFFile(tmp_path / "m.gguf"))


def test_linear_scaling_in_the_spelling_of_old_files(tmp_path: Path) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "m.gguf", metadata={"llama.rope.scale_linear": 4.0})
    assert config_from_gguf(GGUFFile(path)).rope_scaling == RopeScaling("linear", 4.0)


def test_every_family_has_a_test_model() -> None:
    assert {random_model(variant).config.family for variant in VARIANTS} == set(FAMILIES)
