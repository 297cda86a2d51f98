"""Drafters that feed their own output back: eagle, eagle3 and mtp, trained by what they will meet (training-time test).

Step 0 of every row is on the target's feature. Each further step goes on from there as drafting does: it takes in the
next token and the row's own last output in the place of a feature, at the next position, and sees the true rows up to
its base and its own earlier steps (EAGLE-3, Li et al., 2025). A chain ends where drafting must: at a token outside the
draft vocabulary, and at the end of what is to be learned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F

from outrider.core.errors import HeadMismatchError
from outrider.executors.torch.rope import RotaryTable, rotate
from outrider.heads.head import Head
from outrider.models.config import EMBEDDING, OUTPUT, ModelConfig
from outrider.train.batches import Batch
from outrider.train.losses import CrossEntropy, soft_cross_entropy
from outrider.train.modules.attention import attend
from outrider.train.modules.base import DrafterModule, Outcome, Tally, tally_of
from outrider.train.modules.layers import Attention, Block, Core, Product, ScaledLinear
from outrider.train.modules.regression import Regression
from outrider.train.modules.shape import Goal
from outrider.train.modules.target import Target


@dataclass(frozen=True)
class Step:
    """Chains that are alive at one draft position. bases: [R] int64, rows they began at, ascending.

    rows: [R] int64, rows whose labels they guess now. state: [R, H] float32, output of the block.
    """

    bases: torch.Tensor
    rows: torch.Tensor
    state: torch.Tensor


@dataclass(frozen=True)
class _Weights:
    """Matrices in the dtype of products. token, feature: the parts of the joining matrix; qkv: None for "attend"."""

    token: Product
    feature: Product
    qkv: Product | None
    o: Product
    gate_up: Product
    down: Product


class ChainModule(DrafterModule):
    """One block behind a fusion, as `ModelConfig.fusion` has it; the arithmetic is that of the executors."""

    config: ModelConfig
    is_new = False
    """Whether nothing was learned yet."""

    def __init__(
        self,
        target: Target,
        config: ModelConfig,
        feature_layers: tuple[int, ...],
        draft_ids: torch.Tensor | None,
        own_output: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(target, draft_ids, own_output, dtype)
        assert config.fusion is not None
        self.config, self.feature_layers = config, feature_layers
        self.attends = config.fusion.kind == "attend"
        self.model = Core(config)
        if len(feature_layers) > 1:
            size = config.hidden_size
            self.features = ScaledLinear(len(feature_layers) * size, size, bias=False)
        self._rotary = RotaryTable(config, config.max_position, torch.device("cpu"))

    @property
    def block(self) -> Block:
        block = self.model.layers[0]
        assert isinstance(block, Block)
        return block

    @classmethod
    def from_head(cls, head: Head, target: Target, dtype: torch.dtype) -> Self:
        head.check_fits(target.config, target.name)
        head.check_tensors()
        where = head.source or head.method
        config = head.config
        if head.method != cls.method or config is None:
            raise HeadMismatchError(f"{where}: a drafter of the method {head.method}, not {cls.method}")
        if config.num_layers != 1 or config.no_rope_layers or config.sliding_window is not None:
            raise HeadMismatchError(f"{where}: only drafters of one block, rotary and without a window, can be trained")
        tensors = dict(head.tensors)
        embedding = tensors.pop(EMBEDDING, target.embedding)
        if not torch.equal(embedding.to(target.embedding.dtype), target.embedding):
            raise HeadMismatchError(f"{where}: it has an embedding of its own, which training would not keep")
        module = cls(target, config, head.feature_layers, head.draft_ids, OUTPUT in tensors, dtype)
        module.normed = head.normed
        module.load(tensors)
        return module

    @torch.no_grad()
    def prepare(self, batches: Iterable[Batch]) -> None:
        """A new drafter starts as the linear guess at the target's next state that fits these batches best."""
        size = self.config.hidden_size
        width = (1 + (len(self.feature_layers) if self.attends else 1)) * size
        regression = Regression(width, size)
        inputs = torch.empty(0, width)
        for batch in batches:
            rows = (batch.positions > 0).nonzero().squeeze(1)  # a text's first state is an outlier
            token = self._norm_token(self.target.embedding[batch.tokens[rows]].float())
            seen = batch.features[rows].float()
            if self.attends:
                inputs = torch.cat((seen, token), dim=-1)
            else:
                inputs = torch.cat((token, self._norm_feature(self.joined_features(seen))), dim=-1)
            if self.is_new:
                regression.add(inputs, self.next_state(batch)[rows])
        if regression.is_determined:
            self.start(regression.solve(), token)
        if self.attends and len(self.feature_layers) > 1:
            self.features.measure(inputs[:, :-size])
        if not self.attends:
            self.model.fuse.measure(inputs)

    def next_state(self, batch: Batch) -> torch.Tensor:
        """What a row's state after the block is to be like, [N, H] float32."""
        return batch.final.float()

    def start(self, matrix: torch.Tensor, embeddings: torch.Tensor) -> None:
        """Start as a linear guess. matrix: [H, inputs], inputs in the order in which they are joined, for "attend" the
        target's states and the normed embedding. embeddings: [N, H], some that are normed as the drafter has them.
        """
        self.model.fuse.stand_for(matrix)

    # -- forward ------------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, goal: Goal) -> Outcome:
        known = self.places[batch.labels] >= 0
        steps = list(self.steps(batch, batch.learned & known, goal.steps))
        states = torch.cat([step.state for step in steps])
        scale = torch.cat([torch.full((len(s.rows),), goal.decay**k) for k, s in enumerate(steps)])
        scale /= max(len(steps[0].rows), 1)
        rows = torch.cat([step.rows for step in steps])
        measured = soft_cross_entropy(
            self.outgoing(states).to(self.dtype), self.output(), self.wanted(batch), rows, scale
        )
        loss = measured.total + self.extra_loss(batch, states, rows, scale)
        return Outcome(loss, _tally(batch, steps, measured))

    def extra_loss(
        self, batch: Batch, states: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor | float:
        """What a method asks for besides. states: [R, H], outputs at ``rows``; scale: [R], their weights."""
        return 0.0

    def outgoing(self, states: torch.Tensor) -> torch.Tensor:
        """States after the block -> what the output matrix reads."""
        return self.model.norm(states) if self.config.final_norm else states

    def joined_features(self, features: torch.Tensor) -> torch.Tensor:
        """The target's states [N, layers * H] -> the features of rows, [N, H] float32."""
        if len(self.feature_layers) > 1:
            return Product.of(self.dtype, self.features)(features).float()
        return self.target.normed(features) if self.normed else features.float()

    def steps(self, batch: Batch, wanted: torch.Tensor, count: int) -> Iterator[Step]:
        """Draft positions 0 … count - 1, as long as any chain is alive. wanted: [N] bool, rows that may be guessed."""
        w = self._weights()
        c = self.config
        token_part = w.token(self._norm_token(self.target.embedding[batch.tokens]))
        features = self.joined_features(batch.features)
        residual, qkv = self._first(token_part, features, w)
        queries, keys, values = self._rotated(qkv, batch.positions)
        group = c.num_heads // c.num_kv_heads
        true_keys, true_values = (
            batch.grid.spread(x, batch.grid.slots).repeat_interleave(group, dim=1) for x in (keys, values)
        )
        bases = rows = wanted.nonzero().squeeze(1)
        queries, residual = queries[bases], residual[bases]
        own_keys, own_values = (x.new_empty(len(bases), 0, *x.shape[1:]) for x in (keys, values))
        for step in range(count):
            slots = batch.grid.slots[bases]
            attended = attend(queries, true_keys, true_values, own_keys, own_values, batch.grid, slots)
            state = self._finish(residual, attended, w)
            yield Step(bases, rows, state)
            alive = _alive(batch, bases, wanted, step + 1)
            if step + 1 == count or not len(alive):
                return
            bases = bases[alive]
            rows = bases + step + 1
            features = state[alive]
            residual, qkv = self._first(token_part[rows], features, w)
            queries, key, value = self._rotated(qkv, batch.positions[rows])
            own_keys = torch.cat((own_keys[alive], key.unsqueeze(1)), dim=1)
            own_values = torch.cat((own_values[alive], value.unsqueeze(1)), dim=1)

    def _weights(self) -> _Weights:
        a: Attention = self.block.self_attn
        mlp, size = self.block.mlp, self.config.hidden_size
        qkv = Product.of(self.dtype, a.q_proj, a.k_proj, a.v_proj)
        token, feature = (qkv if self.attends else Product.of(self.dtype, self.model.fuse)).split(size)
        return _Weights(
            token=token,
            feature=feature,
            qkv=None if self.attends else qkv,
            o=Product.of(self.dtype, a.o_proj),
            gate_up=Product.of(self.dtype, mlp.gate_proj, mlp.up_proj),
            down=Product.of(self.dtype, mlp.down_proj),
        )

    def _norm_token(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.embed_norm(x) if hasattr(self.model, "embed_norm") else x

    def _norm_feature(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.feature_norm(x) if hasattr(self.model, "feature_norm") else x

    def _first(self, tokens: torch.Tensor, features: torch.Tensor, w: _Weights) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream before the block [R, H] float32, and q, k and v. tokens: what they add to the joined."""
        normed = self._norm_feature(features)
        joined = tokens + w.feature(normed)
        if w.qkv is None:
            fusion = self.config.fusion
            return normed if fusion is not None and fusion.norm_before_residual else features, joined
        x = joined.float()
        return x, w.qkv(self.block.input_layernorm(x) if self.config.first_norm else x)

    def _rotated(self, qkv: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [R, heads, d], keys and values [R, kv_heads, d], in the dtype of products."""
        c = self.config
        heads = qkv.view(len(qkv), -1, c.head_dim)
        q, k, v = heads.tensor_split((c.num_heads, c.num_heads + c.num_kv_heads), dim=1)
        if c.qk_norm:
            q, k = self.block.self_attn.q_norm(q), self.block.self_attn.k_norm(k)
        cos, sin = self._rotary.at(positions)
        return rotate(q.float(), cos, sin).to(qkv.dtype), rotate(k.float(), cos, sin).to(qkv.dtype), v

    def _finish(self, residual: torch.Tensor, attended: torch.Tensor, w: _Weights) -> torch.Tensor:
        x = residual + w.o(attended.flatten(1))
        gate, up = w.gate_up(self.block.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + w.down(F.silu(gate) * up)


def _alive(batch: Batch, bases: torch.Tensor, wanted: torch.Tensor, step: int) -> torch.Tensor:
    """Which of the chains ``bases`` go on to draft position ``step``, as ascending numbers among them."""
    inside = batch.left[bases] >= step
    return (inside & wanted[(bases + step).clamp_(max=len(batch) - 1)]).nonzero().squeeze(1)


def _tally(batch: Batch, steps: Sequence[Step], measured: CrossEntropy) -> Tally:
    sizes = [len(step.rows) for step in steps]
    asked = [int(batch.learned.sum())]
    for number, step in enumerate(steps[:-1], start=1):
        asked.append(len(_alive(batch, step.bases, batch.learned, number)))
    by_step = zip(torch.split(measured.entropy, sizes), torch.split(measured.hit, sizes), strict=True)
    return tally_of([CrossEntropy(measured.total, entropy, hit) for entropy, hit in by_step], sizes, asked)
