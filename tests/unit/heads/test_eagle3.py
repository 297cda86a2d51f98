"""EAGLE-3 checkpoints: written and read back, and read as others write them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import HeadMismatchError, ModelFileError, UnsupportedModelError
from outrider.heads.load import head_method, load_head
from outrider.heads.save import save_head
from outrider.models.config import Fusion, RopeScaling
from tests.support.heads import DRAFT_IDS, TARGET, assert_same_head, random_head
from tests.unit.heads.checkpoints import block, config_values, normal, ones, write

H = TARGET.hidden_size


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_ids": DRAFT_IDS, "own_output": True},
        {"own_embedding": True, "dtype": torch.bfloat16},
        {"num_layers": 2, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "qk_norm": True},
        {"intermediate_size": 80, "num_heads": 8, "num_kv_heads": 1, "max_position": 512},
        {"rope_scaling": RopeScaling("linear", 4.0)},
        {"rope_scaling": RopeScaling("llama3", 8.0, original_max_position=64), "rope_theta": 5e5},
        {"rope_scaling": RopeScaling("yarn", 4.0, original_max_position=128, attention_factor=1.2)},
    ],
    ids=["shared-output", "reduced", "own-embedding", "biases", "another-shape", "linear", "llama3", "yarn"],
)
def test_what_is_saved_is_read_back(changes: dict[str, Any], tmp_path: Path) -> None:
    head = random_head("eagle3", **changes)
    save_head(head, tmp_path)
    assert head_method(tmp_path) == "eagle3"
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_scaling": RopeScaling("factors", 1.0, factors=(1.0,) * 4)}, "given one by one"),
        ({"sliding_window": 64}, "with a sliding window"),
        ({"first_norm": True, "fusion": Fusion("project")}, "not that of eagle3 drafters"),
    ],
)
def test_what_no_key_says_is_not_written(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    head = random_head("eagle3", **changes)
    with pytest.raises(HeadMismatchError, match=says):
        save_head(head, tmp_path)


def test_layers_of_its_own_choice_are_written_for_both_ways_of_counting(tmp_path: Path) -> None:
    head = replace(random_head("eagle3"), feature_layers=(1, 5, 7))
    save_head(head, tmp_path)
    values = config_values(tmp_path)
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 5, 7]
    assert values["eagle_config"] == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 4, 6]}
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)


def _public(layer: str, draft: int = 4, width: int = H) -> dict[str, torch.Tensor]:
    return {
        "fc.weight": normal(width, 3 * H),
        f"{layer}.hidden_norm.weight": ones(width),
        f"{layer}.input_layernorm.weight": 2 * ones(width),
        **block(layer, TARGET, width=width, seen=2 * width),
        "norm.weight": ones(width),
        "lm_head.weight": normal(draft, width),
    }


VALUES: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": 96,
    "draft_vocab_size": 4,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
}


def _mask(*ids: int) -> torch.Tensor:
    mask = torch.zeros(96, dtype=torch.bool)
    mask[list(ids)] = True
    return mask


@pytest.mark.parametrize("layer", ["midlayer", "layers.0"])
def test_a_checkpoint_of_others(layer: str, tmp_path: Path) -> None:
    """Offsets (not ids) in d2t, a mask in t2d, the embedding's copy, buffers, a context shorter than the target's."""
    tensors = _public(layer) | {
        "d2t": torch.tensor([3, 4, 8, 90]),
        "t2d": _mask(3, 5, 10, 93),
        "embed_tokens.weight": normal(96, H),
        f"{layer}.self_attn.rotary_emb.inv_freq": ones(4),
    }
    write(tmp_path, VALUES, tensors)
    head = load_head(tmp_path, TARGET, "target")
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == [3, 5, 10, 93]
    assert head.feature_layers == (2, 4, 5)
    assert head.config is not None
    assert (head.config.num_logits, head.config.max_position) == (4, 256)
    assert torch.equal(head.tensors["model.embed_norm.weight"], 2 * ones(H))
    assert torch.equal(head.tensors["model.feature_norm.weight"], ones(H))
    assert torch.equal(head.tensors["features.weight"], tensors["fc.weight"])
    assert torch.equal(
        head.tensors["model.layers.0.self_attn.q_proj.weight"], tensors[f"{layer}.self_attn.q_proj.weight"]
    )
    assert "model.embed_tokens.weight" in head.tensors


def test_the_mask_alone_names_the_tokens(tmp_path: Path) -> None:
    write(tmp_path, VALUES, _public("midlayer") | {"t2d": _mask(3, 5, 10, 93)})
    ids = load_head(tmp_path, TARGET, "target").draft_ids
    assert ids is not None
    assert ids.tolist() == [3, 5, 10, 93]


def test_columns_in_another_order_are_put_in_order(tmp_path: Path) -> None:
    tensors = _public("midlayer") | {"d2t": torch.tensor([93, 4, 8, 0])}
    write(tmp_path, VALUES, tensors)
    head = load_head(tmp_path, TARGET, "target")
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == [3, 5, 10, 93]
    assert torch.equal(head.tensors["lm_head.weight"], tensors["lm_head.weight"][[3, 1, 2, 0]])


@pytest.mark.parametrize(
    ("extra", "layers"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, (2, 4, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
    ],
    ids=["sglang", "vllm"],
)
def test_layers_as_others_count_them(extra: dict[str, Any], layers: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, VALUES | extra, _public("midlayer") | {"d2t": torch.tensor([3, 4, 8, 90])})
    assert load_head(tmp_path, TARGET, "target").feature_layers == layers


def test_a_head_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    values = VALUES | {"hidden_size": 16, "head_dim": 8, "target_hidden_size": H}
    tensors = _public("midlayer", width=16) | {"d2t": torch.tensor([3, 4, 8, 90])}
    write(tmp_path, values, tensors | {"embed_tokens.weight": normal(96, 16)})
    head = load_head(tmp_path, TARGET, "target")
    assert head.config is not None
    assert (head.hidden_size, head.config.hidden_size) == (H, 16)
    write(tmp_path, values, tensors)
    with pytest.raises(HeadMismatchError, match=r"'model.embed_tokens.weight' is missing, and the target's is 32 wide"):
        load_head(tmp_path, TARGET, "target")


D2T = {"d2t": torch.tensor([3, 4, 8, 90])}


@pytest.mark.parametrize(
    ("values", "tensors", "error", "says"),
    [
        ({"norm_before_fc": True}, D2T, UnsupportedModelError, "norm_before_fc=true"),
        ({"eagle_config": {"fc_norm": True}}, D2T, UnsupportedModelError, "fc_norm=true"),
        ({"eagle_config": "none"}, D2T, ModelFileError, "eagle_config must be an object"),
        ({"draft_vocab_size": 5}, D2T, HeadMismatchError, "draft_vocab_size=5, but its map names 4 tokens"),
        ({"hidden_act": "gelu"}, D2T, UnsupportedModelError, "hidden_act"),
        ({"num_attention_heads": None}, D2T, ModelFileError, "the key 'num_attention_heads' is missing"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, D2T, HeadMismatchError, "to join 2 hidden states of size 32"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]},
            D2T,
            HeadMismatchError,
            "hidden state 9, but it has 8 layers",
        ),
        ({"eagle_aux_hidden_state_layer_ids": "low"}, D2T, ModelFileError, "must be a list of layer numbers"),
        ({"outrider": {"target_num_layers": "8"}}, D2T, ModelFileError, "must be a whole number"),
        ({"num_hidden_layers": 10**30}, D2T, HeadMismatchError, "0 blocks are said to be there, in "),
        ({"target_hidden_size": "32"}, D2T, ModelFileError, "target_hidden_size must be a whole number"),
        ({}, {}, HeadMismatchError, r"'lm_head.weight' has shape \(4, 32\); \(96, 32\) is expected"),
        ({"draft_vocab_size": 3}, {"d2t": torch.tensor([3, 4, 8])}, HeadMismatchError, r"\(3, 32\) is expected"),
        ({}, {"d2t": torch.tensor([3, 4, 8, 93])}, HeadMismatchError, "outside of a vocabulary of 96"),
        ({}, {"d2t": torch.tensor([3, 2, 8, 90])}, HeadMismatchError, "names a token twice"),
        ({}, {"d2t": ones(4)}, HeadMismatchError, "'d2t' must be one row of whole numbers"),
        ({}, D2T | {"t2d": _mask(3, 5, 10, 94)}, HeadMismatchError, "do not name the same tokens"),
        ({}, D2T | {"norm.weight": ones(16)}, HeadMismatchError, r"'model.norm.weight' has shape \(16,\)"),
        ({}, D2T | {"adapter.weight": ones(4)}, HeadMismatchError, "'adapter.weight' has no place in eagle3"),
        ({}, D2T | {"norm.weight": ones(H).to(torch.int8)}, HeadMismatchError, "of type int8; quantised drafters"),
        ({"vocab_size": 128}, D2T, HeadMismatchError, "vocabulary size 128, but target has 96"),
        ({"outrider": {"target_num_layers": 9}}, D2T, HeadMismatchError, "number of layers 9, but target has 8"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(
    values: dict[str, Any], tensors: dict[str, torch.Tensor], error: type[Exception], says: str, tmp_path: Path
) -> None:
    write(tmp_path, VALUES | values, _public("midlayer") | tensors)
    with pytest.raises(error, match=says) as refused:
        load_head(tmp_path, TARGET, "target")
    assert "\n" not in str(refused.value)


def test_another_targets_size(tmp_path: Path) -> None:
    save_head(random_head("eagle3"), tmp_path)
    with pytest.raises(HeadMismatchError, match=r"hidden size 32, but big has 48; .*outrider train"):
        load_head(tmp_path, replace(TARGET, hidden_size=48), "big")
