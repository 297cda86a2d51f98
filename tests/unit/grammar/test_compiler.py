"""Compiling: once, bounded, from any thread; and what cannot be used is refused in one line."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from outrider.core.errors import ConfigError, SamplingParamsError
from outrider.core.sampling import SamplingParams
from outrider.core.structured import StructuredOutputs
from outrider.grammar import compiler as compiler_module
from outrider.grammar import mask_for, prepare, source
from outrider.grammar.compiler import Compiler, compiler_for
from outrider.grammar.vocabulary import Vocabulary
from tests.support.fakes import fake_model
from tests.support.grammars import CHOICE, MODEL, REGEX, allowed, constrained_model, mask

BAD = [
    ({"regex": "[a-z"}, "regex cannot be used: .*Unclosed"),
    ({"regex": "(a"}, "parenthesis is not closed"),
    ({"regex": "(?=a)b"}, "Lookahead is not supported"),
    ({"regex": r"(a)\1"}, "Backreference is not supported"),
    ({"grammar": "root ::= foo"}, 'grammar cannot be used: .*"foo" is not defined'),
    ({"grammar": 'other ::= "a"'}, "root rule"),
    ({"json": {"type": "foo"}}, "json cannot be used: .*Unsupported type"),
    ({"json": {"$ref": "#/nowhere"}}, "json cannot be used"),
    ({"json": False}, "cannot accept any value"),
    ({"json": {"type": "object", "properties": 3}}, "json cannot be used"),
    ({"structural_tag": {"type": "structural_tag"}}, "structural_tag cannot be used"),
    ({"structural_tag": {"type": "structural_tag", "format": {"type": "zzz"}}}, "not recognized"),
]


@pytest.mark.parametrize(("values", "message"), BAD)
def test_what_cannot_be_used_is_refused_in_one_line(values: dict[str, object], message: str) -> None:
    for _ in range(2):  # a failure is not kept
        with pytest.raises(SamplingParamsError, match=message) as caught:
            compiler_for(MODEL).compile(StructuredOutputs.from_dict(values))
        assert "\n" not in str(caught.value)
        assert "/cpp/" not in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("text", ["(" * 30_000 + ")" * 30_000, "[" * 30_000, "a" + "?" * 30_000, "(a{1,900}){1,900}"])
def test_a_pathological_expression_does_no_harm(text: str) -> None:
    with suppress(SamplingParamsError):
        compiler_for(MODEL).compile(StructuredOutputs(regex=text))


def test_a_grammar_without_end_does_no_harm() -> None:
    for text in ('root ::= "a" root', 'root ::= root "a" | "b"', "root ::= root", 'root ::= ("a"?)*'):
        allowed(mask(StructuredOutputs(grammar=text)))


def test_choices_are_taken_literally() -> None:
    texts = ['a "b"', "c\\d", "e\nf", "[x]", "日本 🎉", "\x01\x7f"]
    grammar = source.grammar_of(StructuredOutputs(choice=texts))
    import xgrammar

    info = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(256)] + [b""], stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(grammar)
    for text in texts:
        matcher = xgrammar.GrammarMatcher(compiled)
        assert matcher.accept_string(text)
        assert matcher.is_completed()
    assert not xgrammar.GrammarMatcher(compiled).accept_string("x")


class Counting(Compiler):
    compiled = 0

    def _compile(self, spec: StructuredOutputs) -> object:
        self.compiled += 1
        return super()._compile(spec)


def test_each_specification_is_compiled_once() -> None:
    own = Counting(Vocabulary(MODEL))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(own.compile, [REGEX, CHOICE] * 20))
    assert own.compiled == 2
    assert len({id(compiled) for compiled in found}) == 2


def test_tenants_do_not_share_what_is_compiled() -> None:
    own = Counting(Vocabulary(MODEL))
    first, again, other = (own.compile(REGEX, tenant) for tenant in "aab")
    assert own.compiled == 2
    assert first is again is not other


@pytest.mark.parametrize(("bound", "value"), [("MOST_ENTRIES", 6), ("MOST_BYTES", 20000)])
def test_an_owner_cannot_push_out_what_others_compiled(monkeypatch: pytest.MonkeyPatch, bound: str, value: int) -> None:
    monkeypatch.setattr(compiler_module, bound, value)
    own = Counting(Vocabulary(MODEL))
    own.compile(CHOICE, "b/")
    for number in range(20):
        own.compile(StructuredOutputs(regex=f"a{{{number + 1}}}"), f"a/{number}")
    assert own.compiled == 21
    own.compile(CHOICE, "b/")
    assert own.compiled == 21
    own.compile(StructuredOutputs(regex="a{1}"), "a/0")
    assert own.compiled == 22


@pytest.mark.parametrize(("bound", "value"), [("MOST_ENTRIES", 3), ("MOST_BYTES", 2000)])
def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch, bound: str, value: int) -> None:
    monkeypatch.setattr(compiler_module, bound, value)
    own = Counting(Vocabulary(MODEL))
    specs = [StructuredOutputs(regex=f"a{{{number}}}") for number in range(1, 9)]
    for spec in specs:
        own.compile(spec)
    sizes = [future.result().memory_size_bytes for future in own._known.values()]
    assert 1 <= len(sizes) <= 3
    assert (len(own._order), own._order.weight) == (len(sizes), sum(sizes))
    own.compile(specs[-1])
    assert own.compiled == 8
    own.compile(specs[0])
    assert own.compiled == 9


def test_models_without_text_or_end_are_refused() -> None:
    params = SamplingParams(structured_outputs=CHOICE)
    with pytest.raises(SamplingParamsError, match="needs a tokenizer"):
        mask_for(fake_model(tokenizer=False), params)
    with pytest.raises(SamplingParamsError, match="needs an end-of-sequence token"):
        mask_for(constrained_model(eos_token_ids=()), params)


def test_without_a_constraint_nothing_is_compiled() -> None:
    assert mask_for(fake_model(tokenizer=False), SamplingParams()) is None
    prepare(fake_model(tokenizer=False), SamplingParams())


def test_xgrammar_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"needs xgrammar .*pip install 'outrider\[grammar\]'"):
        mask_for(constrained_model(), SamplingParams(structured_outputs=CHOICE))
