"""The pages that people read: their commands exist, their links lead somewhere, their tables match the code."""

from __future__ import annotations

import fnmatch
import re
import runpy
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def commands(page: Path) -> list[str]:
    """Lines of the page's shell blocks that call make or outrider, continuation lines joined, output left out."""
    found: list[str] = []
    for block in re.findall(r"^```(?:sh|console)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").strip()
            if re.match(r"(make|outrider|\.venv/bin/outrider)\s", line):
                found.append(line)
    return found


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_readme_names_its_two_commands() -> None:
    found = {" ".join(shlex.split(command, comments=True)) for command in commands(ROOT / "README.md")}
    assert {"make run", "make test"} <= found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_commands_exist(page: Path) -> None:
    from outrider.cli.main import build_parser

    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    for command in commands(page):
        words = shlex.split(command, comments=True)
        for stop in ("|", ">", "2>", "&&", "<"):
            words = words[: words.index(stop)] if stop in words else words
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= targets, command
        elif "--help" not in words and "--version" not in words:
            build_parser(words[1]).parse(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_tables_match_the_code() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "fields.py"))["generated"]
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        assert generated(text) == text, f"{page.name} is stale; run: python docs/fields.py"


def test_a_stale_table_would_be_found() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "fields.py"))["generated"]
    assert "`method`" in generated("<!-- table: SpeculativeConfig -->\nold\n<!-- end -->")


def test_faults_are_held_off_by_tests_that_exist() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", (ROOT / "docs" / "faults.md").read_text(encoding="utf-8"), re.M)
    names = re.findall(r"^def (test_\w+)", (ROOT / "tests/lossless/test_faults.py").read_text(encoding="utf-8"), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 18))
    for number, tests in rows:
        listed = re.findall(r"`([^`]+)`", tests)
        assert listed, f"nothing holds fault {number} off"
        for entry in listed:
            found = fnmatch.filter(names, entry) if entry.startswith("test_") else (ROOT / entry).exists()
            assert found, f"fault {number}: {entry} is not there"


def test_every_layout_of_heads_is_described() -> None:
    from outrider.heads import LAYOUTS

    page = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z0-9-]+)` \| ([a-z0-9, ;]+) \|", page, re.M))
    assert set(rows) == set(LAYOUTS.names())
    for name, methods in rows.items():
        assert set(LAYOUTS.get(name).methods) <= set(re.findall(r"\w+", methods)), name


def test_listed_benchmarks_exist() -> None:
    folder = ROOT / "benchmarks"
    listed = re.findall(r"^\| `(\w+\.py)`", (folder / "README.md").read_text(encoding="utf-8"), re.M)
    assert listed
    assert [name for name in listed if not (folder / name).exists()] == []
