"""Whether two models share a vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from outrider.core.errors import VocabularyMismatchError
from outrider.drafters.vocabulary import check_vocabulary, fit_logits
from outrider.models.loader import Model
from tests.support.fakes import fake_model


@dataclass
class ListTokenizer:
    """As much of a tokenizer as the check looks at."""

    tokens: list[str]
    merges: str = ""

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    @property
    def fingerprint(self) -> str:
        return self.merges + "|".join(self.tokens)

    def token_bytes(self, token: int) -> bytes:
        """None for an unused id, which is written as a dot, and for one beyond the end."""
        return self.tokens[token].replace(".", "").encode() if token < len(self.tokens) else b""


def _model(name: str, tokens: str | None, columns: int) -> Model:
    model = fake_model(name, tokenizer=False, vocab_size=columns)
    return Model(name, model.config, model.weights, ListTokenizer(list(tokens)) if tokens else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        (("abcd", 4), ("abcd", 4)),
        (("abcd", 8), ("abcd", 4)),
        (("abcd", 4), ("abcd", 8)),
        (("abcd", 4), ("abcdef", 6)),
        (("ab.d", 4), ("abxd", 4)),
        (("ab.d", 4), ("ab.d!", 5)),
        ((None, 4), (None, 4)),
    ],
)
def test_these_go_together(target: tuple[str | None, int], draft: tuple[str | None, int]) -> None:
    check_vocabulary(_model("target", *target), _model("draft", *draft))


@pytest.mark.parametrize(
    ("target", "draft", "problem"),
    [
        (("abcd", 4), ("abxd", 4), "token 2 is b'x' instead of b'c'"),
        (("abcd", 8), ("abc", 8), "it lacks token 3, b'd'"),
        (("abcd", 4), ("ab.de", 5), "it lacks token 2, b'c'"),
        (("abcd", 8), ("abc", 3), "it has 3 tokens instead of 4"),
        ((None, 4), (None, 5), "it has 5 tokens instead of 4"),
        (("abcd", 4), (None, 5), "it has 5 tokens instead of 4"),
    ],
)
def test_these_do_not(target: tuple[str | None, int], draft: tuple[str | None, int], problem: str) -> None:
    with pytest.raises(VocabularyMismatchError) as caught:
        check_vocabulary(_model("big", *target), _model("small", *draft))
    assert str(caught.value) == (
        f"draft model 'small' does not share the vocabulary of 'big': {problem}; "
        "choose a draft model of the target's own family"
    )


def test_logits_are_cut_or_padded() -> None:
    logits = torch.arange(6.0).reshape(2, 3)
    assert fit_logits(logits, 3).equal(logits)
    assert fit_logits(logits, 2).tolist() == [[0.0, 1.0], [3.0, 4.0]]
    assert fit_logits(logits, 4).tolist() == [[0.0, 1.0, 2.0, -math.inf], [3.0, 4.0, 5.0, -math.inf]]
