"""The promise with MTP modules that come in the target's own checkpoint: they are found, run, and change no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, SamplingParams
from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.executors.native import why_unavailable
from tests.support.models import random_model, write_hf_folder
from tests.unit.heads.checkpoints import carry, deepseek_module, mimo_module

NATIVE = pytest.param("native", marks=pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())))
PROMPTS = [[1, 9, 5, 9, 5, 9, 5], [8, 3] * 10, [20]]
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True),
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.8, seed=1),
    SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=2, repetition_penalty=1.2),
]


@pytest.mark.parametrize("executor", ["torch", NATIVE])
@pytest.mark.parametrize("method", ["mtp", "auto"])
@pytest.mark.parametrize(
    ("variant", "model_type", "prefix", "make"),
    [("llama", "llama", "model.layers.3", deepseek_module), ("qwen2", "mimo", "model.mtp_layers.0", mimo_module)],
    ids=["deepseek", "mimo"],
)
def test_a_carried_module_drafts_and_changes_no_token(
    executor: str,
    method: str,
    variant: str,
    model_type: str,
    prefix: str,
    make: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    model = random_model(variant)
    folder = write_hf_folder(model, tmp_path)
    carry(folder, make(prefix, model.config), model_type=model_type, num_nextn_predict_layers=1)
    sizes = EngineConfig(max_batch_size=3, max_context=128, kv_tokens=512)
    dtype = "float32" if executor == "torch" else "auto"
    plain = LLM(str(folder), "none", executor=executor, dtype=dtype, engine_config=sizes, threads=1)
    expected = plain.generate(PROMPTS, PARAMS, use_tqdm=False)
    config = SpeculativeConfig(method=method, num_speculative_tokens=8, adaptive=False)
    outputs = plain.with_speculation(config).generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert all(output.statistics.failures == 0 for output in outputs)
    assert sum(output.statistics.drafted_by_source.get("mtp", 0) for output in outputs) > 0
