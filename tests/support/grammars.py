"""A fake model whose text can be constrained, and grammars that leave its tiny vocabulary something to choose."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.structured import StructuredOutputs
from outrider.grammar.compiler import Compiler, compiler_for
from outrider.grammar.matcher import GrammarMask
from outrider.models.loader import Model
from tests.support.fakes import EOS, VOCAB, WORDS, WordTokenizer, fake_model


class WordBytes:
    """Bytes of each token of `WordTokenizer`."""

    def __init__(self, *, strips_space: bool = False) -> None:
        self.strips_space = strips_space

    def __call__(self, token: int) -> bytes:
        return WORDS[token].encode()


class BytesTokenizer(WordTokenizer):
    """`WordTokenizer` with what a grammar needs to know of it."""

    special_ids = frozenset({0, 1, EOS})

    def __init__(self, *, strips_space: bool = False) -> None:
        self.token_bytes = WordBytes(strips_space=strips_space)


def constrained_model(name: str = "target", *, strips_space: bool = False, **changes: object) -> Model:
    """Keep the model: its compiled grammars live as long as its tokenizer."""
    model = fake_model(name, **changes)
    return Model(model.name, model.config, model.weights, BytesTokenizer(strips_space=strips_space))  # type: ignore[arg-type]


MODEL = constrained_model()
REGEX = StructuredOutputs(regex=r"((abc|b[a-f]+|c)[ .]){3,9}(yes|no)!")
NESTED = StructuredOutputs(grammar='root ::= "x" inner "x"\ninner ::= "a" inner "b" | "c" inner "d" | [e-m]+')
CHOICE = StructuredOutputs(choice=["yes", "yes and no", "no", "none of them"])


def compiler() -> Compiler:
    return compiler_for(MODEL)


def mask(spec: StructuredOutputs, stop_token_ids: Sequence[int] = ()) -> GrammarMask:
    return GrammarMask(compiler().compile(spec), compiler().vocabulary, stop_token_ids)


def allowed(own: GrammarMask, path: Sequence[int] = ()) -> set[str] | None:
    """The tokens that may follow ``path``, spelled out; None: all."""
    forbidden = own.forbidden(path)
    return None if forbidden is None else {WORDS[i] for i in range(VOCAB) if not forbidden[i]}


def ids(text: str) -> list[int]:
    return [WORDS.index(character) for character in text]
