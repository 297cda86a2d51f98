"""The public functions of tensors: the same rules as the engine's, checked input, and ragged batches."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

import outrider.acceptance as acceptance
from outrider.acceptance import RULES, VerifyResult, block_verify, coupled_verify, rejection_sample, typical_accept
from outrider.core.config import SpeculativeConfig
from outrider.core.errors import UsageError
from outrider.core.noise import Stream, uniform
from outrider.core.sampling import SamplingParams
from tests.unit.acceptance.problems import Problem, random_problem

Tensor = torch.Tensor


def ids(problem: Problem) -> Tensor:
    return torch.tensor([list(problem.tree.tokens)], dtype=torch.long)


def parents(problem: Problem) -> Tensor:
    return torch.tensor([list(problem.tree.parents)], dtype=torch.long)


def same(result: VerifyResult, row: int, path: tuple[int, ...], tokens: list[int]) -> None:
    accepted = len(path)
    assert int(result.accepted[row]) == accepted
    assert int(result.next_token[row]) == tokens[-1]
    assert result.path[row].tolist() == [*path, *[-1] * (result.path.shape[1] - accepted)]
    assert result.tokens[row].tolist() == [*tokens, *[-1] * (result.tokens.shape[1] - accepted - 1)]


class TestAgreesWithTheEngine:
    """With the engine's own uniforms, a function says what the rule of that name says."""

    @staticmethod
    def verdict(name: str, problem: Problem) -> tuple[tuple[int, ...], list[int]]:
        rule = RULES.get(name)(SpeculativeConfig(acceptance=name, allow_lossy=True))
        verdict = rule.accept([problem.candidate])[0]
        return verdict.path, [*(problem.tree.tokens[i] for i in verdict.path), verdict.token]

    @pytest.mark.parametrize("drawn", [True, False])
    @pytest.mark.parametrize("width", [1, 3])
    def test_rejection(self, width: int, drawn: bool) -> None:
        for seed in range(60):
            problem = random_problem(seed, drawn=drawn, width=width)
            path, tokens = self.verdict("rejection", problem)
            tree, sampling = problem.tree, problem.candidate.sampling
            siblings = [tree.children()[parent].index(node) for node, parent in enumerate(tree.parents)]
            u = [
                float(uniform(sampling.seed, sampling.position + depth - 1, place, Stream.ACCEPT))
                for depth, place in zip(tree.depths(), siblings, strict=True)
            ]
            last = float(uniform(sampling.seed, sampling.position + len(path), 0, Stream.RESAMPLE))
            result = rejection_sample(
                ids(problem),
                problem.draft_probs(),
                problem.target_probs(),
                parents=parents(problem),
                uniforms=torch.tensor([u], dtype=torch.float64),
                resample_uniforms=torch.tensor([last], dtype=torch.float64),
            )
            same(result, 0, path, tokens)

    @pytest.mark.parametrize("drawn", [True, False])
    def test_block(self, drawn: bool) -> None:
        for seed in range(100):
            problem = random_problem(seed, drawn=drawn, depth=4)
            path, tokens = self.verdict("block", problem)
            sampling = problem.candidate.sampling
            result = block_verify(
                ids(problem),
                problem.draft_probs(),
                problem.target_probs(),
                uniforms=torch.from_numpy(uniform(sampling.seed, sampling.position, [range(4)], Stream.ACCEPT)),
                resample_uniforms=torch.from_numpy(uniform(sampling.seed, sampling.position, [0], Stream.RESAMPLE)),
            )
            same(result, 0, path, tokens)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("width", [1, 3])
    def test_coupled(self, width: int, temperature: float) -> None:
        for seed in range(60):
            params = SamplingParams(temperature=temperature, seed=seed)
            problem = random_problem(seed, width=width, stream=Stream.TARGET, params=params)
            path, tokens = self.verdict("coupled", problem)
            rows = problem.candidate.logits.unsqueeze(0)
            key = {"seeds": [seed], "positions": [problem.candidate.sampling.position]} if temperature else {}
            same(coupled_verify(ids(problem), rows, parents=parents(problem), **key), 0, path, tokens)

    @pytest.mark.parametrize("width", [1, 3])
    def test_typical(self, width: int) -> None:
        for seed in range(60):
            problem = random_problem(seed, width=width)
            path, tokens = self.verdict("typical", problem)
            probs = problem.target_probs()
            cumulative = probs[0, path[-1] + 1 if path else 0].cumsum(0)
            u = cumulative[tokens[-1]] - probs[0, path[-1] + 1 if path else 0][tokens[-1]] / 2
            result = typical_accept(ids(problem), probs, parents=parents(problem), resample_uniforms=u.unsqueeze(0))
            same(result, 0, path, tokens)


