"""Medusa heads: vLLM's names, the authors' file, and what each of them cannot say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.errors import HeadMismatchError
from outrider.heads.head import Head
from outrider.heads.load import head_method, load_head
from outrider.heads.save import save_head
from outrider.heads.standalone import standalone
from outrider.models.config import OUTPUT
from outrider.models.weights import TensorWeights
from tests.support.heads import DRAFT_IDS, RANKED, TARGET, assert_same_head, random_head
from tests.unit.heads.checkpoints import config_values, normal, ones, tensors_of, write

H = TARGET.hidden_size


def _shared(head: Head) -> Head:
    columns = head.vocab_size if head.draft_ids is None else len(head.draft_ids)
    return replace(head, tensors={**head.tensors, OUTPUT: normal(columns, H)})


@pytest.mark.parametrize(
    ("layout", "head"),
    [
        (None, random_head("medusa")),
        ("medusa", random_head("medusa", own_output=True, num_heads=2, num_blocks=2, dtype=torch.float16)),
        ("medusa", random_head("medusa", own_output=True, draft_ids=DRAFT_IDS)),
        ("medusa", _shared(random_head("medusa", draft_ids=DRAFT_IDS))),
        ("medusa", random_head("medusa", draft_ids=DRAFT_IDS)),
        ("medusa-lm-head", random_head("medusa", own_output=True, num_blocks=2)),
        (None, replace(random_head("medusa"), accept_by_rank=RANKED)),
        ("medusa-lm-head", replace(random_head("medusa", own_output=True), accept_by_rank=RANKED)),
    ],
    ids=[
        *("targets-output", "own-outputs", "own-reduced", "shared-reduced", "targets-reduced", "authors"),
        *("ranked", "authors-ranked"),
    ],
)
def test_what_is_saved_is_read_back(layout: str | None, head: Head, tmp_path: Path) -> None:
    save_head(head, tmp_path, layout)
    assert head_method(tmp_path) == "medusa"
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)


def test_vllms_keys(tmp_path: Path) -> None:
    save_head(_shared(random_head("medusa", draft_ids=DRAFT_IDS, num_blocks=2)), tmp_path)
    values = config_values(tmp_path)
    wanted = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "hidden_size": H, "vocab_size": 96}
    wanted |= {"truncated_vocab_size": len(DRAFT_IDS), "original_lm_head": True, "medusa_fc_bias": True}
    assert {key: values[key] for key in wanted} == wanted
    assert set(tensors_of(tmp_path)) == {
        *(f"blocks.{k}.layers.{i}.{kind}" for k in range(3) for i in range(2) for kind in ("weight", "bias")),
        "lm_head.weight",
        "token_map",
    }


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("alone", [True, False])
def test_the_authors_file(file: str, alone: bool, tmp_path: Path) -> None:
    """config.json says less than it should (often fewer heads than there are); the file alone is enough."""
    values = {"base_model_name_or_path": "some/model", "medusa_num_heads": 2, "medusa_num_layers": 1}
    tensors: dict[str, torch.Tensor] = {}
    for k in range(3):
        tensors |= {
            f"{k}.0.linear.weight": normal(H, H),
            f"{k}.0.linear.bias": normal(H),
            f"{k}.1.weight": normal(96, H),
        }
    write(tmp_path, None if alone else values, tensors, file)
    head = load_head(tmp_path / file if alone else tmp_path, TARGET, "target")
    assert (head.num_heads, head.vocab_size, head.hidden_size, head.feature_layers) == (3, 96, H, (8,))
    assert torch.equal(head.tensors["heads.2.blocks.0.bias"], tensors["2.0.linear.bias"])
    assert torch.equal(head.tensors["heads.1.output.weight"], tensors["1.1.weight"])


VLLM: dict[str, Any] = {"model_type": "medusa", "hidden_size": H, "vocab_size": 96, "num_heads": 1}


def test_vllms_checkpoint_without_biases_and_with_full_outputs(tmp_path: Path) -> None:
    """Of a full output matrix beside a token_map, vLLM takes the rows; and the map may be in any order."""
    full = normal(96, H)
    write(
        tmp_path,
        VLLM | {"truncated_vocab_size": 3},
        {
            "medusa_heads.blocks.0.layers.0.weight": normal(H, H),
            "medusa_heads.lm_heads.0.weight": full,
            "token_map": torch.tensor([7, 3, 90]),
        },
    )
    head = load_head(tmp_path, TARGET, "target")
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == [3, 7, 90]
    assert torch.equal(head.tensors["heads.0.output.weight"], full[[3, 7, 90]])
    assert torch.equal(head.tensors["heads.0.blocks.0.bias"], 0 * ones(H))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"blocks.0.layers.0.weight": normal(H, H + 1)}, r"shape \(32, 33\); \(33, 33\) is expected|hidden size 33"),
        ({"blocks.1.layers.0.weight": normal(H, H)}, r"'heads.1.blocks.0.weight' has no place|hidden size 0"),
        ({"token_map": torch.tensor([3, 96])}, "outside of a vocabulary of 96"),
        ({"token_map": torch.tensor([3, 3])}, "names a token twice"),
        ({"lm_head.weight": normal(95, H)}, r"'lm_head.weight' has shape \(95, 32\); \(96, 32\) is expected"),
    ],
)
def test_what_does_not_fit_is_one_clear_line(tensors: dict[str, torch.Tensor], says: str, tmp_path: Path) -> None:
    whole = {"blocks.0.layers.0.weight": normal(H, H)} if "blocks.1.layers.0.weight" not in tensors else {}
    write(tmp_path, VLLM, whole | tensors)
    with pytest.raises(HeadMismatchError, match=says) as refused:
        load_head(tmp_path, TARGET, "target")
    assert "\n" not in str(refused.value)


def test_what_the_authors_file_cannot_say(tmp_path: Path) -> None:
    with pytest.raises(HeadMismatchError, match="no reduced vocabulary; write layout 'medusa'"):
        save_head(random_head("medusa", draft_ids=DRAFT_IDS), tmp_path, "medusa-lm-head")
    with pytest.raises(HeadMismatchError, match="every head has an output matrix"):
        save_head(random_head("medusa"), tmp_path, "medusa-lm-head")


def test_a_shared_output_is_written_for_each_head(tmp_path: Path) -> None:
    head = _shared(random_head("medusa"))
    save_head(head, tmp_path, "medusa-lm-head")
    read = load_head(tmp_path, TARGET, "target")
    for k in range(3):
        assert torch.equal(read.tensors[f"heads.{k}.output.weight"], head.tensors[OUTPUT])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("method", ["medusa", "eagle3", "mtp"])
def test_the_targets_output_can_be_brought_along(method: str, tied: bool) -> None:
    matrices = {"model.embed_tokens.weight": normal(96, H)} | ({} if tied else {OUTPUT: normal(96, H)})
    matrix = matrices["model.embed_tokens.weight" if tied else OUTPUT]
    weights = TensorWeights(matrices)
    assert torch.equal(standalone(random_head(method), weights).tensors[OUTPUT], matrix)
    reduced = standalone(random_head(method, draft_ids=DRAFT_IDS), weights)
    assert torch.equal(reduced.tensors[OUTPUT], matrix[DRAFT_IDS])
    reduced.check_tensors()
    own = random_head(method, own_output=True)
    assert standalone(own, weights) is own


def test_the_whole_vocabulary_can_be_brought_along() -> None:
    matrix = normal(96, H)
    weights = TensorWeights({OUTPUT: matrix})
    widened = standalone(random_head("medusa", draft_ids=DRAFT_IDS), weights, whole_vocabulary=True)
    assert widened.draft_ids is None
    assert torch.equal(widened.tensors[OUTPUT], matrix)
    widened.check_tensors()
    with pytest.raises(HeadMismatchError, match="no rows for the whole vocabulary"):
        standalone(random_head("eagle3", draft_ids=DRAFT_IDS, own_output=True), weights, whole_vocabulary=True)
