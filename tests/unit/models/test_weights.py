"""Weights by canonical name, from memory, safetensors and GGUF: values, row order, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from outrider.models.config import weight_shapes
from outrider.models.gguf import GGUFFile
from outrider.models.loader import Model, load_model
from outrider.models.quants import dequantize
from outrider.models.weights import TensorWeights, Weights, check_tensors
from outrider.models.weights_gguf import GGUFWeights, canonical_name
from outrider.models.weights_safetensors import SafetensorsWeights
from tests.support.models import VARIANTS, random_model, write_gguf, write_hf_folder


def assert_same(ours: Weights, model: Model) -> None:
    assert set(ours.names()) == set(weight_shapes(model.config))
    for name in ours.names():
        assert torch.equal(ours.tensor(name, torch.float32), model.weights.tensor(name, torch.float32)), name


GGUF_VARIANTS = [variant for variant in VARIANTS if variant != "qwen2-window"]


@pytest.mark.parametrize("variant", GGUF_VARIANTS)
def test_gguf_gives_back_what_was_written(tmp_path: Path, variant: str) -> None:
    model = random_model(variant)
    assert_same(load_model(str(write_gguf(model, tmp_path / "m.gguf"))).weights, model)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors_give_back_what_was_written(tmp_path: Path, variant: str, shards: int) -> None:
    model = random_model(variant)
    assert_same(load_model(str(write_hf_folder(model, tmp_path, shards=shards))).weights, model)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1"])
@pytest.mark.parametrize("variant", ["llama-bias", "qwen3"])
def test_raw_blocks_are_in_canonical_row_order(tmp_path: Path, variant: str, kind: str) -> None:
    """Llama's q and k are stored as rotary pairs; raw blocks must come in the order in which `tensor` gives rows."""
    model = random_model(variant)
    weights = load_model(str(write_gguf(model, tmp_path / "m.gguf", kind))).weights
    for name in weights.names():
        raw = weights.raw(name)
        values = dequantize(raw.kind, raw.data, raw.shape)
        assert torch.equal(values, weights.tensor(name, torch.float32))
        original = model.weights.tensor(name, torch.float32)
        assert raw.kind == (kind if original.ndim == 2 else "F32")
        assert (values - original).abs().max() <= original.abs().max() / 8


