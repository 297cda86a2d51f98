"""The speculators format: EAGLE-3, and EAGLE-1 as far as the format goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import ConfigError, HeadMismatchError, ModelFileError, UnsupportedModelError
from outrider.heads.load import head_method, load_head
from outrider.heads.save import save_head
from outrider.models.config import Fusion
from tests.support.heads import DRAFT_IDS, TARGET, assert_same_head, random_head
from tests.unit.heads.checkpoints import block, config_values, normal, ones, tensors_of, write

H = TARGET.hidden_size
LAYER = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
}
EAGLE3: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 4,
    "norm_before_residual": False,
    "target_hidden_size": None,
    "transformer_layer_config": LAYER,
}


def _tensors() -> dict[str, torch.Tensor]:
    mask = torch.zeros(96, dtype=torch.bool)
    mask[[3, 5, 10, 93]] = True
    return {
        "fc.weight": normal(H, 3 * H),
        "layers.0.hidden_norm.weight": ones(H),
        "layers.0.input_layernorm.weight": ones(H),
        **block("layers.0", TARGET, seen=2 * H),
        "norm.weight": ones(H),
        "lm_head.weight": normal(4, H),
        "d2t": torch.tensor([3, 4, 8, 90]),
        "t2d": mask,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_ids": DRAFT_IDS, "own_output": True, "dtype": torch.bfloat16},
        {"fusion": Fusion("attend", norm_before_residual=True)},
    ],
)
def test_what_is_saved_is_read_back(changes: dict[str, Any], tmp_path: Path) -> None:
    head = random_head("eagle3", **changes)
    save_head(head, tmp_path, "speculators")
    assert head_method(tmp_path) == "eagle3"
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)


@pytest.mark.parametrize(
    "changes", [{}, {"fusion": Fusion("project", norms=False), "dtype": torch.float16}, {"qkv_bias": True}]
)
def test_eagle_1_is_saved_and_read_back(changes: dict[str, Any], tmp_path: Path) -> None:
    head = random_head("eagle", **changes)
    save_head(head, tmp_path, "speculators")
    assert head_method(tmp_path) == "eagle"
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)


def test_what_speculators_asks_for_of_eagle_1(tmp_path: Path) -> None:
    save_head(random_head("eagle"), tmp_path, "speculators")
    values = config_values(tmp_path)
    assert values["speculators_model_type"] == values["speculators_config"]["algorithm"] == "eagle"
    assert values["architectures"] == ["EagleSpeculator", "LlamaDecoderLayer"]
    assert values["transformer_layer_architecture"] == "LlamaDecoderLayer"
    assert (values["layernorms"], values["fusion_bias"]) == (False, True)
    assert set(tensors_of(tmp_path)) == {
        *("fusion_fc.weight", "fusion_fc.bias", "transformer.post_attention_layernorm.weight"),
        *(f"transformer.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"transformer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"num_layers": 2}, "2 blocks"),
        ({"fusion": Fusion("project", norms=True)}, "norms of the embedding and the feature"),
        ({"qk_norm": True}, "norms of queries and keys"),
        ({"draft_ids": DRAFT_IDS}, "a reduced vocabulary"),
        ({"own_output": True}, "an output matrix"),
        ({"own_embedding": True}, "an embedding"),
    ],
)
def test_what_eagle_1_has_no_place_for_there(changes: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(HeadMismatchError, match=f"has no place for {what}; write layout 'eagle'"):
        save_head(random_head("eagle", **changes), tmp_path, "speculators")
    assert not list(tmp_path.iterdir())


def test_what_vllm_asks_for_is_written(tmp_path: Path) -> None:
    save_head(random_head("eagle3", draft_ids=DRAFT_IDS, own_output=True), tmp_path, "speculators")
    values = config_values(tmp_path)
    assert values["speculators_model_type"] == "eagle3"
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
    assert "name_or_path" in values["speculators_config"]["verifier"]
    assert values["norm_before_residual"] is False
    assert values["draft_vocab_size"] == len(DRAFT_IDS)
    assert values["transformer_layer_config"]["model_type"] == "llama"
    tensors = tensors_of(tmp_path)
    assert "layers.0.hidden_norm.weight" in tensors
    assert (tensors["d2t"] + torch.arange(len(DRAFT_IDS))).tolist() == DRAFT_IDS.tolist()
    assert tensors["t2d"].nonzero().flatten().tolist() == DRAFT_IDS.tolist()


def test_a_checkpoint_of_others(tmp_path: Path) -> None:
    extra = {"verifier_norm.weight": ones(H), "verifier_lm_head.weight": normal(4, H)}
    write(tmp_path, EAGLE3 | {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, _tensors() | extra)
    head = load_head(tmp_path, TARGET, "target")
    assert head.config is not None
    assert (head.method, head.feature_layers, head.config.rope_theta) == ("eagle3", (1, 3, 6), 5000.0)
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == [3, 5, 10, 93]


@pytest.mark.parametrize("normed", [True, False])
def test_what_the_residual_stream_is(normed: bool, tmp_path: Path) -> None:
    write(tmp_path, EAGLE3 | {"norm_before_residual": normed}, _tensors())
    head = load_head(tmp_path, TARGET, "target")
    assert head.config is not None
    assert head.config.fusion == Fusion("attend", norm_before_residual=normed)


def test_eagle_1(tmp_path: Path) -> None:
    values = {"speculators_model_type": "eagle", "layernorms": False, "fusion_bias": True}
    tensors = {"fusion_fc.weight": normal(H, 2 * H), "fusion_fc.bias": ones(H), **block("transformer", TARGET)}
    write(tmp_path, values | {"transformer_layer_config": LAYER}, tensors)
    head = load_head(tmp_path, TARGET, "target")
    assert head.config is not None
    assert (head.method, head.config.fusion) == ("eagle", Fusion("project", norms=False, bias=True))
    assert torch.equal(head.tensors["model.fuse.weight"], tensors["fusion_fc.weight"])


@pytest.mark.parametrize(
    ("values", "error", "says"),
    [
        (EAGLE3 | {"norm_output": True}, UnsupportedModelError, "norm_output=true"),
        (EAGLE3 | {"norm_before_fc": True}, UnsupportedModelError, "norm_before_fc=true"),
        ({k: v for k, v in EAGLE3.items() if k != "norm_before_residual"}, ModelFileError, "norm_before_residual is"),
        (
            {k: v for k, v in EAGLE3.items() if k != "transformer_layer_config"},
            ModelFileError,
            "is missing from config",
        ),
        (EAGLE3 | {"speculators_model_type": "mlp"}, UnsupportedModelError, "'mlp' is not supported"),
        (EAGLE3 | {"speculators_model_type": "eagle", "layernorms": True}, UnsupportedModelError, "layernorms=true"),
    ],
)
def test_variants_are_refused(values: dict[str, Any], error: type[Exception], says: str, tmp_path: Path) -> None:
    write(tmp_path, values, _tensors())
    with pytest.raises(error, match=says):
        load_head(tmp_path, TARGET, "target")


def test_other_methods_are_not_written_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no medusa drafter; choose one of medusa, medusa-lm-head"):
        save_head(random_head("medusa"), tmp_path, "speculators")
