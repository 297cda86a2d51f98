"""Regular expressions: what is let through is kept to, and what would not be is refused."""

from __future__ import annotations

import string

import pytest

from outrider.core.errors import SamplingParamsError
from outrider.core.structured import StructuredOutputs
from outrider.grammar import source
from tests.unit.grammar.test_schema import compiler, fits

KEPT = [
    ("^a|b$", ["a", "b"], ["ab"]),
    (r"^[$^\]]\^\$$", ["$^$", "]^$"], ["a^$"]),
    (r"\d\w\s", ["1a "], ["a1 "]),
    ("a{2,3}", ["aa"], ["a", "aaaa"]),
]
REFUSED = [
    ("a$b", r"\$ at position 1"),
    ("a^b", r"\^ at position 1"),
    ("x(^a)", r"\^ at position 2"),
    (r"\Aa", r"escape \\A at position 0"),
    (r"[\]^\p]", r"escape \\p"),
]


@pytest.mark.parametrize(("expression", "good", "bad"), KEPT)
def test_what_is_let_through_is_kept_to(expression: str, good: list[str], bad: list[str]) -> None:
    compiled = compiler().compile_grammar(source.grammar_of(StructuredOutputs(regex=expression)))
    assert all(fits(compiled, text) for text in good)
    assert not any(fits(compiled, text) for text in bad)


@pytest.mark.parametrize(("expression", "message"), REFUSED)
def test_what_would_not_be_kept_to_is_refused(expression: str, message: str) -> None:
    with pytest.raises(SamplingParamsError, match=message):
        source.grammar_of(StructuredOutputs(regex=expression))


@pytest.mark.parametrize("form", ["\\%s", "[\\%s]"])
def test_no_unknown_escape_is_taken_for_its_letter(form: str) -> None:
    for letter in string.ascii_letters + string.digits:
        try:
            grammar = source.grammar_of(StructuredOutputs(regex=form % letter))
        except (SamplingParamsError, RuntimeError):
            continue
        assert letter in "wDS" or not fits(compiler().compile_grammar(grammar), letter), letter