def test_pairs_would_be_noticed(tmp_path: Path) -> None:
    """The twin of the test above: with the rows left as stored, the values are far off."""
    model = random_model("llama")
    file = GGUFFile(write_gguf(model, tmp_path / "m.gguf", "Q8_0"))
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = "blk.0.attn_q.weight"
    values = dequantize("Q8_0", file.data(stored), file.tensors[stored].shape)
    assert (values - model.weights.tensor(name, torch.float32)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_the_one_asked_for(tmp_path: Path, dtype: torch.dtype) -> None:
    model = random_model("qwen2")
    write_gguf(model, tmp_path / "m.gguf")
    write_hf_folder(model, tmp_path / "hf")
    name = "model.layers.1.mlp.down_proj.weight"
    expected = model.weights.tensor(name, torch.float32).to(dtype)
    for source in (tmp_path / "m.gguf", tmp_path / "hf"):
        tensor = load_model(str(source)).weights.tensor(name, dtype)
        assert tensor.dtype == dtype
        assert torch.equal(tensor, expected)


def test_raw_of_safetensors_and_of_memory(tmp_path: Path) -> None:
    model = random_model("llama")
    folder = load_model(str(write_hf_folder(model, tmp_path)))
    for name in ("model.norm.weight", "model.layers.2.self_attn.k_proj.weight"):
        expected = model.weights.tensor(name, torch.float32).numpy().reshape(-1).view(np.uint8)
        for weights in (folder.weights, model.weights):
            raw = weights.raw(name)
            assert raw.kind == "F32"
            assert raw.shape == weight_shapes(model.config)[name]
            assert np.array_equal(raw.data, expected)


def test_tensors_may_be_written_to(tmp_path: Path) -> None:
    """A caller that changes its copy changes neither the file nor the next copy."""
    model = random_model("llama")
    weights = load_model(str(write_gguf(model, tmp_path / "m.gguf"))).weights
    name = "model.norm.weight"
    weights.tensor(name, torch.float32).zero_()
    assert torch.equal(weights.tensor(name, torch.float32), model.weights.tensor(name, torch.float32))


def test_unknown_tensor(tmp_path: Path) -> None:
    model = random_model("llama")
    write_gguf(model, tmp_path / "m.gguf")
    for weights in (
        model.weights,
        load_model(str(tmp_path / "m.gguf")).weights,
        load_model(str(write_hf_folder(model, tmp_path / "hf"))).weights,
    ):
        with pytest.raises(ModelFileError, match=r"no tensor 'no\.such'"):
            weights.tensor("no.such", torch.float32)
        with pytest.raises(ModelFileError, match=r"no tensor 'no\.such'"):
            weights.raw("no.such")


def test_canonical_names() -> None:
    assert canonical_name("token_embd.weight") == "model.embed_tokens.weight"
    assert canonical_name("blk.12.attn_q.bias") == "model.layers.12.self_attn.q_proj.bias"
    assert canonical_name("blk.1.ffn_gate_exps.weight") == "blk.1.ffn_gate_exps.weight"
    assert canonical_name("output.scale") == "output.scale"
    assert canonical_name("mystery.weight") == "mystery.weight"


def without(model: Model, name: str) -> Model:
    tensors = {n: model.weights.tensor(n, torch.float32) for n in model.weights.names() if n != name}
    return replace(model, weights=TensorWeights(tensors))


def with_tensor(model: Model, name: str, value: torch.Tensor) -> Model:
    tensors = {n: model.weights.tensor(n, torch.float32) for n in model.weights.names()}
    return replace(model, weights=TensorWeights(tensors | {name: value}))


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model = random_model("llama")
    norm = "model.layers.1.input_layernorm.weight"
    gate = "model.layers.0.mlp.gate_proj.weight"
    cases = [
        (without(model, norm), ModelFileError, f"{norm}' is missing"),
        (with_tensor(model, gate, torch.zeros(96, 32)), ModelFileError, rf"{gate}' has shape \(96, 32\)"),
    ]
    for number, (broken, kind, message) in enumerate(cases):
        write_gguf(broken, tmp_path / f"{number}.gguf")
        write_hf_folder(broken, tmp_path / str(number))
        for source in (tmp_path / f"{number}.gguf", tmp_path / str(number)):
            with pytest.raises(kind, match=message):
                load_model(str(source))
    extra = with_tensor(model, "model.layers.0.self_attn.sinks", torch.zeros(4))
    with pytest.raises(UnsupportedModelError, match="sinks' has no place in a llama model"):
        load_model(str(write_hf_folder(extra, tmp_path / "extra")))


def test_more_layers_than_tensors() -> None:
    config = replace(random_model("llama").config, num_layers=1 << 40)
    with pytest.raises(ModelFileError, match="layers are promised"):
        check_tensors(config, {}, "here")


def test_tied_checkpoints_may_carry_the_head_twice(tmp_path: Path) -> None:
    model = random_model("qwen2")
    embedding = model.weights.tensor("model.embed_tokens.weight", torch.float32)
    head = with_tensor(model, "lm_head.weight", embedding.clone())
    loaded = load_model(str(write_hf_folder(head, tmp_path)))
    assert loaded.config.tie_embeddings
    assert "lm_head.weight" not in set(loaded.weights.names())


def test_buffers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    model = random_model("llama")
    old = with_tensor(model, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))
    assert_same(load_model(str(write_hf_folder(old, tmp_path))).weights, model)


def test_gguf_head_decides_whether_embeddings_are_tied(tmp_path: Path) -> None:
    tied, untied = random_model("qwen2"), random_model("llama")
    assert load_model(str(write_gguf(tied, tmp_path / "a.gguf"))).config.tie_embeddings
    assert not load_model(str(write_gguf(untied, tmp_path / "b.gguf"))).config.tie_embeddings


def test_broken_safetensors(tmp_path: Path) -> None:
    model = random_model("llama")
    file = write_hf_folder(model, tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[:100], whole[:-1], b"\xff" * 64):
        file.write_bytes(content)
        with pytest.raises(ModelFileError, match=r"model\.safetensors: not a complete safetensors file"):
            SafetensorsWeights(tmp_path, model.config)


def test_safetensors_index_with_a_missing_part(tmp_path: Path) -> None:
    model = random_model("llama")
    write_hf_folder(model, tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match=r"model-00002-of-00002\.safetensors: missing"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(ModelFileError, match="no weight_map"):
        load_model(str(tmp_path))


def test_safetensors_of_other_types(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = random_model("llama")
    write_hf_folder(model, tmp_path)
    tensors = {n: model.weights.tensor(n, torch.float32) for n in model.weights.names()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"'model\.norm\.weight' is of type I32"):
        load_model(str(tmp_path))


def test_gguf_weights_check_against_the_configuration_they_are_given(tmp_path: Path) -> None:
    model = random_model("llama")
    file = GGUFFile(write_gguf(model, tmp_path / "m.gguf"))
    with pytest.raises(ModelFileError, match="shape"):
        GGUFWeights(file, replace(model.config, intermediate_size=64))
