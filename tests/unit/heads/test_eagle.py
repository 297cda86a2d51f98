"""EAGLE-1 checkpoints: written and read back, and read as others write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import HeadMismatchError
from outrider.heads.load import head_method, load_head
from outrider.heads.save import save_head
from outrider.models.config import Fusion
from tests.support.heads import DRAFT_IDS, TARGET, assert_same_head, random_head
from tests.unit.heads.checkpoints import block, config_values, normal, ones, tensors_of, write

H = TARGET.hidden_size
PLAIN = Fusion("project", norms=False)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (None, {}),
        ("eagle", {"fusion": PLAIN, "dtype": torch.bfloat16, "qkv_bias": True}),
        ("eagle", {"draft_ids": DRAFT_IDS, "own_embedding": True}),
        ("eagle", {"fusion": Fusion("project", norms=True), "num_layers": 2}),
        ("eagle-sglang", {}),
        ("eagle-sglang", {"fusion": PLAIN}),
    ],
)
def test_what_is_saved_is_read_back(layout: str | None, changes: dict[str, Any], tmp_path: Path) -> None:
    head = random_head("eagle", **changes)
    save_head(head, tmp_path, layout)
    assert head_method(tmp_path) == "eagle"
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)


def test_each_engine_finds_the_architecture_it_looks_for(tmp_path: Path) -> None:
    head = random_head("eagle", fusion=PLAIN)
    save_head(head, tmp_path / "vllm")
    save_head(head, tmp_path / "sglang", "eagle-sglang")
    assert config_values(tmp_path / "vllm")["architectures"] == ["LlamaForCausalLM"]
    assert config_values(tmp_path / "sglang")["architectures"] == ["LlamaForCausalLMEagle"]
    assert "fc.bias" not in tensors_of(tmp_path / "vllm")
    assert not tensors_of(tmp_path / "sglang")["fc.bias"].any()  # SGLang makes one up if there is none


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_checkpoint_of_others(file: str, prefix: str, tmp_path: Path) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": True,
        "vocab_size": 96,
        "hidden_size": H,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
    }
    tensors = {"embed_tokens.weight": normal(96, H), "fc.weight": normal(H, 2 * H), "fc.bias": ones(H)}
    tensors |= block("layers.0", TARGET)
    write(tmp_path, values, {prefix + name: tensor for name, tensor in tensors.items()}, file)
    head = load_head(tmp_path, TARGET, "target")
    assert head.method == "eagle"
    assert head.config is not None
    assert head.config.fusion == Fusion("project", norms=False, bias=True)
    assert (head.config.first_norm, head.config.final_norm, head.config.max_position) == (False, False, 2048)
    assert (head.feature_layers, head.normed, head.draft_ids) == ((8,), True, None)
    assert torch.equal(head.tensors["model.fuse.weight"], tensors["fc.weight"])
    assert torch.equal(head.tensors["model.layers.0.mlp.up_proj.weight"], tensors["layers.0.mlp.up_proj.weight"])
    assert "lm_head.weight" not in head.tensors


def test_sglang_has_no_reduced_vocabulary(tmp_path: Path) -> None:
    with pytest.raises(HeadMismatchError, match="--speculative-token-map"):
        save_head(random_head("eagle", draft_ids=DRAFT_IDS), tmp_path, "eagle-sglang")
    assert not list(tmp_path.iterdir())
