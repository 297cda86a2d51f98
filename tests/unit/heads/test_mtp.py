"""Multi-token prediction modules: in a file of their own, and within their target's checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import HeadMismatchError, UnsupportedModelError
from outrider.heads.load import head_method, load_head
from outrider.heads.save import save_head
from outrider.models.loader import load_model
from tests.support.heads import DRAFT_IDS, TARGET, assert_same_head, random_head
from tests.support.models import random_model, write_hf_folder
from tests.unit.heads.checkpoints import (
    carry,
    config_values,
    deepseek_module,
    mimo_module,
    normal,
    ones,
    tensors_of,
    write,
)

H = TARGET.hidden_size


@pytest.mark.parametrize("layout", [None, "mtp-mimo"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"draft_ids": DRAFT_IDS, "dtype": torch.bfloat16}, {"intermediate_size": 64, "qkv_bias": True}],
    ids=["plain", "reduced", "another-shape"],
)
def test_what_is_saved_is_read_back(layout: str | None, changes: dict[str, Any], tmp_path: Path) -> None:
    head = random_head("mtp", **changes)
    save_head(head, tmp_path, layout)
    assert head_method(tmp_path) == "mtp"
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)


def test_matrices_of_its_own(tmp_path: Path) -> None:
    head = random_head("mtp", own_output=True, own_embedding=True, draft_ids=DRAFT_IDS)
    save_head(head, tmp_path)
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)
    with pytest.raises(HeadMismatchError, match=r"no place for a matrix .* write layout 'mtp'"):
        save_head(head, tmp_path, "mtp-mimo")


def test_public_names_and_halves(tmp_path: Path) -> None:
    head = random_head("mtp")
    save_head(head, tmp_path / "deepseek")
    save_head(head, tmp_path / "mimo", "mtp-mimo")
    deepseek, mimo = tensors_of(tmp_path / "deepseek"), tensors_of(tmp_path / "mimo")
    assert {"model.layers.8.enorm.weight", "model.layers.8.shared_head.norm.weight"} <= set(deepseek)
    assert {"model.mtp_layers.0.token_layernorm.weight", "model.mtp_layers.0.self_attn.q_proj.weight"} <= set(mimo)
    fuse = head.tensors["model.fuse.weight"]
    assert torch.equal(deepseek["model.layers.8.eh_proj.weight"], fuse)
    assert torch.equal(mimo["model.mtp_layers.0.input_proj.weight"], torch.cat([fuse[:, H:], fuse[:, :H]], 1))
    for folder in ("deepseek", "mimo"):
        values = config_values(tmp_path / folder)
        assert (values["num_hidden_layers"], values["num_nextn_predict_layers"]) == (8, 1)


@pytest.mark.parametrize(
    ("variant", "model_type", "prefixes", "make"),
    [
        ("llama", "llama", ["model.layers.3"], deepseek_module),
        ("llama", "llama", ["model.layers.4", "model.layers.3"], deepseek_module),
        ("qwen2", "mimo", ["model.mtp_layers.0"], mimo_module),
    ],
    ids=["deepseek", "two-modules", "mimo"],
)
def test_a_target_that_carries_modules(
    variant: str, model_type: str, prefixes: list[str], make: Any, tmp_path: Path
) -> None:
    """The target is loaded without them, and the first of them is read as a head."""
    model = random_model(variant)
    folder = write_hf_folder(model, tmp_path)
    modules = [make(prefix, model.config) for prefix in prefixes]
    extra = {name: tensor for module in modules for name, tensor in module.items()}
    carry(folder, extra, model_type=model_type, num_nextn_predict_layers=len(prefixes))
    target = load_model(str(folder))
    assert set(target.weights.names()) == set(random_model(variant).weights.names())
    head = load_head(folder, target.config, "target")
    assert head.config is not None
    assert (head.method, head.num_layers, head.config.num_layers, head.normed) == ("mtp", 3, 1, True)
    assert head.config.qkv_bias == (make is mimo_module)
    assert torch.equal(head.tensors["model.feature_norm.weight"], 2 * ones(model.config.hidden_size))
    first = modules[-1]
    assert torch.equal(head.tensors["model.layers.0.mlp.up_proj.weight"], first[prefixes[-1] + ".mlp.up_proj.weight"])


def test_modules_that_config_json_does_not_mention_have_no_place(tmp_path: Path) -> None:
    model = random_model("llama")
    folder = write_hf_folder(model, tmp_path)
    carry(folder, deepseek_module("model.layers.3", model.config))
    with pytest.raises(UnsupportedModelError, match="has no place in a llama model"):
        load_model(str(folder))


def test_a_file_of_modules_alone(tmp_path: Path) -> None:
    tensors = deepseek_module("model.layers.8", TARGET) | {
        "model.layers.8.embed_tokens.weight": normal(96, H),
        "model.layers.8.shared_head.head.weight": normal(96, H),
    }
    write(tmp_path, None, tensors, "mtp.safetensors")
    head = load_head(tmp_path / "mtp.safetensors", TARGET, "target")
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(head.tensors)
    assert torch.equal(head.tensors["model.fuse.weight"], tensors["model.layers.8.eh_proj.weight"])


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"model.layers.8.mlp.experts.0.up_proj.weight": normal(4, 4)}, "has no place in mtp"),
        ({"model.layers.8.hnorm.weight": ones(16)}, r"'model.feature_norm.weight' has shape \(16,\)"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(extra: dict[str, torch.Tensor], says: str, tmp_path: Path) -> None:
    write(tmp_path, None, deepseek_module("model.layers.8", TARGET) | extra)
    with pytest.raises(HeadMismatchError, match=says):
        load_head(tmp_path, TARGET, "target")


def test_another_target(tmp_path: Path) -> None:
    save_head(random_head("mtp"), tmp_path)
    with pytest.raises(HeadMismatchError, match="number of layers 8, but deep has 9"):
        load_head(tmp_path, replace(TARGET, num_layers=9), "deep")
    save_head(random_head("mtp", replace(TARGET, num_layers=9)), tmp_path)
    with pytest.raises(HeadMismatchError, match="number of layers 9, but target has 8"):
        load_head(tmp_path, TARGET, "target")
