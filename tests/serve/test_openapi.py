"""The server's own description of itself, and requests made from it."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
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


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(
    max_examples=25,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_requests_made_from_the_description(case: Any) -> None:
    if isinstance(case.body, dict):
        if isinstance(case.body.get("max_tokens"), int):
            case.body["max_tokens"] = min(case.body["max_tokens"], 8)
        if case.body.get("model") is not None and isinstance(case.body["model"], str):
            case.body["model"] = "tiny"
    case.call_and_validate(checks=CHECKS, timeout=60)
