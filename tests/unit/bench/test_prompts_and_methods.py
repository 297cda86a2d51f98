from __future__ import annotations

from pathlib import Path

import pytest

from outrider.bench.methods import Method, baseline, parse_methods
from outrider.bench.prompts import load_prompts, select
from outrider.bench.table import format_table
from outrider.core.config import SpeculativeConfig
from outrider.core.errors import ConfigError, UnknownNameError, UsageError


def test_the_packages_own_prompts() -> None:
    prompts = load_prompts()
    categories = {prompt.category for prompt in prompts}
    assert len(prompts) >= 30
    assert len(categories) >= 10
    assert any(len(prompt.turns) > 1 for prompt in prompts)


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


GOOD = '{"id": "a/1", "category": "a", "turns": ["one", "two"]}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD, "{"], ":2 is not valid JSON"),
        ([GOOD, "[]"], ":2 is not a JSON object"),
        (['{"id": "x", "category": "a", "turns": []}'], ":1: 'turns'"),
        (['{"id": "x", "category": "a", "turns": ["hi", 3]}'], ":1: 'turns'"),
        (['{"category": "a", "turns": ["hi"]}'], ":1: 'id'"),
        (['{"id": "x", "category": "", "turns": ["hi"]}'], ":1: 'category'"),
        ([GOOD, GOOD], "two prompts with id 'a/1'"),
        ([""], "holds no prompt"),
    ],
)
def test_a_file_that_is_not_prompts_is_refused_by_line(lines: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        load_prompts(write(tmp_path / "prompts.jsonl", *lines))
    assert message in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.jsonl"):
        load_prompts(tmp_path / "nowhere.jsonl")


def test_select_takes_the_first_of_each_category(tmp_path: Path) -> None:
    lines = [f'{{"id": "{c}/{i}", "category": "{c}", "turns": ["hi"]}}' for i in range(3) for c in "abc"]
    prompts = load_prompts(write(tmp_path / "prompts.jsonl", *lines))
    assert [prompt.id for prompt in select(prompts, ["c", "a"], 2)] == ["a/0", "c/0", "a/1", "c/1"]
    assert select(prompts) == prompts
    with pytest.raises(UnknownNameError):
        select(prompts, ["d"])


def test_methods_are_names_cascades_and_json() -> None:
    text = 'none, suffix+recycle,{"method": "ngram", "prompt_lookup_max": 3},draft_model'
    methods = parse_methods(text, draft_model="small")
    assert methods == [
        Method("none", SpeculativeConfig(method="none")),
        Method("suffix+recycle", SpeculativeConfig(method="suffix+recycle")),
        Method("ngram(prompt_lookup_max=3)", SpeculativeConfig(method="ngram", prompt_lookup_max=3)),
        Method("draft_model", SpeculativeConfig(method="draft_model", model="small")),
    ]
    assert baseline(methods) is methods[0]
    assert baseline(methods[1:]) is None


@pytest.mark.parametrize(
    ("text", "draft_model", "message"),
    [
        ("", None, "empty"),
        ("none,none", None, "'none' twice"),
        ("draft_model", None, "needs --draft-model"),
        ("none,ngram", "small", "--draft-model is given"),
        ('{"method": "draft_model", "model": "other"}', "small", "--draft-model is given"),
        ('{"method": }', None, "not valid JSON"),
    ],
)
def test_bad_method_lists(text: str, draft_model: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_methods(text, draft_model)
    assert message in str(error.value)


def test_two_draft_models_have_two_labels() -> None:
    text = 'draft_model,{"method": "draft_model", "model": "other"}'
    assert [m.label for m in parse_methods(text, "small")] == ["draft_model", "draft_model(model=other)"]


def test_tables_are_aligned() -> None:
    table = format_table(["name", "value"], [["a", "1"], ["long name", "1000"]])
    assert table.splitlines() == ["name       value", "---------  -----", "a              1", "long name   1000"]
    assert format_table([], [["a", "1"], ["bb", "22"]]).splitlines() == ["a    1", "bb  22"]
