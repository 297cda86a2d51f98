"""Cross-entropy in pieces: values and gradients of the plain formula."""

from __future__ import annotations

import pytest
import torch

from outrider.train import losses
from outrider.train.losses import Wanted, soft_cross_entropy


def problem(
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, Wanted, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, output = normal(50, 16).to(dtype).requires_grad_(), normal(40, 16).to(dtype).requires_grad_()
    wanted = Wanted.of_target(normal(30, 16), normal(40, 16), dtype)
    index = torch.randint(0, 30, (50,), generator=generator)
    return x, output, wanted, index, torch.rand(50, generator=generator)


@pytest.mark.parametrize(("block", "chunk"), [(2048, 256), (16, 8), (20, 7)])
def test_values_and_gradients(block: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_BLOCK", block)
    monkeypatch.setattr(losses, "_CHUNK", chunk)
    x, output, wanted, index, scale = problem()
    found = soft_cross_entropy(x, output, wanted, index, scale)
    (3 * found.total).backward()
    gradients = x.grad, output.grad
    x.grad = output.grad = None
    logits = x @ output.T
    entropy = -(wanted.probs[index] * logits.log_softmax(-1)).sum(-1)
    (3 * (entropy * scale).sum()).backward()
    torch.testing.assert_close(found.entropy, entropy.detach())
    torch.testing.assert_close(found.total, (entropy * scale).sum())
    torch.testing.assert_close(gradients, (x.grad, output.grad))
    assert found.hit.tolist() == (logits.argmax(-1) == wanted.probs[index].argmax(-1)).tolist()


def test_bfloat16_is_close() -> None:
    exact, rough = problem(), problem(torch.bfloat16)
    for x, output, wanted, index, scale in (exact, rough):
        soft_cross_entropy(x, output, wanted, index, scale).total.backward()
    for a, b in zip(exact[:2], rough[:2], strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert (a.grad - b.grad.float()).norm() < 0.03 * a.grad.norm()


def test_a_matrix_that_is_not_learned_gets_no_gradient() -> None:
    x, output, wanted, index, scale = problem()
    soft_cross_entropy(x, output.detach(), wanted, index, scale).total.backward()
    assert x.grad is not None
    assert output.grad is None


def test_no_rows() -> None:
    x, output, wanted, index, scale = problem()
    found = soft_cross_entropy(x[:0], output, wanted, index[:0], scale[:0])
    found.total.backward()
    assert found.total == 0
    assert output.grad is not None
    assert not output.grad.any()


def test_the_target_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    normed, output = torch.randn(300, 16, generator=generator), torch.randn(40, 16, generator=generator)
    wanted = Wanted.of_target(normed, output, torch.float32)
    torch.testing.assert_close(wanted.probs, (normed @ output.T).softmax(-1))
    assert wanted.likeliest.tolist() == (normed @ output.T).argmax(-1).tolist()
