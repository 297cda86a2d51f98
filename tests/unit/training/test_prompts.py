"""The generator of prompts in ``training/``: what it writes, that it repeats itself, and what it leaves out."""

from __future__ import annotations

import importlib
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

TRAINING = Path(__file__).resolve().parents[3] / "training"
COUNT = 170


@pytest.fixture(scope="module")
def module() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TRAINING))
        yield importlib.import_module("prompts")


@pytest.fixture(scope="module")
def grammar(module: ModuleType) -> ModuleType:
    return sys.modules["generators.grammar"]


@pytest.fixture(scope="module")
def prompts(module: ModuleType) -> list[tuple[str, str, str | None]]:
    return list(module.generate(COUNT, 3, set()))


def test_kinds_are_even_and_nothing_comes_twice(module: ModuleType, prompts: list) -> None:
    kinds = Counter(prompt.kind for prompt in prompts)
    assert set(kinds) == set(module.KINDS)
    assert set(kinds.values()) == {COUNT // len(module.KINDS)}
    assert len({prompt.prompt for prompt in prompts}) == COUNT


def test_the_same_seed_gives_the_same_prompts_and_another_one_does_not(module: ModuleType, prompts: list) -> None:
    assert list(module.generate(COUNT, 3, set())) == prompts
    assert list(module.generate(COUNT, 4, set())) != prompts


def test_what_is_excluded_does_not_come(module: ModuleType, prompts: list, tmp_path: Path) -> None:
    long = next(prompt.prompt for prompt in prompts if prompt.kind == "passages")
    short = next(prompt.prompt for prompt in prompts if prompt.kind == "qa")
    measured = tmp_path / "measured.jsonl"
    measured.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in (long, short)), encoding="utf-8")
    left = list(module.generate(COUNT, 3, module.excluded_runs(measured)))
    words = re.findall(r"\w+", long.lower())
    assert len(left) == COUNT
    for prompt in left:
        text = " ".join(re.findall(r"\w+", prompt.prompt.lower()))
        assert prompt.prompt != short
        assert not any(" ".join(words[start : start + 12]) in text for start in range(len(words) - 11))


def test_the_script_writes_lines_with_second_turns(tmp_path: Path) -> None:
    out = tmp_path / "prompts.jsonl"
    command = [sys.executable, str(TRAINING / "prompts.py"), "--count", str(COUNT), "--seed", "3", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True)
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == COUNT
    assert all(line["prompt"] and line["kind"] for line in lines)
    turns = [(line["prompt"], line["turns"]) for line in lines if "turns" in line]
    assert turns
    assert all(len(two) == 2 and two[0] == prompt and two[1] for prompt, two in turns)


def test_slots_keep_their_meaning_within_a_text(grammar: ModuleType) -> None:
    filler = grammar.Filler(random.Random(0), {"thing": ["apple", "pear"], "rare": ["{thing} pie"]})
    one, other, again, capital = filler.fill("{thing}|{thing2}|{thing}|{Thing}").split("|")
    assert {one, other} == {"apple", "pear"}
    assert (again, capital) == (one, one.capitalize())
    assert filler.fill("{rare}") == f"{one} pie"
    number = filler.fill("{n:10-30x10}")
    assert number in {"10", "20", "30"}
    assert filler.fill("{n}") == number


def test_articles_agree_with_what_fills_the_slot(grammar: ModuleType) -> None:
    filler = grammar.Filler(random.Random(0), {"first": ["apple"], "second": ["university"], "third": ["pear"]})
    assert filler.fill("a {first}. A {first}, a {second}, a {third}") == "an apple. An apple, a university, a pear"


def test_every_template_and_every_entry_can_be_filled(grammar: ModuleType) -> None:
    for path in sorted(grammar.BANKS.glob("*.json")):
        content = grammar.bank(path.stem)
        slots = content.get("slots", {}) if isinstance(content, dict) else {}
        templates = content.get("templates", []) if isinstance(content, dict) else []
        for template in [*templates, *(entry for entries in slots.values() for entry in entries)]:
            filled = grammar.Filler(random.Random(1), slots).fill(template)
            assert not re.search(r"\{[A-Za-z_]+\d?[:}]", filled), template
