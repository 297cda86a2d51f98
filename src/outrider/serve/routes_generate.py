"""``POST /v1/completions`` and ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from outrider.serve.engine_adapter import ToolReader
from outrider.serve.openapi import accepts, answers
from outrider.serve.protocol.answers import ChatCompletion, Completion
from outrider.serve.protocol.chat import ChatRequest, ForcedTool
from outrider.serve.protocol.completions import CompletionRequest
from outrider.serve.protocol.sampling import SamplingFields
from outrider.serve.respond import EventStream, respond
from outrider.serve.service import Call, Service, Work, structure_of
from outrider.serve.writers import ChatWriter, CompletionWriter, Writer

router = APIRouter()


@router.post("/v1/completions", **answers(Completion, streamed=True), **accepts(CompletionRequest))
async def completions(http: Request) -> Response:
    """Continue a text, or several."""
    service: Service = http.app.state.service
    call = service.enter(http)
    body = await service.body(http, CompletionRequest, call)
    prompts = body.prompts
    structure, param = structure_of(_extras(body))
    tokenizer = service.adapter.tokenizer

    def work(tenant: str) -> Work:
        params = service.adapter.sampling_params(body.sampling_values(), structure, param, tenant)
        return Work([tokenizer.encode(p) if isinstance(p, str) else p for p in prompts], params)

    generation = await service.generate(body, len(prompts) * body.choices, work, call)
    echoed = [p if isinstance(p, str) else tokenizer.decode(p) for p in prompts] if body.echo else None
    return await _answer(http, body, generation, CompletionWriter(body, tokenizer, echoed), call)


@router.post("/v1/chat/completions", **answers(ChatCompletion, streamed=True), **accepts(ChatRequest))
async def chat_completions(http: Request) -> Response:
    """Answer a conversation."""
    service: Service = http.app.state.service
    call = service.enter(http)
    body = await service.body(http, ChatRequest, call)
    tools = tool_dicts(body)
    messages = [message.template_form() for message in body.messages]
    readers: list[ToolReader] = []

    def work(tenant: str) -> Work:
        if tools:
            readers.extend(service.adapter.tool_reader(tools) for _ in range(body.choices))
        structure, param = structure_of({**_extras(body), **_chat_structures(service, body, tools)})
        params = service.adapter.sampling_params(body.sampling_values(), structure, param, tenant)
        return Work([service.adapter.encode_chat(messages, tools)], params)

    generation = await service.generate(body, body.choices, work, call)
    return await _answer(http, body, generation, ChatWriter(body, service.adapter.tokenizer, readers or None), call)


async def _answer(http: Request, body: SamplingFields, generation: Any, writer: Writer, call: Call) -> Response:
    if body.stream:
        return EventStream(generation, writer, call.deadline)
    return await respond(http.receive, generation, writer, call.deadline)


def tool_dicts(body: ChatRequest) -> list[dict[str, Any]]:
    """The tools that the model is to know of, as chat templates want them; none if it must not call any."""
    if not body.tools or body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in body.tools]


def _extras(body: SamplingFields) -> dict[str, Any]:
    return {
        "regex": {"regex": body.regex} if body.regex is not None else None,
        "grammar": {"grammar": body.grammar} if body.grammar is not None else None,
    }


def _chat_structures(service: Service, body: ChatRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        schema = wanted.json_schema
        found["response_format"] = {"json": schema.schema_} if schema is not None else {"json_object": True}
    if tools and body.tool_choice not in (None, "auto"):
        choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, ForcedTool) else body.tool_choice
        found["tool_choice"] = service.adapter.forced_call(
            tools, choice, parallel=body.parallel_tool_calls is not False
        )
    return found