class TestBatches:
    """Sequences of one call have nothing to do with each other."""

    def batch(self, count: int = 30, size: int = 4, vocab: int = 6) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, dtype=torch.float64, generator=generator)

        return {
            "draft_ids": torch.randint(vocab, (count, size), generator=generator),
            "draft_probs": torch.softmax(4 * rand(count, size, vocab), -1),
            "target_probs": torch.softmax(4 * rand(count, size + 1, vocab), -1),
            "lengths": torch.arange(count) % (size + 1),
            "uniforms": rand(count, size),
            "resample_uniforms": rand(count),
        }

    @pytest.mark.parametrize("function", [rejection_sample, block_verify])
    @pytest.mark.parametrize("drawn", [True, False])
    def test_each_sequence_is_judged_alone(self, function: object, drawn: bool) -> None:
        batch = self.batch()
        if not drawn:
            batch["draft_probs"] = None  # type: ignore[assignment]
            batch["draft_ids"] = batch["target_probs"][:, :-1].argmax(-1)
        whole = function(**batch)  # type: ignore[operator]
        assert len(set(whole.accepted.tolist())) > 2
        for i, length in enumerate(batch["lengths"].tolist()):
            alone = {k: v if v is None else v[i : i + 1] for k, v in batch.items() if k != "lengths"}
            for name in ("draft_ids", "draft_probs", "uniforms"):
                alone[name] = None if alone[name] is None else alone[name][:, :length]
            alone["target_probs"] = alone["target_probs"][:, : length + 1]
            single = function(**alone)  # type: ignore[operator]
            accepted = int(single.accepted)
            assert accepted <= length
            same(whole, i, tuple(range(accepted)), single.tokens[0, : accepted + 1].tolist())

    @pytest.mark.parametrize("function", [rejection_sample, block_verify])
    def test_what_lies_beyond_a_length_is_never_read(self, function: object) -> None:
        batch = self.batch()
        expected = function(**batch)  # type: ignore[operator]
        for i, length in enumerate(batch["lengths"].tolist()):
            batch["draft_ids"][i, length:] = -7
            batch["draft_probs"][i, length:] = math.nan
            batch["target_probs"][i, length + 1 :] = math.nan
        result = function(**batch)  # type: ignore[operator]
        for name in ("accepted", "tokens", "next_token", "path"):
            assert torch.equal(getattr(result, name), getattr(expected, name))

    def test_coupled_and_typical_are_ragged_too(self) -> None:
        batch = self.batch()
        greedy = coupled_verify(batch["draft_ids"], batch["target_probs"].log(), lengths=batch["lengths"])
        typical = typical_accept(batch["draft_ids"], batch["target_probs"], lengths=batch["lengths"])
        assert bool((greedy.accepted <= batch["lengths"]).all())
        assert bool((typical.accepted <= batch["lengths"]).all())
        assert int(typical.accepted.max()) > 1

    def test_nothing_drafted(self) -> None:
        probs = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
        none = torch.zeros(2, 0, dtype=torch.long)
        for result in (
            rejection_sample(none, None, probs),
            block_verify(none, torch.zeros(2, 0, 2), probs),
            coupled_verify(none, probs.log()),
            typical_accept(none, probs),
        ):
            assert result.tokens.tolist() == [[1], [0]]
            assert result.path.shape == (2, 0)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
    def test_any_float_type(self, dtype: torch.dtype) -> None:
        batch = self.batch()
        batch["draft_probs"], batch["target_probs"] = batch["draft_probs"].to(dtype), batch["target_probs"].to(dtype)
        assert rejection_sample(**batch).next_token.dtype == torch.long

    def test_the_inputs_are_left_alone_and_a_generator_repeats(self) -> None:
        batch = self.batch()
        del batch["uniforms"], batch["resample_uniforms"]
        before = {name: value.clone() for name, value in batch.items()}
        results = [rejection_sample(**batch, generator=torch.Generator().manual_seed(4)) for _ in range(2)]
        assert torch.equal(results[0].tokens, results[1].tokens)
        assert all(torch.equal(batch[name], before[name]) for name in batch)


def test_worked_example() -> None:
    """q = (0.2, 0.8), p = (0.6, 0.4), draft B, u = 0.7: rejected, and A comes out."""
    q, p = torch.tensor([[[0.2, 0.8]]]), torch.tensor([[[0.6, 0.4], [0.5, 0.5]]])
    for function in (rejection_sample, block_verify):
        for u, tokens in ((0.7, [0, -1]), (0.3, [1, 1])):
            result = function(
                torch.tensor([[1]]), q, p, uniforms=torch.tensor([[u]]), resample_uniforms=torch.tensor([0.9])
            )
            assert result.tokens.tolist() == [tokens]


