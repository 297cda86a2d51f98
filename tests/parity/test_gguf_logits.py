"""From a folder or a GGUF on disk to logits: the same as transformers computes from the folder, for every family.

What a wrong row order, a forgotten bias or a misread rotary setting would show in, all at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.loader import Model, load_model
from tests.support.models import VARIANTS, random_model, write_gguf, write_hf_folder

TOKENS = list(range(3, 60))
TOLERANCE = 1e-4  # on logits that spread by about 1; rounding in float32 leaves 1e-5


def logits(model: Model) -> torch.Tensor:
    executor = TorchExecutor(model, dtype="float32", kv_tokens=128)
    return executor.forward([Segment.chain(executor.open(), TOKENS)]).logits


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_transformers(tmp_path: Path, variant: str) -> None:
    model = random_model(variant)
    folder = write_hf_folder(model, tmp_path / "hf")
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    sources = [folder]
    if variant != "qwen2-window":  # a GGUF cannot say which layers have the window
        sources.append(write_gguf(model, tmp_path / "m.gguf"))
    for source in sources:
        assert (logits(load_model(str(source))) - expected).abs().max() < TOLERANCE
    other = random_model(variant, seed=1)
    assert (logits(other) - expected).abs().max() > 100 * TOLERANCE
