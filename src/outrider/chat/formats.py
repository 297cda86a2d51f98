"""How model families write a tool call, told apart by their chat templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.core.errors import UnsupportedModelError, UsageError

if TYPE_CHECKING:
    from outrider.models.loader import Model


@dataclass(frozen=True)
class ToolFormat:
    """A call is a JSON object with a name and arguments, between an opening and a closing text, if there are any.

    key: what the object calls the arguments. several: the model was taught to make several calls at once, with
    ``separator`` between them. marks: texts that a chat template of this format holds, all of them. prefixes: texts
    that may stand before a call that has no opening.
    """

    name: str
    marks: tuple[str, ...]
    key: str
    opening: str = ""
    closing: str = ""
    separator: str = "\n"
    several: bool = False
    prefixes: tuple[str, ...] = ()

    def begin(self, name: str) -> str:
        """A call up to its arguments. ``name``: as JSON."""
        opening = f"{self.opening}\n" if self.opening else ""
        return f'{opening}{{"name": {name}, "{self.key}": '

    @property
    def end(self) -> str:
        """A call from the end of its arguments on."""
        return "}" + (f"\n{self.closing}" if self.closing else "")


HERMES = ToolFormat(
    "hermes",
    marks=("<tool_call>", '"arguments"'),
    key="arguments",
    opening="<tool_call>",
    closing="</tool_call>",
    several=True,
)
"""Nous Research's Hermes, and Qwen 2.5 and 3."""

LLAMA = ToolFormat("llama", marks=("ipython", '"parameters"'), key="parameters", prefixes=("<|python_tag|>",))
"""Llama 3.1, 3.2 and 3.3."""

FORMATS = (HERMES, LLAMA)


def format_of(model: Model) -> ToolFormat:
    """The format that the model's chat template asks for.

    Raises UsageError if the model knows no tools, UnsupportedModelError if it writes calls in another way.
    """
    template = model.tokenizer.chat_template if model.tokenizer is not None else None
    if template is None or not template.takes_tools:
        raise UsageError(f"the chat template of {model.name!r} has no place for tools; leave them out")
    for form in FORMATS:
        if all(mark in template.source for mark in form.marks):
            return form
    known = ", ".join(form.name for form in FORMATS)
    raise UnsupportedModelError(f"{model.name!r} writes tool calls in a format that is not supported; known: {known}")
