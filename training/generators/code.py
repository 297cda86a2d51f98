"""Prompts about Python code, made from the functions of the standard library of the running interpreter."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from generators.grammar import bank

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
                head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
                found.append(Function(module, node.name, source, head, ast.get_docstring(node) or ""))
    return found


@cache
def documented() -> tuple[Function, ...]:
    """Those with a docstring of some length and a head on lines of its own."""
    return tuple(f for f in functions() if f.head and 30 <= len(f.docstring) <= 1200)


def completion(rng: random.Random) -> str:
    """A signature and its docstring; the body is for the model to write."""
    function = rng.choice(documented())
    quoted = function.docstring.replace('"""', "'''").replace("\n", "\n    ")
    stub = f'{function.head}\n    """{quoted}\n    """'
    return rng.choice(bank("code_frames")["completion"]).replace("{code}", stub)


def edit(rng: random.Random) -> str:
    """A whole function and a change to make in it, the rest to be returned as it stands."""
    frames = bank("code_frames")
    function = rng.choice(functions())
    local = [name for name in _locals(function.source) if len(name) > 1]
    task = rng.choice(frames["edit"] + (frames["rename_local"] if local else []))
    task = task.replace("{name}", function.name).replace("{new}", rng.choice(frames["names"]))
    if local:
        task = task.replace("{local}", rng.choice(local)).replace("{other}", rng.choice(frames["variables"]))
    return rng.choice(frames["edit_layouts"]).replace("{task}", task).replace("{code}", function.source)


def question(rng: random.Random) -> str:
    """A function and something to say about it: what it does, its faults, tests for it."""
    function = rng.choice(functions())
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
