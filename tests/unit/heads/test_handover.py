from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.core.errors import HeadMismatchError, UnknownNameError
from outrider.heads.handover import ENGINES, for_engine
from outrider.heads.load import load_head
from outrider.heads.save import save_head
from outrider.models.config import OUTPUT, Fusion
from outrider.models.weights import TensorWeights
from tests.support.heads import DRAFT_IDS, TARGET, random_head
from tests.unit.heads.checkpoints import config_values, normal, tensors_of

MATRIX = normal(96, TARGET.hidden_size)
WEIGHTS = TensorWeights({OUTPUT: MATRIX})
PLAIN = Fusion("project", norms=False)


@pytest.mark.parametrize(("engine", "method"), [(name, method) for name in ENGINES for method in ENGINES[name]])
def test_what_is_written_is_read_back_and_drafts_the_same(engine: str, method: str, tmp_path: Path) -> None:
    bias = {} if (engine, method) != ("vllm", "eagle") else {"fusion": PLAIN}
    reduced = None if method == "eagle" else DRAFT_IDS
    head = random_head(method, draft_ids=reduced, own_output=method == "eagle3", **bias)
    handed, layout = for_engine(head, WEIGHTS, engine)
    save_head(handed, tmp_path, layout)
    read = load_head(tmp_path, TARGET, "target")
    assert read.method == method
    assert all(torch.equal(read.tensors[name], tensor) for name, tensor in head.tensors.items())


def test_medusa_brings_the_whole_output_and_no_map(tmp_path: Path) -> None:
    handed, layout = for_engine(random_head("medusa", draft_ids=DRAFT_IDS), WEIGHTS, "vllm")
    save_head(handed, tmp_path, layout)
    tensors = tensors_of(tmp_path)
    assert "token_map" not in tensors
    assert torch.equal(tensors["lm_head.weight"], MATRIX)
    assert config_values(tmp_path)["truncated_vocab_size"] == 96


def test_eagle3_brings_the_rows_that_it_would_borrow(tmp_path: Path) -> None:
    handed, layout = for_engine(random_head("eagle3", draft_ids=DRAFT_IDS), WEIGHTS, "sglang")
    save_head(handed, tmp_path, layout)
    assert torch.equal(tensors_of(tmp_path)["lm_head.weight"], MATRIX[DRAFT_IDS])
    assert config_values(tmp_path)["architectures"] == ["LlamaForCausalLMEagle3"]


@pytest.mark.parametrize(
    ("engine", "method", "says"),
    [
        ("sglang", "medusa", "sglang runs no medusa heads made for it; it runs eagle3, eagle"),
        ("vllm", "mtp", "vllm runs no mtp heads"),
        ("vllm", "eagle", "without the bias that this head has"),
    ],
)
def test_what_an_engine_would_refuse_or_run_differently(engine: str, method: str, says: str) -> None:
    with pytest.raises(HeadMismatchError, match=says):
        for_engine(random_head(method), WEIGHTS, engine)


def test_an_unknown_engine() -> None:
    with pytest.raises(UnknownNameError):
        for_engine(random_head("eagle3"), WEIGHTS, "vlm")
