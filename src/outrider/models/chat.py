"""Chat templates: Jinja, sandboxed, with the names that Hugging Face templates may use."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

from outrider.core.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's own template.

    source: Jinja text. names: what the template may refer to, such as bos_token and eos_token.
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        self.source = source
        self._names = dict(names)

    @property
    def takes_tools(self) -> bool:
        """Whether the template has a place for tools."""
        return re.search(r"\btools\b", self.source) is not None

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as the model was trained to see it. Raises UsageError, with the template's own words.

        messages: as OpenAI's API writes them, the assistant's ``tool_calls`` and answers of the role ``tool`` included.
        tools: what the model may call, ``{"type": "function", "function": {…}}`` each.
        """
        if tools and not self.takes_tools:
            raise UsageError("the model's chat template has no place for tools; leave them out")
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise UsageError(f"a chat message is a dict with 'role' and 'content', not {message!r}")
            if "content" not in message and "tool_calls" not in message:
                raise UsageError(f"the chat message of {message['role']!r} has no 'content'")
        try:
            return self._template.render(
                messages=[_prepared(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=[dict(tool) for tool in tools] if tools else None,
                documents=None,
                **self._names,
            )
        except UsageError:
            raise
        except Exception as error:  # a template is a program from the model's file: it can fail in any way
            reason = " ".join(str(error).split())
            raise UsageError(f"the model's chat template rejects these messages: {reason}") from None

    @cached_property
    def _template(self) -> Template:
        from jinja2 import TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            return environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise UsageError(
                f"the model's chat template is not valid Jinja (line {error.lineno}): {error.message}"
            ) from None


def _prepared(message: Message) -> dict[str, Any]:
    """A message as templates expect it: arguments of tool calls as objects, which OpenAI's API writes as JSON text."""
    prepared = dict(message)
    calls = prepared.pop("tool_calls", None)
    if calls:
        prepared["tool_calls"] = [_prepared_call(call) for call in calls]
        prepared["content"] = message.get("content") or ""
    return prepared


def _prepared_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UsageError(f"a tool call is a dict with a 'function' that has 'name' and 'arguments', not {call!r}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:  # what a model wrote wrongly comes back to it as it is
            arguments = function["arguments"]
    prepared = {**function, "arguments": arguments or {}}
    return {**call, "function": prepared} if "function" in call else prepared


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which would change what the model reads."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _generation_tag() -> type[Any]:
    """``{% generation %}`` marks what the assistant said, for training; for us its body is just text."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012  (jinja2's interface)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag
