"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from outrider.serve.protocol.base import Body, refuse
from outrider.serve.protocol.sampling import SamplingFields

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
Labels = Annotated[dict[str, str], Field(max_length=16)]


class TextPart(Body):
    """A piece of a message. Pieces are joined by line breaks."""

    type: Literal["text"] = Field(description="text is the only kind that these models read")
    text: str


class CalledFunction(Body):
    """What an earlier answer called; arguments are a JSON object in a string."""

    name: Name
    arguments: str


class CalledTool(Body):
    """A call in an earlier answer."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Body):
    """One turn of a conversation."""

    refused: ClassVar = {
        "audio": "these models read text only",
        "function_call": "use tool_calls",
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1)] | None = Field(
        None, description="a text, or a list of parts of type text"
    )
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    refusal: str | None = Field(None, description="without effect")
    annotations: list[Any] | None = Field(None, description="without effect")

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and not self.tool_calls:
            raise refuse(f"a message of the role {self.role!r} needs content", "messages")
        if self.tool_calls and self.role != "assistant":
            raise refuse("only messages of the assistant have tool_calls", "messages")
        return self

    def template_form(self) -> dict[str, Any]:
        """As chat templates want it."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text for part in content)
        # Templates know no "developer", which is what OpenAI came to call the system's role.
        form: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "" if content is None else content,
        }
        if self.name is not None:
            form["name"] = self.name
        if self.tool_calls:
            form["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        if self.tool_call_id is not None:
            form["tool_call_id"] = self.tool_call_id
        return form


class Function(Body):
    """A function that the model may call; parameters: the JSON schema of its arguments."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="without effect: only a forced call is bound to its schema")


class Tool(Body):
    """Something that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function that is to be called."""

    name: Name


class ForcedTool(Body):
    """The one tool that must be used."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Body):
    """The schema of an answer."""

    name: Name
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = Field(None, description="without effect: the model does not read it")
    strict: bool | None = Field(None, description="without effect: a response_format always binds")


class ResponseFormat(Body):
    """What kind of text the answer is."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_one_is_needed(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refuse("response_format has json_schema if, and only if, its type is json_schema", "response_format")
        return self


class ChatRequest(SamplingFields):
    """A conversation that is to be answered."""

    refused: ClassVar = {
        "audio": "these models write text only",
        "functions": "use tools",
        "function_call": "use tool_choice",
        "moderation": "nothing is moderated here",
        "prediction": "speculation needs no hint; edits are found in the prompt",
        "reasoning_effort": "these models have no such setting",
        "verbosity": "these models have no such setting",
        "web_search_options": "nothing is searched here",
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ForcedTool | None = Field(
        None, description="none, auto, required, or the function to call"
    )
    parallel_tool_calls: bool | None = Field(None, description="false needs a forced call")
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = Field(None, description="nothing is stored")
    metadata: Labels | None = Field(None, description="without effect")
    service_tier: str | None = Field(None, description="without effect")
    safety_identifier: str | None = Field(None, description="without effect")
    prompt_cache_key: str | None = Field(None, description="without effect: prefixes are found by their tokens")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="without effect")
    prompt_cache_retention: str | None = Field(None, description="without effect")

    @model_validator(mode="after")
    def _combinations(self) -> ChatRequest:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise refuse("max_tokens and max_completion_tokens differ; send one of them", "max_completion_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise refuse("top_logprobs needs logprobs=true", "top_logprobs")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise refuse("tool_choice needs tools", "tool_choice")
        if self.tools and self.parallel_tool_calls is False and self.tool_choice in (None, "auto"):
            why = "a model that is free to call may call several times; it works with a tool_choice that forces a call"
            raise refuse(f"parallel_tool_calls=false is not supported: {why}", "parallel_tool_calls")
        if isinstance(self.tool_choice, ForcedTool):
            known = [tool.function.name for tool in self.tools or ()]
            if self.tool_choice.function.name not in known:
                raise refuse(f"tool_choice names none of the tools ({', '.join(known)})", "tool_choice")
        return self

    @property
    def constrained(self) -> bool:
        structured = self.response_format is not None and self.response_format.type != "text"
        return super().constrained or structured or self.tool_choice not in (None, "none", "auto")

    def sampling_values(self) -> dict[str, Any]:
        return {
            "max_tokens": None,  # as many as the context holds
            **super().sampling_values(),
            **({"max_tokens": self.max_completion_tokens} if self.max_completion_tokens else {}),
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
        }
