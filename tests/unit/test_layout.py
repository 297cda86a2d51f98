"""The shape of the source tree: what may import what, how packages are built, and how long things may be."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from outrider.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "outrider"

LAYERS = (
    ("cli",),
    ("serve",),
    ("bench", "audit", "train", "interop"),
    ("engine",),
    ("drafters", "acceptance"),
    ("executors", "grammar", "chat", "heads"),
    ("models",),
    ("core",),
)
"""Packages, top first. A package imports from layers below its own, and from itself; never from a neighbour."""

CONTRACTS = {"drafters": "DRAFTERS", "acceptance": "RULES", "executors": "EXECUTORS", "heads": "LAYOUTS"}
"""Packages that hold a contract in base.py, one implementation per file, and a registry."""

LONGEST_MODULE = 400
LONGEST_FUNCTION = 60
LONG_ON_PURPOSE: dict[str, str] = {}
"""Module, or module:function, that may be longer -> the reason."""

HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "numpy",
    "rich",
    "huggingface_hub",
    "jinja2",
    "tqdm",
    "fastapi",
    "pydantic",
    "matplotlib",
    "xgrammar",
)
"""What ``outrider --help`` must not pay for."""


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def rank(package: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if package in layer)


def imported_packages(path: Path) -> Iterator[tuple[str, int]]:
    """(package of outrider, line) for every import in the file, those under TYPE_CHECKING and in functions included.

    An import for a type alone is held to the same rule: it says that one package knows another.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "outrider" else []
            names = names or [node.module or ""]
        for name in names:
            parts = name.split(".")
            if parts[0] == "outrider" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
                yield parts[1], node.lineno


def test_every_package_has_a_layer() -> None:
    packages = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert packages <= {name for layer in LAYERS for name in layer}


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_point_downwards(path: Path) -> None:
    own = relative(path).split("/")[0]
    if not (SOURCE / own).is_dir():  # outrider/__init__.py and __main__.py stand above all layers
        return
    for package, line in imported_packages(path):
        assert package == own or rank(package) > rank(own), f"{relative(path)}:{line} imports {package} from {own}"


def test_an_upward_import_would_be_found(tmp_path: Path) -> None:
    source = "def f() -> None:\n    from outrider.engine.llm import LLM\n    from outrider import bench, LLM\n"
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(imported_packages(path)) == [("engine", 2), ("bench", 3)]
    assert rank("engine") < rank("models")


@pytest.mark.parametrize("package", CONTRACTS)
def test_contract_packages_have_a_base_and_a_registry(package: str) -> None:
    from outrider.core.registry import Registry

    assert (SOURCE / package / "base.py").exists()
    module = importlib.import_module(f"outrider.{package}")
    registry = getattr(module, CONTRACTS[package])
    assert isinstance(registry, Registry)
    for name in registry.names():
        implementation = registry.get(name)
        where = getattr(implementation, "__module__", "")
        assert where.startswith(f"outrider.{package}."), f"{name} is implemented in {where}"


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_modules_and_functions_are_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    name = relative(path)
    lines = len(text.splitlines())
    assert lines <= LONGEST_MODULE or name in LONG_ON_PURPOSE, f"{name} has {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            long = length > LONGEST_FUNCTION and f"{name}:{node.name}" not in LONG_ON_PURPOSE
            assert not long, f"{name}:{node.lineno} {node.name} has {length} lines"


def test_what_is_long_on_purpose_is_still_there() -> None:
    for entry in LONG_ON_PURPOSE:
        assert (SOURCE / entry.split(":")[0]).exists(), f"{entry} is gone; take it off the list"


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_modules_say_what_they_are(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{relative(path)} has no docstring"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=lambda words: "".join(words) or "all")
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    program = (
        "import sys\n"
        "from outrider.cli.main import main\n"
        f"try:\n    main({[*command, '--help']!r})\nexcept SystemExit:\n    pass\n"
        f"print(sorted(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() in (("[]", "['numpy']") if command else ("[]",))
    assert (command or ["generate"])[0] in done.stdout


# -- tracked files -----------------------------------------------------------------------------------------------------


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git working tree")
    return [ROOT / name for name in done.stdout.split("\0") if name]


# Spelled apart, so that this file does not hold what it looks for.
FOREIGN = re.compile(
    "|".join(
        [
            r"(?<![\w./])/(?:wo" r"rk|ro" r"ot|ho" r"me/\w+|Us" r"ers/\w+|opt/(?:wheels|pypi))/",
            r"py" r"pi\.org",
            r"pythonho" r"sted",
            r"download\.pyt" r"orch",
            r"registry\.n" r"pmjs",
            r"deb\.deb" r"ian",
        ]
    )
)
"""Paths of some machine, and hosts of package registries: which one is used is for the machine's own configuration."""


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        hit = FOREIGN.search(text)
        assert hit is None, f"{path.relative_to(ROOT)}: {hit.group(0) if hit else ''}"


def test_a_machine_path_would_be_found() -> None:
    assert FOREIGN.search("see /ho" + "me/someone/file") is not None
    assert FOREIGN.search("a/ho" + "me/x/y") is None


def imported(path: Path) -> set[str]:
    """Top names of the packages that a file imports, the standard library's and the file's own neighbours left out."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    beside = {found.stem for folder in (path.parent, ROOT / "benchmarks") for found in folder.glob("*.py")}
    return names - set(sys.stdlib_module_names) - beside - {"outrider", "tests"}


@functools.cache
def declared() -> set[str]:
    """Distributions that ``pip install .[dev]`` brings, by what pyproject.toml names and what those need themselves."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    found: set[str] = set()
    while waiting:
        name = plain_name(re.split(r"[^\w.-]", waiting.pop(), maxsplit=1)[0])
        if name not in found:
            found.add(name)
            with contextlib.suppress(metadata.PackageNotFoundError):
                waiting += [need for need in metadata.requires(name) or () if "extra ==" not in need]
    return found


def plain_name(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@functools.cache
def owners() -> dict[str, set[str]]:
    """Importable name -> the distributions that hold it."""
    return {name: {plain_name(one) for one in all_} for name, all_ in metadata.packages_distributions().items()}


def undeclared(path: Path) -> set[str]:
    return {name for name in imported(path) if not declared() & owners().get(name, set())}


@pytest.mark.parametrize("folder", ["src", "tests"])
def test_every_package_that_is_imported_is_installed_with_the_project(folder: str) -> None:
    """What happens to lie on one developer's machine is missing from a clean clone."""
    missing = {str(path): found for path in sorted((ROOT / folder).rglob("*.py")) if (found := undeclared(path))}
    assert not missing


def test_an_undeclared_import_would_be_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("import numpy.linalg\nfrom pip import main\nimport not_there\n")
    assert undeclared(path) == {"pip", "not_there"}
