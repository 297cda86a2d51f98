"""Repetitions that divide a text in too many ways are refused; ordinary expressions, grammars and schemas are not."""

from __future__ import annotations

import json

import pytest

from outrider.core.errors import SamplingParamsError
from outrider.core.structured import StructuredOutputs
from outrider.grammar.ambiguity import fault_of_grammar, fault_of_regex
from outrider.grammar.vocabulary import xgrammar
from tests.support.grammars import compiler

DEAR = [
    "(([a-z]{1,50}){1,50}|([a-z ]{1,50}){1,50}){1,50}",
    "((a{0,99}){0,99}){0,99}",
    "([a-z]{1,20} ?){1,50}",
    "([a-z]{1,50})+",
    "([a-z]+){1,50}",
    "([a-z]+ ?)+",
    "(([a-z]+)+)+",
    "([a-z]+,? ?)*\\.",
    "(([a-z]+ ?)+[.!?] ?)+",
    "([a-z]?[a-z]?[a-z]?[a-z]?){1,50}",
    "x(y(a*)*z)w",
    "([^a]+[^b]*)+",
    "(a|[é-ü]+)*",
]
ORDINARY = [
    "[a-z]{1,1000}",
    "[a-z ]*",
    "([a-z]{1,20} ){1,50}",
    "([a-z]+[ ,.])+",
    "[a-z]+( [a-z]+)*",
    "([^.]+\\.)+",
    "(.+\\n)*",
    "(([a-z]+ )+[.!?] )*",
    "([0-9]{1,3}\\.){3}[0-9]{1,3}",
    "([0-9]{1,3}\\.?){4}",
    "-?[0-9]+(\\.[0-9]+)?([eE][+-]?[0-9]+)?",
    "([A-Za-z0-9._%+-]+)@([a-z0-9.-]+)\\.[a-z]{2,9}",
    "((abc|b[a-f]+|c)[ .]){3,9}(yes|no)!",
    "(yes|no|maybe)(, (yes|no|maybe)){0,50}",
    "(a?){0,1000}",
    "[a-z]{0,50}[a-z]{0,50}[a-z]{0,50}",
    "([A-Z][a-z]+ ){0,40}",
    "([ぁ-ん]+。)+",
    "(\\d{4}-\\d{2}-\\d{2}\\n)*",
]
GRAMMARS = {
    "arithmetic": """
        root ::= (expr "=" ws term "\\n")+
        expr ::= term ([-+*/] term)*
        term ::= ident | num | "(" ws expr ")" ws
        ident ::= [a-z] [a-z0-9_]* ws
        num ::= [0-9]+ ws
        ws ::= [ \\t\\n]*
    """,
    "json": """
        root ::= object
        value ::= object | array | string | number | ("true" | "false" | "null") ws
        object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws
        array ::= "[" ws (value ("," ws value)*)? "]" ws
        string ::= "\\"" ([^"\\\\] | "\\\\" ["\\\\/bfnrt])* "\\"" ws
        number ::= "-"? [0-9]+ ("." [0-9]+)? ws
        ws ::= "" | [ \\t\\n] ws
    """,
    "list": 'root ::= ("- " [^\\n]+ "\\n")+',
    "recursion": 'root ::= "x" inner "x"\ninner ::= "a" inner "b" | [e-m]+',
}


@pytest.mark.parametrize("expression", DEAR)
def test_what_can_be_divided_in_many_ways_is_refused(expression: str) -> None:
    for spec in (
        StructuredOutputs(regex=expression),
        StructuredOutputs(json={"type": "string", "pattern": f"^{expression}$"}),
        StructuredOutputs(json={"type": "object", "patternProperties": {expression: {"type": "integer"}}}),
        StructuredOutputs(
            structural_tag={"type": "structural_tag", "format": {"type": "regex", "pattern": expression}}
        ),
    ):
        with pytest.raises(SamplingParamsError, match="let it end in something else") as refused:
            compiler().compile(spec)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("expression", ORDINARY)
def test_ordinary_expressions_pass(expression: str) -> None:
    assert fault_of_regex(expression) is None


@pytest.mark.parametrize("name", GRAMMARS)
def test_ordinary_grammars_pass(name: str) -> None:
    assert fault_of_grammar(xgrammar().Grammar.from_ebnf(GRAMMARS[name])) is None


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= word+\nword ::= [a-z]+ " "?',
        "root ::= (word){1,40}\nword ::= [a-z]{1,40}",
        'root ::= [a-z]+ root | "."\n',
        'root ::= "<" (a | "-")* ">"\na ::= b\nb ::= "x" "x"*',
    ],
)
def test_grammars_hide_nothing_behind_names(grammar: str) -> None:
    with pytest.raises(SamplingParamsError, match="in this grammar"):
        compiler().compile(StructuredOutputs(grammar=grammar))


def test_schemas_are_not_taken_for_ambiguous() -> None:
    """They are held to patterns alone, since their own repetitions have signs between them; the measure agrees."""
    leaf = {"type": "array", "items": {"type": "string", "maxLength": 200}, "maxItems": 100}
    inner = {"type": "object", "properties": {"a": leaf, "b": {"type": "number"}}, "additionalProperties": leaf}
    schema = {"type": "array", "items": {"type": "array", "items": inner, "maxItems": 100}}
    grammar = xgrammar().Grammar.from_json_schema(json.dumps(schema), max_whitespace_cnt=32)
    assert fault_of_grammar(grammar) is None
    assert fault_of_grammar(xgrammar().Grammar.builtin_json_grammar()) is None


def test_few_ways_are_let_through() -> None:
    assert fault_of_regex("([a-z]{1,4} ?){1,3}") is None
    assert fault_of_regex("([a-z]{1,4} ?){1,4}") is not None
