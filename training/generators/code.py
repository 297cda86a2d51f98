"""Prompts about Python code, made from the exercises of the banks and from the functions of the standard library."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from generators.grammar import BANKS, bank

SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "turtledemo",
    "__pycache__",
    "ensurepip",
    "encodings",
}
"""Folders of the standard library that hold tests, tables, or programs of their own."""

LONGEST = 45
"""Lines of the longest function that is shown."""

TYPES = re.compile(r"\b(list|dict|tuple|set)\[")
"""A built-in collection with the type of what it holds."""

EXERCISES = 0.5
"""Share of the prompts whose function is an exercise."""


@dataclass(frozen=True)
class Function:
    """A function at the top of a module or a class.

    Attributes:
        module: Dotted name of its module.
        name: Its name.
        source: Its text, from the first column on.
        head: The signature alone, without body.
        docstring: Cleaned text of the docstring, or "".
    """

    module: str
    name: str
    source: str
    head: str
    docstring: str


@cache
def functions() -> tuple[Function, ...]:
    """Functions of the standard library with 4 to ``LONGEST`` lines, in the order of their files."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Function] = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if not SKIPPED.intersection(parts) and not any(part.startswith("config-") for part in parts):
            found.extend(_functions_of(path, ".".join(parts).removesuffix(".py")))
    return tuple(found)


def _functions_of(path: Path, module: str) -> list[Function]:
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (SyntaxError, UnicodeDecodeError):
        return []
    lines = text.splitlines()
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("__") and not node.decorator_list:
            source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
            if 4 <= source.count("\n") + 1 <= LONGEST:
                head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1]).rstrip()
                found.append(Function(module, node.name, source, head, ast.get_docstring(node) or ""))
    return found


@cache
def exercises() -> tuple[Function, ...]:
    """The functions of ``banks/exercises.py``."""
    return tuple(_functions_of(BANKS / "exercises.py", "exercises"))


def _some_function(rng: random.Random, others: tuple[Function, ...]) -> Function:
    return rng.choice(exercises() if rng.random() < EXERCISES else others)


@cache
def documented() -> tuple[Function, ...]:
    """Those with a docstring of some length and a head on lines of its own."""
    return tuple(f for f in functions() if f.head and 30 <= len(f.docstring) <= 1200)


def completion(rng: random.Random) -> str:
    """A signature and its docstring; the body is for the model to write."""
    function = _some_function(rng, documented())
    quoted = textwrap.indent(function.docstring.replace('"""', "'''"), "    ").strip()
    stub = f'{function.head}\n    """{quoted}\n    """'
    if rng.random() < 0.3:
        stub = re.sub(rf"\b{function.name}\b", rng.choice(bank("code_frames")["names"]), stub)
    if rng.random() < 0.5:
        stub = _with_typing(stub)
    return rng.choice(bank("code_frames")["completion"]).replace("{code}", stub)


def _with_typing(stub: str) -> str:
    """The stub with List, Dict and the like of the module typing, as older code spells them."""
    names = sorted({name.capitalize() for name in TYPES.findall(stub)})
    if not names:
        return stub
    spelled = TYPES.sub(lambda match: match.group(1).capitalize() + "[", stub)
    return f"from typing import {', '.join(names)}\n\n\n{spelled}"


def edit(rng: random.Random) -> str:
    """A whole function and a change to make in it, the rest to be returned as it stands."""
    frames = bank("code_frames")
    function = _some_function(rng, functions())
    local = [name for name in _locals(function.source) if len(name) > 1]
    task = rng.choice(frames["edit"] + (frames["rename_local"] if local else []))
    task = task.replace("{name}", function.name).replace("{new}", rng.choice(frames["names"]))
    if local:
        task = task.replace("{local}", rng.choice(local)).replace("{other}", rng.choice(frames["variables"]))
    return rng.choice(frames["edit_layouts"]).replace("{task}", task).replace("{code}", function.source)


def question(rng: random.Random) -> str:
    """A function and something to say about it: what it does, its faults, tests for it."""
    function = _some_function(rng, functions())
    task = rng.choice(bank("code_frames")["questions"])
    return f"{task}\n\n```python\n{function.source}\n```"


def _locals(source: str) -> list[str]:
    """Names that the function binds itself, sorted."""
    bound = {
        node.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return sorted(bound)


@cache
def module_docs() -> tuple[str, ...]:
    """Docstrings of the standard library's modules, of 60 to 350 words."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.intersection(path.relative_to(root).parts):
            continue
        try:
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        except (SyntaxError, UnicodeDecodeError):
            continue
        if 60 <= len(text.split()) <= 350 and not re.search(r"copyright", text, re.I):
            found.append(text)
    return tuple(found)


def documentation(rng: random.Random) -> str:
    """The docstring of a module, to be summarised or explained."""
    return rng.choice(bank("code_frames")["documentation"]).replace("{text}", rng.choice(module_docs()))
