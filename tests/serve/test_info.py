"""Models, tokens, health and readiness."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from outrider.serve import routes_info
from outrider.serve.texts import token_text
from tests.serve.support import Running, get, open_llm, post, serving, tokenizer


def test_models(client: OpenAI) -> None:
    assert [card.id for card in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 256  # type: ignore[attr-defined]
    with pytest.raises(NotFoundError):
        client.models.retrieve("other")


def test_other_names_for_the_model() -> None:
    with serving(open_llm(), served_model_name=["a/b", "c"]) as running:
        client = running.client()
        assert [card.id for card in client.models.list()] == ["a/b", "c"]
        assert client.models.retrieve("a/b").id == "a/b"
        assert client.completions.create(model="c", prompt="x", max_tokens=1).model == "c"
        with pytest.raises(NotFoundError):
            client.completions.create(model="tiny", prompt="x")


@pytest.mark.parametrize("text", ["The quick brown fox", "日本 🎉\n", ""])
def test_tokenize_and_back(server: Running, text: str) -> None:
    status, _, found = post(server, "/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True})
    assert status == 200
    assert found["tokens"] == tokenizer().encode(text)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert post(server, "/detokenize", {"tokens": found["tokens"]})[2] == {"prompt": text}


def test_tokens_are_spelled_out_beside_the_event_loop(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be millions of them, and every stream would stand still meanwhile."""
    threads: set[str] = set()

    def spied(*given: Any) -> str:
        threads.add(threading.current_thread().name)
        return token_text(*given)

    monkeypatch.setattr(routes_info, "token_text", spied)
    assert post(server, "/tokenize", {"prompt": "a b c", "return_token_strs": True})[0] == 200
    assert threads
    assert all(name.startswith("encode") for name in threads)


def test_tokenize_a_conversation(server: Running) -> None:
    messages = [{"role": "user", "content": "hi"}]
    status, _, found = post(server, "/tokenize", {"messages": messages})
    assert (status, found["tokens"]) == (200, tokenizer().encode_chat(messages))
    shorter = post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False})[2]
    assert found["tokens"][: shorter["count"]] == shorter["tokens"] != found["tokens"]
    assert "<|im_start|>user\nhi" in post(server, "/detokenize", {"tokens": found["tokens"]})[2]["prompt"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}),
        ("/detokenize", {"tokens": [99999]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "abc"}),
    ],
)
def test_bad_tokens(server: Running, path: str, body: dict[str, object]) -> None:
    status, _, found = post(server, path, body)
    assert status == 400
    assert found["error"]["message"]


def test_health_and_readiness(server: Running) -> None:
    assert get(server, "/health") == (200, {"status": "ok"})
    assert get(server, "/ready") == (200, {"status": "ready"})


def test_unknown_paths_and_methods(server: Running) -> None:
    status, found = get(server, "/v1/embeddings")
    assert (status, found["error"]["code"]) == (404, "not_found")
    status, found = get(server, "/v1/completions")
    assert status == 405
    assert "has no GET" in found["error"]["message"]


def test_no_pages_that_load_scripts_from_elsewhere(server: Running) -> None:
    assert get(server, "/docs")[0] == get(server, "/redoc")[0] == 404
