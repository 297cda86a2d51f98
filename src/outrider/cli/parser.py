"""Argument parsing: options made from the fields of configuration classes, and errors that name what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the nearest option or choice."""

    def __init__(self, **options: Any) -> None:
        # An abbreviated option would change its meaning on the day that another one with the same beginning arrives.
        super().__init__(**{"allow_abbrev": False, "formatter_class": _HelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see '{self.prog} --help')\n")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse a whole command line (None: this process's); exits with code 2 and one line if something is wrong."""
        parsed, extra = self.parse_known_args(arguments)
        if extra:
            chosen: Parser = getattr(parsed, "parser", self)
            chosen.error(_unknown_argument(extra[0], chosen.option_names()))
        return parsed

    def option_names(self) -> list[str]:
        """Every long option that this parser knows."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            raise argparse.ArgumentError(action, f"unknown choice {value!r}{nearest(str(value), choices)}")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def nearest(word: str, choices: Iterable[str]) -> str:
    """``; did you mean 'x'?`` where something is near, and the choices in any case."""
    known = list(choices)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return (f"; did you mean {near[0]!r}?" if near else ".") + f" Known: {', '.join(known)}."


def _unknown_argument(argument: str, options: Sequence[str]) -> str:
    if not argument.startswith("-"):
        model = ", and a model stands behind --model" if "--model" in options else ""
        return f"unexpected argument {argument!r}; a text of several words needs quotes{model}"
    name = argument.split("=", 1)[0]
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else "; a text that begins with - goes after --"
    return f"unknown option {name}{hint}"


def add_fields(
    group: argparse._ArgumentGroup,
    cls: type[Any],
    prefix: str,
    *,
    rename: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    leave_out: Sequence[str] = (),
) -> None:
    """One option for every field of a configuration dataclass; `given` reads back those that were used.

    rename: field -> option name, where the field's own name would be unclear on a command line.
    defaults: what help shows where a command departs from the field's default. leave_out: fields without an option.
    """
    hints = typing.get_type_hints(cls)
    helps = field_help(cls)
    for item in fields(cls):
        if item.name in leave_out:
            continue
        name = (rename or {}).get(item.name, item.name)
        default = (defaults or {}).get(item.name, _default(item))
        text = helps[item.name].replace("%", "%%")
        if default not in (None, "", ()) and "default" not in text:
            text += f" (default: {_shown(default)})"
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=f"{prefix}.{item.name}",
            default=argparse.SUPPRESS,
            help=text,
            **_reader(hints[item.name]),
        )


def given(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The fields under ``prefix`` whose options were used, by field name."""
    start = prefix + "."
    return {name.removeprefix(start): value for name, value in vars(args).items() if name.startswith(start)}


def field_help(cls: type[Any]) -> dict[str, str]:
    """Help for each field: its ``help`` metadata, or else its entry in the class docstring (``a, b: what they do``)."""
    entries: dict[str, str] = {}
    known = {item.name for item in fields(cls)}
    current: list[str] = []
    for line in (cls.__doc__ or "").splitlines():
        head, colon, rest = line.strip().partition(": ")
        names = [name.strip() for name in head.split(",")]
        if colon and set(names) <= known:
            current = names
            entries |= dict.fromkeys(names, rest)
        elif line.strip():
            entries |= {name: f"{entries[name]} {line.strip()}" for name in current}
        else:
            current = []
    entries |= {item.name: item.metadata["help"] for item in fields(cls) if "help" in item.metadata}
    return {name: text.rstrip(".") for name, text in entries.items()}


def _shown(value: Any) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _default(item: Field[Any]) -> Any:
    return None if item.default is MISSING else item.default


def _reader(hint: Any) -> dict[str, Any]:
    """Arguments of ``add_argument`` that read a value of the annotated type; TypeError for a type without a form."""
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(hint) if part is not type(None)]
        if inner == [str, int]:
            return {"type": str, "metavar": "SIZE"}
        if str in inner and len(inner) > 1:
            return {"action": "append", "metavar": "TEXT"}
        reader = _reader(inner[0])
        if "type" not in reader:
            return reader
        return {**reader, "type": _or_none(reader["type"])}
    readers: dict[Any, dict[str, Any]] = {
        int: {"type": _whole, "metavar": "N"},
        float: {"type": _number, "metavar": "X"},
        str: {"type": str, "metavar": "NAME"},
        Sequence[int]: {"type": _whole_list, "metavar": "N,N"},
        Mapping[int, float]: {"type": _bias, "metavar": "ID=X,ID=X"},
    }
    if hint not in readers:
        raise TypeError(f"no command line form for a field of type {hint}")
    return readers[hint]


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.lower() == "none" else read(text)


def _whole(text: str) -> int:
    if not re.fullmatch(r"[+-]?\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _whole_list(text: str) -> tuple[int, ...]:
    return tuple(_whole(part.strip()) for part in text.split(","))


def _bias(text: str) -> dict[int, float]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form ID=NUMBER,ID=NUMBER")
    return {_whole(token.strip()): _number(value.strip()) for token, _, value in pairs}
