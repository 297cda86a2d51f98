from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.errors import HeadMismatchError, UnknownNameError
from outrider.heads.handover import ENGINES, for_engine
from outrider.heads.load import load_head
from outrider.heads.save import save_head
from outrider.models.config import OUTPUT, Fusion
from outrider.models.weights import TensorWeights
from tests.support.heads import DRAFT_IDS, TARGET, assert_same_head, random_head
from tests.support.models import random_model
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


def test_eagle_goes_to_speculators_with_its_bias_and_the_whole_vocabulary(tmp_path: Path) -> None:
    head = random_head("eagle", draft_ids=DRAFT_IDS)
    handed, layout = for_engine(head, WEIGHTS, "speculators")
    save_head(handed, tmp_path, layout)
    read = load_head(tmp_path, TARGET, "target")
    assert_same_head(read, random_head("eagle"))
    assert read.config is not None
    assert read.config.fusion == Fusion("project", norms=False, bias=True)
    own = random_head("eagle", draft_ids=DRAFT_IDS, own_output=True)
    assert for_engine(own, WEIGHTS, "speculators") == (own, "speculators")


class Told(NamedTuple):
    rounds: int
    drafted: int
    accepted: int


def test_eagle_drafts_the_same_from_the_speculators_format(tmp_path: Path) -> None:
    """Whatever is drafted, and sampled with noise of which some agree with it."""
    model = random_model("llama", num_layers=6)
    llm = LLM(model, "none", executor="torch", dtype="float32", threads=1, engine_config=EngineConfig(max_context=128))
    head = random_head("eagle", model.config, seed=5)
    handed, layout = for_engine(head, model.weights, "speculators")
    save_head(head, tmp_path / "before")
    save_head(handed, tmp_path / "after", layout)
    save_head(random_head("eagle", model.config, seed=6), tmp_path / "other")
    told = []
    for folder in ("before", "after", "other"):
        own = SpeculativeConfig(method="eagle", model=str(tmp_path / folder), num_speculative_tokens=8, adaptive=False)
        params = [SamplingParams(max_tokens=40, temperature=0.8, seed=seed, ignore_eos=True) for seed in range(3)]
        outputs = llm.with_speculation(own).generate([[1, 9, 5], [8, 3] * 9, [20]], params, use_tqdm=False)
        told.append([Told(s.rounds, s.drafted, s.accepted) for s in (output.statistics for output in outputs)])
    assert told[0] == told[1] != told[2]
    assert sum(each.accepted for each in told[0]) > 0


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
