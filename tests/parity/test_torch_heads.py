"""The torch executor on learned drafters' models, against the methods' formulas written out for one whole text.

Both compute in float32 and differ in the order of sums alone: 1e-4 of values about 1 is far more than that brings, and
far less than a norm or a half of the join in the wrong place.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from outrider.core.errors import ConfigError, UsageError
from outrider.executors.base import Segment
from outrider.executors.torch.executor import TorchExecutor
from outrider.models.config import ModelConfig
from outrider.models.loader import Model
from tests.support.head_models import HEADS, features, head_model
from tests.support.models import random_model

BOUND = 1e-4
TOKENS = torch.randint(0, 128, (30,), generator=torch.Generator().manual_seed(2)).tolist()
PARENTS = [-1, 0, 1, 1, 0, 4, 3, -1]


def written_out(model: Model, tokens: list[int], given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and last hidden states of a head that reads one text from its first token on."""
    c = model.config
    w = {name: model.weights.tensor(name, torch.float32) for name in model.weights.names()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], w[name], c.rms_norm_eps) if name in w else x

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    embedded = norm(w["model.embed_tokens.weight"][tokens], "model.embed_norm.weight")
    joined = torch.cat((embedded, norm(given, "model.feature_norm.weight")), -1)
    x = given if "model.fuse.weight" not in w else linear(joined, "model.fuse")
    if c.fusion is not None and c.fusion.norm_before_residual:
        x = norm(given, "model.feature_norm.weight")
    for i in range(c.num_layers):
        layer = f"model.layers.{i}"
        first = i == 0 and "model.fuse.weight" not in w
        seen = joined if first else norm(x, f"{layer}.input_layernorm.weight")
        q, k, v = (linear(seen, f"{layer}.self_attn.{name}_proj") for name in "qkv")
        x = x + linear(attention(q, k, v, c), f"{layer}.self_attn.o_proj")
        seen = norm(x, f"{layer}.post_attention_layernorm.weight")
        gated = F.silu(linear(seen, f"{layer}.mlp.gate_proj")) * linear(seen, f"{layer}.mlp.up_proj")
        x = x + linear(gated, f"{layer}.mlp.down_proj")
    return linear(norm(x, "model.norm.weight"), "lm_head"), x


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, c: ModelConfig) -> torch.Tensor:
    half = torch.arange(c.head_dim // 2)
    angles = torch.arange(len(q))[:, None] * c.rope_theta ** (-half / (c.head_dim // 2))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.stack(x.view(len(x), -1, c.head_dim).chunk(2, -1), -1).contiguous())
        return torch.view_as_real(pairs * turn).movedim(-1, -2).flatten(-2).transpose(0, 1)

    heads = [rotated(q), rotated(k), v.view(len(v), -1, c.head_dim).transpose(0, 1)]
    out = F.scaled_dot_product_attention(*(x[None] for x in heads), is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def open_head(kind: str) -> tuple[Model, TorchExecutor]:
    model = head_model(kind)
    return model, TorchExecutor(model, dtype="float32", kv_tokens=256)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("chunk", [30, 1, 7])
def test_a_text(kind: str, chunk: int) -> None:
    model, head = open_head(kind)
    given = features(30, 64)
    logits, last = written_out(model, TOKENS, given)
    seq = head.open()
    for start in range(0, 30, chunk):
        part = slice(start, start + chunk)
        output = head.forward([Segment.chain(seq, TOKENS[part])], [model.config.num_layers], given[part])
        head.commit(seq, range(len(TOKENS[part])))
        assert output.logits.shape[1] == model.config.num_logits
        assert (output.logits - logits[part]).abs().max() < BOUND
        assert (output.hidden[model.config.num_layers] - last[part]).abs().max() < BOUND


@pytest.mark.parametrize("kind", HEADS)
def test_a_tree_beside_another_sequence(kind: str) -> None:
    """Every row of a tree is the last of its own path; rolled back, the text goes on as if there had been no tree."""
    model, head = open_head(kind)
    given, tree, more = features(20, 64), features(8, 64, seed=3), features(3, 64, seed=4)
    a, b = head.open(), head.open()
    head.forward([Segment.chain(a, TOKENS[:20])], features=given)
    head.commit(a, range(20))
    nodes = [1, 2, 3, 4, 5, 6, 7, 8]
    output = head.forward([Segment.chain(b, TOKENS[:3]), Segment(a, nodes, PARENTS)], features=torch.cat((more, tree)))
    assert (output.logits[:3] - written_out(model, TOKENS[:3], more)[0]).abs().max() < BOUND
    for row in range(8):
        path = [row]
        while PARENTS[path[0]] >= 0:
            path.insert(0, PARENTS[path[0]])
        logits, _ = written_out(model, TOKENS[:20] + [nodes[i] for i in path], torch.cat((given, tree[path])))
        assert (output.logits[3 + row] - logits[-1]).abs().max() < BOUND
    head.commit(a, ())
    output = head.forward([Segment.chain(a, TOKENS[20:23])], features=more)
    logits, _ = written_out(model, TOKENS[:23], torch.cat((given, more)))
    assert (output.logits - logits[20:]).abs().max() < BOUND


def test_a_feature_matters() -> None:
    """The comparison would see the halves of the join exchanged."""
    model, head = open_head("mtp")
    given = features(30, 64)
    embedded = model.weights.tensor("model.embed_tokens.weight", torch.float32)[TOKENS]
    output = head.forward([Segment.chain(head.open(), TOKENS)], features=embedded)
    assert (output.logits - written_out(model, TOKENS, given)[0]).abs().max() > 100 * BOUND


@pytest.mark.parametrize("wrong", [None, torch.zeros(2, 64), torch.zeros(3, 32), torch.zeros(3, 64).double()])
def test_wrong_features(wrong: torch.Tensor | None) -> None:
    _, head = open_head("eagle3")
    seq = head.open()
    with pytest.raises(UsageError, match=r"^[^\n]*feature[^\n]*$"):
        head.forward([Segment.chain(seq, [1, 2, 3])], features=wrong)
    assert head.pending(seq) == 0


def test_features_for_a_plain_model() -> None:
    plain = TorchExecutor(random_model(), dtype="float32", kv_tokens=64)
    with pytest.raises(UsageError, match="fusion"):
        plain.forward([Segment.chain(plain.open(), [1])], features=features(1, 64))


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_over_its_targets_matrices(tied: bool) -> None:
    target_model = random_model("llama", seed=5, tie_embeddings=tied)
    target = TorchExecutor(target_model, dtype="float32", kv_tokens=64)
    lacking = head_model("eagle", without=("model.embed_tokens.weight", "lm_head.weight"))
    head = target.open_head(lacking, kv_tokens=128, max_context=100)
    assert (head.total_tokens, head.max_context, head.dtype) == (128, 100, torch.float32)
    assert head._model._head is target._model._head
    assert head._model._embedding is target._model._embedding
    w = {name: target_model.weights.tensor(name, torch.float32) for name in target_model.weights.names()}
    output = w["model.embed_tokens.weight" if tied else "lm_head.weight"]
    own = {name: lacking.weights.tensor(name, torch.float32) for name in lacking.weights.names()}
    own |= {"model.embed_tokens.weight": w["model.embed_tokens.weight"], "lm_head.weight": output}
    whole = Model("whole", lacking.config, type(lacking.weights)(own))  # type: ignore[call-arg]
    given = features(30, 64)
    logits = head.forward([Segment.chain(head.open(), TOKENS)], features=given).logits
    assert (logits - written_out(whole, TOKENS, given)[0]).abs().max() < BOUND
    assert target.forward([Segment.chain(target.open(), TOKENS[:9])]).logits.isfinite().all()


def test_a_head_of_another_target() -> None:
    target = TorchExecutor(random_model("llama", vocab_size=96), dtype="float32", kv_tokens=64)
    with pytest.raises(ConfigError, match=r"embed_tokens.weight.*\(96, 64\).*\(128, 64\)"):
        target.open_head(head_model("eagle", without=["model.embed_tokens.weight"]), kv_tokens=64, max_context=64)
    with pytest.raises(ConfigError, match=r"lm_head.weight.*\(96, 64\).*\(48, 64\)"):
        target.open_head(head_model("eagle3", without=["lm_head.weight"]), kv_tokens=64, max_context=64)


def test_dense() -> None:
    executor = TorchExecutor(random_model(), dtype="float32", kv_tokens=64)
    weight = features(40, 96, seed=7)
    dense = executor.dense(weight)
    x = features(9, 96, seed=8)
    assert dense(x).shape == (9, 40)
    assert (dense(x) - x @ weight.T).abs().max() < BOUND
    assert torch.equal(dense(x[2:3])[0], dense(x)[2])
    assert dense(x[:0]).shape == (0, 40)
    with pytest.raises(UsageError, match=r"\(9, 40\); \(rows, 96\)"):
        dense(x @ weight.T)


def test_the_cost_of_a_head_is_measured() -> None:
    _, head = open_head("eagle3")
    curve = head.measure_cost(rows=(1, 4), context=16, repeats=1)
    assert curve.rows == (1, 4)
    assert all(0 < seconds < 10 for seconds in curve.seconds)
    assert head.free_tokens == head.total_tokens
