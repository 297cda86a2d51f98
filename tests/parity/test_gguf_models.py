"""The aliased models themselves, where they are fetched: tokens and weights against what other readers make of them.

The token ids were written down from `transformers` (its tokenizer of the same vocabulary and merges, with the
normaliser and the cutting of digits of the model's own tokenizer.json, which its GGUF converter leaves out).
"""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import pytest
import torch

from outrider.models.fetch import list_aliases
from outrider.models.gguf import GGUFFile
from outrider.models.loader import Model, load_model

TOKENS: dict[str, dict[str, list[int]]] = {
    "smollm2-135m": {
        "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
        "def f(x):\n    return x ** 2  # 3.14": [
            *(1604, 275, 24, 104, 727, 472, 1003, 1792, 1903, 216, 34, 216, 907, 216, 35, 30, 33, 36)
        ],
        "I've  two   spaces\r\n\n\ttab": [57, 3543, 216, 827, 256, 5600, 201, 1116, 197, 15999],
        "naïve Ωμέγα 日本語 🎉": [
            *(3546, 46494, 5664, 119, 16674, 34075, 23098, 8998, 17097, 241, 115, 40993, 179, 120, 248, 15107, 232, 227)
        ],
        "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
        "e\u0301 \u00e9": [85, 151, 219, 26411],
    },
    "qwen2.5-coder-0.5b": {
        "Hello world! 123": [9707, 1879, 0, 220, 16, 17, 18],
        "def f(x):\n    return x ** 2  # 3.14": [
            *(750, 282, 2075, 982, 262, 470, 856, 3070, 220, 17, 220, 671, 220, 18, 13, 16, 19)
        ],
        "I've  two   spaces\r\n\n\ttab": [40, 3003, 220, 1378, 256, 12621, 80823, 58149],
        "naïve Ωμέγα 日本語 🎉": [
            *(3376, 37572, 586, 7851, 102, 43123, 79431, 59374, 18945, 75402, 21894, 102819, 11162, 236, 231)
        ],
        "<|im_start|>user\nhi<|im_end|>\n": [151644, 872, 198, 6023, 151645, 198],
        "e\u0301 \u00e9": [963, 3958],
    },
}
CHATS: dict[str, list[int]] = {
    "smollm2-135m": [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
        *(198, 1, 4093, 198, 26843, 665, 2, 198, 1, 520, 9531, 198),
    ],
    "qwen2.5-coder-0.5b": [
        *(151644, 8948, 198, 2610, 525, 1207, 16948, 11, 3465, 553, 54364, 14817, 13, 1446, 525, 264, 10950, 17847, 13),
        *(151645, 198, 151644, 872, 198, 13048, 1052, 151645, 198, 151644, 77091, 198),
    ],
}
ENDS = {"smollm2-135m": {"<|im_end|>", "<|endoftext|>"}, "qwen2.5-coder-0.5b": {"<|im_end|>", "<|endoftext|>"}}


@cache
def fetched(name: str) -> Model:
    if name not in {status.alias.name for status in list_aliases() if status.fetched}:
        pytest.skip(f"{name} is not fetched (`outrider models fetch {name}`)")
    return load_model(name)


@pytest.mark.parametrize("name", TOKENS)
def test_tokens(name: str) -> None:
    tokenizer = fetched(name).tokenizer
    assert tokenizer is not None
    for text, ids in TOKENS[name].items():
        assert tokenizer.encode(text) == ids
        if not text.startswith("e\u0301"):
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi there"}]) == CHATS[name]
    assert {tokenizer._backend.id_to_token(i) for i in fetched(name).config.eos_token_ids} == ENDS[name]


def test_the_coder_pair_shares_a_vocabulary() -> None:
    small, large = fetched("qwen2.5-coder-0.5b").tokenizer, fetched("qwen2.5-coder-1.5b").tokenizer
    assert small is not None
    assert large is not None
    assert small.fingerprint == large.fingerprint
    assert small.fingerprint != getattr(fetched("smollm2-135m").tokenizer, "fingerprint", None)


@pytest.mark.parametrize("name", TOKENS)
def test_weights(name: str) -> None:
    """Three tensors of the real file; the rows of Llama's queries go from rotary pairs to halves."""
    model = fetched(name)
    assert model.source is not None
    file = GGUFFile(model.source)
    layer = "model.layers.5"
    for ours, theirs in (
        (f"{layer}.mlp.down_proj.weight", "blk.5.ffn_down.weight"),
        (f"{layer}.input_layernorm.weight", "blk.5.attn_norm.weight"),
        (f"{layer}.self_attn.q_proj.weight", "blk.5.attn_q.weight"),
    ):
        info = file.tensors[theirs]
        rows = file.data(theirs).reshape(*info.shape[:-1], -1)
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[info.kind])
        if "q_proj" in ours and model.config.family == "llama":
            heads, half = model.config.num_heads, model.config.head_dim // 2
            order = np.arange(expected.shape[0]).reshape(heads, half, 2).transpose(0, 2, 1).reshape(-1)
            expected = expected[order]
        assert np.array_equal(model.weights.tensor(ours, torch.float32).numpy(), expected)
