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


@pytest.mark.parametrize("mode", list(schemathesis.GenerationMode), ids=lambda mode: str(mode.value))
@pytest.mark.parametrize("path", sorted(PATHS))
def test_requests_made_from_the_description(api: Any, server: Running, path: str, mode: Any) -> None:
    """Good bodies are answered, or refused in the described form; bad ones are refused. Nothing fails or hangs."""
    method = "POST" if "post" in api.raw_schema["paths"][path] else "GET"
    if method == "GET" and mode is schemathesis.GenerationMode.NEGATIVE:
        pytest.skip("there is nothing to get wrong about it")

    @given(api[path][method].as_strategy(generation_mode=mode))
    @settings(max_examples=25, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    def check(case: Any) -> None:
        if isinstance(case.body, dict) and mode is schemathesis.GenerationMode.POSITIVE:
            # So that most of them get past the model's name, and none of them takes long.
            case.body = {**case.body, "model": "tiny", **({"max_tokens": 4} if "v1" in path else {})}
        case.call_and_validate(checks=CHECKS, timeout=60)

    check()
    assert server.settled()
