"""What the server can say without generating: models, tokens, its state and its metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from outrider.serve.errors import APIError
from outrider.serve.openapi import accepts, answers
from outrider.serve.protocol.answers import ModelCard, ModelList, State, Text, Tokens
from outrider.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest
from outrider.serve.service import Service
from outrider.serve.texts import token_text

router = APIRouter()


def _card(service: Service, name: str) -> ModelCard:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "outrider",
        "max_model_len": service.adapter.max_context,
    }


@router.get("/v1/models", **answers(ModelList))
async def models(http: Request) -> Response:
    """The names by which requests may call the model."""
    service: Service = http.app.state.service
    service.check_key(http)
    listed: ModelList = {"object": "list", "data": [_card(service, name) for name in service.names]}
    return JSONResponse(listed)


@router.get("/v1/models/{name:path}", **answers(ModelCard))
async def model(http: Request, name: str) -> Response:
    """One of them."""
    service: Service = http.app.state.service
    service.check_key(http)
    service.check_model(name)
    return JSONResponse(_card(service, name))


@router.post("/tokenize", **answers(Tokens), **accepts(TokenizeRequest))
async def tokenize(http: Request) -> Response:
    """A text, or a conversation, as token ids."""
    service: Service = http.app.state.service
    call = service.enter(http)
    body = await service.body(http, TokenizeRequest, call)
    service.check_model(body.model)
    tokenizer = service.adapter.tokenizer

    def encode() -> list[int]:
        if body.messages is not None:
            generate = body.add_generation_prompt is not False
            return service.adapter.encode_chat([m.template_form() for m in body.messages], [], generate=generate)
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)

    def answered() -> Response:
        ids = encode()
        answer: Tokens = {"tokens": ids, "count": len(ids), "max_model_len": service.adapter.max_context}
        if body.return_token_strs:
            answer["token_strs"] = [token_text(tokenizer, token) for token in ids]
        return JSONResponse(answer)

    # A body may hold millions of tokens: to spell each one out would keep all streams waiting.
    return await service.prepare(call, answered)


@router.post("/detokenize", **answers(Text), **accepts(DetokenizeRequest))
async def detokenize(http: Request) -> Response:
    """Token ids as text."""
    service: Service = http.app.state.service
    call = service.enter(http)
    body = await service.body(http, DetokenizeRequest, call)
    service.check_model(body.model)
    worst = max(body.tokens, default=0)
    if worst >= service.adapter.vocab_size:
        message = f"tokens holds {worst}; the vocabulary ends at {service.adapter.vocab_size - 1}"
        raise APIError(400, message, param="tokens", code="invalid_value")
    text = await service.prepare(call, lambda: service.adapter.tokenizer.decode(body.tokens, False))
    answer: Text = {"prompt": text}
    return JSONResponse(answer)


@router.get("/health", **answers(State))
async def health(http: Request) -> Response:
    """Whether the process, and the thread that runs the engine, are alive. Needs no key."""
    service: Service = http.app.state.service
    alive: State = {"status": "ok" if service.engine.alive else "the engine has failed"}
    return JSONResponse(alive, 200 if service.engine.alive else 503)


@router.get("/ready", **answers(State))
async def ready(http: Request) -> Response:
    """Whether new requests are taken: the model is loaded, and the server is not about to end. Needs no key."""
    service: Service = http.app.state.service
    state: State = {"status": "ready"}
    if service.draining or not service.engine.alive:
        state = {"status": "draining" if service.draining else "the engine has failed"}
    return JSONResponse(state, 200 if state["status"] == "ready" else 503)


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}}, response_class=Response)
async def metrics(http: Request) -> Response:
    """Figures for Prometheus. Needs no key, and tells nothing of single clients."""
    service: Service = http.app.state.service
    stats = await service.engine.stats()
    data, content_type = service.metrics.export(stats, http.headers.get("accept", ""))
    return Response(data, headers={"Content-Type": content_type})
