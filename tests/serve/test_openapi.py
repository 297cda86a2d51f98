"""The server's own description of itself, and requests made from it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from jsonschema_rs import validator_for

from tests.serve.support import Running, get, post

PATHS = {
    *("/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize"),
    *("/health", "/ready", "/metrics"),
}


@pytest.fixture(scope="module")
def description(server: Running) -> dict[str, Any]:
    status, document = get(server, "/openapi.json")
    assert status == 200
    return document  # type: ignore[no-any-return]


def test_every_endpoint_is_described(description: dict[str, Any]) -> None:
    assert set(description["paths"]) == PATHS
    for path in PATHS:
        for operation in description["paths"][path].values():
            assert operation["summary"]
            assert "200" in operation["responses"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_is_as_described(server: Running, description: dict[str, Any], path: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 4, "n": 2}
    if "chat" in path:
        body |= {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    else:
        body |= {"prompt": "x", "logprobs": 2}
    schema = description["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    validator = validator_for({**schema, "components": description["components"]})
    validator.validate(post(server, path, body)[2])
    refused = post(server, path, {})[2]
    assert not validator.is_valid(refused)


schemathesis.checks.load_all_checks()
CHECKS = schemathesis.checks.CHECKS.get_by_names(
    [
        *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
        *("response_schema_conformance", "negative_data_rejection", "unsupported_method"),
    ]
)


@pytest.fixture(scope="module")
def api(server: Running) -> Any:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


SIMPLE = {
    *("prompt", "messages", "tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "seed", "stream", "cache_salt", "user", "ignore_eos"),
}


def make_likely(case: Any, *, simple: bool) -> None:
    """Let a good request be one that this server may answer, and that does not take it long.

    simple: without the fields that a schema cannot say all about: what goes with what, and how much is too much.
    """
    if case.path_parameters:
        case.path_parameters = {"name": "tiny"} if simple else case.path_parameters
    if not isinstance(case.body, dict):
        return
    body = {name: value for name, value in case.body.items() if not simple or name in SIMPLE}
    if simple and body.get("messages"):
        turns = [{k: v for k, v in turn.items() if k in ("role", "content", "name")} for turn in body["messages"]]
        body["messages"] = [turn for turn in turns if turn.get("content")][:3] or [{"role": "user", "content": "x"}]
    case.body = {**body, "model": "tiny", **({"max_tokens": 4} if "v1" in case.path else {})}


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("path", sorted(PATHS))
def test_requests_made_from_the_description(api: Any, server: Running, path: str, mode: Any) -> None:
    """Good bodies are answered, or refused in the described form; bad ones are refused. Nothing fails or hangs."""
    method = "POST" if "post" in api.raw_schema["paths"][path] else "GET"
    if method == "GET" and mode is schemathesis.GenerationMode.NEGATIVE:
        pytest.skip("there is nothing to get wrong about it")

    statuses: list[int] = []

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=25, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        if mode is schemathesis.GenerationMode.POSITIVE:
            make_likely(case, simple=len(statuses) % 2 == 0)
        statuses.append(case.call_and_validate(checks=CHECKS, timeout=60).status_code)

    check()
    assert 200 in statuses or mode is schemathesis.GenerationMode.NEGATIVE, "not one body was answered"
    assert server.settled()