def test_shared_noise_by_depth() -> None:
    """Noise is looked up by depth, so that branches of one depth share it."""
    rows = torch.zeros(1, 4, 3)
    noise = torch.tensor([[[0, 1, 0], [0, 0, 1], [1, 0, 0]]])
    result = coupled_verify(torch.tensor([[0, 1, 2]]), rows, gumbel=noise, parents=torch.tensor([-1, -1, 1]))
    same(result, 0, (1, 2), [1, 2, 0])


PROBS = torch.full((2, 3, 4), 0.25)
IDS = torch.zeros(2, 2, dtype=torch.long)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_ids": IDS[0]}, r"draft_ids must be integers \[N, n\]"),
        ({"draft_ids": IDS.double()}, "draft_ids must be integers"),
        ({"draft_ids": IDS + 4}, "outside the vocabulary of 4"),
        ({"draft_ids": IDS - 1}, "outside the vocabulary of 4"),
        ({"target_probs": PROBS[:, :2]}, r"must be floats \[2, 3, V\]"),
        ({"target_probs": PROBS.long()}, "must be floats"),
        ({"target_probs": PROBS * 2}, r"target_probs\[0, 0\] is no distribution"),
        ({"target_probs": PROBS * math.nan}, "is no distribution"),
        ({"target_probs": torch.tensor([1.5, -0.5, 0, 0]).expand(2, 3, 4)}, "is no distribution"),
        ({"draft_probs": PROBS}, r"draft_probs must have the shape \[2, 2, 4\]"),
        ({"draft_probs": PROBS[:, :2] * 0}, "draft_probs.* is no distribution"),
        ({"draft_probs": PROBS[:, :2].long()}, "draft_probs must hold floats"),
        ({"lengths": torch.tensor([1])}, r"lengths must have the shape \[2\]"),
        ({"lengths": torch.tensor([1, 3])}, "between 0 and 2"),
        ({"uniforms": torch.zeros(2, 3)}, r"uniforms must have the shape \[2, 2\]"),
        ({"uniforms": torch.ones(2, 2)}, r"uniforms must lie in \[0, 1\)"),
        ({"resample_uniforms": torch.tensor([0.5, math.nan])}, r"resample_uniforms must lie in \[0, 1\)"),
        ({"parents": torch.tensor([-1, 1])}, "number of an earlier node"),
        ({"parents": torch.tensor([-2, 0])}, "number of an earlier node"),
        ({"parents": torch.tensor([-1])}, r"parents must be integers \[2\] or \[2, 2\]"),
    ],
)
def test_misfits_are_named(change: dict, message: str) -> None:
    arguments = {"draft_ids": IDS, "draft_probs": PROBS[:, :2], "target_probs": PROBS} | change
    with pytest.raises(UsageError, match=message):
        rejection_sample(**arguments)
    if "parents" not in change:
        with pytest.raises(UsageError, match=message):
            block_verify(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [1, 2]}, "give seeds and positions, or gumbel, or neither"),
        ({"positions": [1, 2]}, "give seeds and positions"),
        ({"seeds": [1, 2], "positions": [1, 2], "gumbel": PROBS}, "give seeds and positions"),
        ({"seeds": [1], "positions": [1, 2]}, "give 2 seeds and positions"),
        ({"gumbel": PROBS[:, :, :3]}, "gumbel must have the shape"),
        ({"gumbel": PROBS[:, :2]}, "with D of at least 3"),
        ({"target_logprobs": PROBS * math.nan}, "holds NaN"),
        ({"target_logprobs": PROBS * math.inf}, "holds NaN or"),
        ({"target_logprobs": -PROBS * math.inf}, "rules every token out"),
        ({"target_logprobs": PROBS.double(), "seeds": [1, 2], "positions": [1, 2]}, "must be float32 on the CPU"),
    ],
)
def test_misfits_of_coupled_are_named(change: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        coupled_verify(**({"draft_ids": IDS, "target_logprobs": PROBS.log()} | change))


def test_misfits_of_typical_are_named() -> None:
    with pytest.raises(UsageError, match=r"posterior_alpha=1.5 must be between 0 and 1"):
        typical_accept(IDS, PROBS, posterior_alpha=1.5)


def test_importing_the_package_is_cheap() -> None:
    program = "import sys, outrider.acceptance; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'verify'"):
        acceptance.verify  # noqa: B018
    assert all(hasattr(acceptance, name) for name in acceptance.__all__)
