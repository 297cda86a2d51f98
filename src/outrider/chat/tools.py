"""Tools, tool choice and tool calls, as OpenAI's API writes them.

    prompt = tokenizer.encode_chat(messages, tools=tools)
    params = SamplingParams(structured_outputs=constraint(model, tools, "required"))
    content, calls = ToolCallParser.for_model(model, tools).parse(text)

With the choice ``"none"`` the tools are left out of the prompt, and the text is not parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.chat.formats import ToolFormat, format_of
from outrider.chat.parser import CallPiece, CallStart, ContentPiece, Event, ToolCall, ToolCallParser
from outrider.core.errors import UsageError
from outrider.core.structured import StructuredOutputs

if TYPE_CHECKING:
    from outrider.models.loader import Model

__all__ = [
    "CallPiece",
    "CallStart",
    "ContentPiece",
    "Event",
    "Tool",
    "ToolCall",
    "ToolCallParser",
    "constraint",
    "parse_tools",
]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tool:
    """One function. parameters: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


def parse_tools(tools: Any) -> list[Tool]:
    """Read ``[{"type": "function", "function": {"name": …, "parameters": …}}, …]``. Raises UsageError, in one line."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise UsageError("tools must be a list of functions, with at least one")
    parsed = [_parse_tool(f"tools[{number}]", tool) for number, tool in enumerate(tools)]
    names = [tool.name for tool in parsed]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two tools are named {name!r}")
    return parsed


def _parse_tool(where: str, tool: Any) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(tool.get("function"), Mapping):
        raise UsageError(f'{where} must be an object with "type": "function" and "function"')
    function = tool["function"]
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{where}: a name is 1 to 64 letters, digits, _ or -, not {name!r}")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise UsageError(f"{where}: the parameters of {name!r} must be a JSON schema of an object")
    return Tool(name, {"type": "object", **parameters})


def constraint(
    model: Model, tools: Any, tool_choice: Any = "auto", *, parallel: bool = True
) -> StructuredOutputs | None:
    """What holds the output to the tool choice; None where the model is free ("none", "auto").

    tools: as for `parse_tools`. tool_choice: "none", "auto", "required" (one call or more, of any tool), or
    ``{"type": "function", "function": {"name": …}}`` (one call of this tool). parallel: several calls are allowed, if
    the model can make them. Raises UsageError for anything else, or for a model that knows no tools.
    """
    if tool_choice in ("none", "auto"):
        return None
    offered = parse_tools(tools)
    if tool_choice != "required":
        name = _named(tool_choice)
        offered = [tool for tool in offered if tool.name == name]
        if not offered:
            raise UsageError(f"tool_choice names {name!r}, which is not among the tools")
        parallel = False
    form = format_of(model)
    return StructuredOutputs(structural_tag=_structural_tag(form, offered, several=parallel and form.several))


def _named(tool_choice: Any) -> str:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or tool_choice.get("type") != "function":
        raise UsageError(
            'tool_choice must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}, '
            f"not {tool_choice!r}"
        )
    return name


def _structural_tag(form: ToolFormat, tools: Sequence[Tool], *, several: bool) -> dict[str, Any]:
    """Calls of ``tools`` and nothing else, in xgrammar's structural-tag format."""
    tags = [
        {
            "type": "tag",
            "begin": form.begin(json.dumps(tool.name)),
            "content": {"type": "json_schema", "json_schema": dict(tool.parameters)},
            "end": form.end,
        }
        for tool in tools
    ]
    return {
        "type": "structural_tag",
        "format": {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": form.separator,
            "at_least_one": True,
            "stop_after_first": not several,
        },
    }
