"""Keys, sizes, times and numbers."""

from __future__ import annotations

import http.client
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import APIStatusError, AuthenticationError, RateLimitError

from outrider.core.errors import ConfigError
from outrider.serve.auth import load_keys, tenant_of
from outrider.serve.config import ServerConfig
from tests.serve.support import endless, get, open_llm, post, serving

BODY = {"model": "tiny", "prompt": "x", "max_tokens": 2}


def test_keys_come_from_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\n  second \n")
    monkeypatch.setenv("OUTRIDER_API_KEY", "third, fourth")
    config = ServerConfig(api_key=["zeroth", "first"], api_key_file=str(file))
    assert load_keys(config) == ("zeroth", "first", "second", "third", "fourth")


@pytest.mark.parametrize(
    ("text", "words"), [("\n", "holds no key"), ("two words", "without spaces"), ("schlüssel", "ASCII")]
)
def test_a_key_that_no_header_can_carry(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_keys(ServerConfig(api_key_file=str(tmp_path / "keys")))


def test_a_key_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_keys(ServerConfig(api_key_file=str(tmp_path / "none")))


def test_keys_are_needed_where_there_are_some() -> None:
    with serving(open_llm(), api_key=["one", "two"]) as running:
        for key in ("one", "two"):
            assert running.client(key).completions.create(model="tiny", prompt="x", max_tokens=1).choices
        for key in ("three", "on", "onetwo"):
            with pytest.raises(AuthenticationError):
                running.client(key).models.list()
        for path in ("/v1/completions", "/tokenize", "/detokenize", "/v1/chat/completions"):
            status, headers, answer = post(running, path, {})
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
            assert answer["error"]["code"] == "invalid_api_key"
        assert post(running, "/v1/completions", BODY, {"Authorization": "Basic one"})[0] == 401
        assert post(running, "/v1/completions", BODY, {"Authorization": "bearer two"})[0] == 200
        assert [get(running, path)[0] for path in ("/v1/models", "/health", "/ready")] == [401, 200, 200]
        assert running.metrics()


def test_a_tenant_is_a_key_and_a_salt() -> None:
    names = {tenant_of(key, salt) for key in ("", "a", "b") for salt in (None, "a", "b")}
    assert len(names) == 9
    assert tenant_of("ab", "c") != tenant_of("a", "bc")
    assert tenant_of("a", "") == tenant_of("a", None) == tenant_of("a", None)
    assert "secret" not in tenant_of("secret", "secret")


def test_bodies_have_a_limit() -> None:
    with serving(open_llm(), max_body_bytes=1000) as running:
        status, _, answer = post(running, "/v1/completions", {**BODY, "prompt": "x" * 2000})
        assert (status, "1000 bytes" in answer["error"]["message"]) == (413, True)
        # Without a length in front, too.
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        chunks = [b"x" * 400 for _ in range(5)]
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        connection.request("POST", "/v1/completions", iter(chunks), headers, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        assert post(running, "/v1/completions", BODY)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_web_page_cannot_send_what_is_read(kind: str) -> None:
    with serving(open_llm()) as running:
        assert post(running, "/v1/completions", BODY, {"Content-Type": kind})[0] == 415
        assert post(running, "/v1/completions", BODY, {"Content-Type": "application/json; charset=utf-8"})[0] == 200


def test_cross_origin_requests_are_off_unless_asked_for() -> None:
    import urllib.request

    for origins, allowed in (([], None), (["https://a.example"], "https://a.example")):
        with serving(open_llm(), cors_origin=origins) as running:
            request = urllib.request.Request(f"{running.url}/health", headers={"Origin": "https://a.example"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.headers["access-control-allow-origin"] == allowed


def test_prompts_have_a_limit() -> None:
    with serving(open_llm(), max_prompt_tokens=5) as running:
        assert post(running, "/v1/completions", {**BODY, "prompt": [[1, 2, 3, 4, 5]]})[0] == 200
        status, _, answer = post(running, "/v1/completions", {**BODY, "prompt": [[1], [1, 2, 3, 4, 5, 6]]})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_answers_of_one_request_have_a_limit() -> None:
    with serving(open_llm(), max_choices=4) as running:
        assert post(running, "/v1/completions", {**BODY, "prompt": ["a", "b"], "n": 2})[0] == 200
        assert post(running, "/v1/completions", {**BODY, "prompt": ["a", "b", "c"], "n": 2})[0] == 400
        assert post(running, "/v1/completions", {**BODY, "n": 5})[0] == 400


def test_a_busy_server_says_when_to_come_again() -> None:
    with serving(open_llm(endless), max_concurrent_requests=3) as running:
        running.target.pause = 0.02
        client = running.client()
        streams = [client.completions.create(model="tiny", prompt="x", max_tokens=300, stream=True) for _ in range(3)]
        with pytest.raises(RateLimitError) as raised:
            client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert raised.value.response.headers["retry-after"] == "1"
        assert raised.value.type == "rate_limit_error"
        streams[0].close()
        for _ in range(500):
            if running.service.engine.in_flight < 3:
                break
            threading.Event().wait(0.01)
        assert client.completions.create(model="tiny", prompt="x", max_tokens=1).choices
        for stream in streams:
            stream.close()
        assert running.settled()


def test_one_key_cannot_take_what_there_is_for_all() -> None:
    limits = {"max_concurrent_requests": 4, "max_requests_per_key": 2}
    with serving(open_llm(endless, max_batch_size=1), api_key=["a", "b"], **limits) as running:
        running.target.pause = 0.02
        greedy, other = running.client("a"), running.client("b")
        stream = greedy.completions.create(model="tiny", prompt="x", max_tokens=200, n=2, stream=True)
        while running.service.engine.in_flight < 2:
            threading.Event().wait(0.01)
        with pytest.raises(RateLimitError, match="this API key has 2 answers") as raised:
            greedy.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert raised.value.response.headers["retry-after"] == "1"
        assert other.completions.create(model="tiny", prompt="x", max_tokens=1, n=2).choices
        with pytest.raises(RateLimitError, match="this API key has 0 answers"):
            other.completions.create(model="tiny", prompt="x", max_tokens=1, n=3)
        stream.close()
        assert running.settled()
        assert greedy.completions.create(model="tiny", prompt="x", max_tokens=1).choices


def test_a_key_with_a_long_queue_does_not_keep_another_waiting() -> None:
    with serving(open_llm(endless, "none", max_batch_size=1), api_key=["a", "b"]) as running:
        running.target.pause = 0.02
        ended: list[str] = []

        def ask(key: str) -> None:
            running.client(key).completions.create(model="tiny", prompt="x", max_tokens=5)
            ended.append(key)

        with ThreadPoolExecutor(21) as pool:
            asked = [pool.submit(ask, "a") for _ in range(20)]
            while running.service.engine.in_flight + len(ended) < 20:
                threading.Event().wait(0.001)
            running.target.pause = 1.0  # so that nothing ends while the other arrives
            before = len(ended)
            asked.append(pool.submit(ask, "b"))
            while running.service.engine.in_flight + len(ended) < 21:
                threading.Event().wait(0.001)
            running.target.pause = 0.01
            for answer in asked:
                answer.result()
        assert ended.index("b") <= before + 5, ended


def test_requests_that_are_made_ready_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with serving(open_llm(), max_concurrent_requests=2) as running, ThreadPoolExecutor(2) as pool:
        prepare = running.service._requests
        monkeypatch.setattr(running.service, "_requests", lambda *given: (go_on.wait(30), prepare(*given))[1])
        slow = [pool.submit(post, running, "/v1/completions", BODY) for _ in range(2)]
        for _ in range(500):
            if running.service._preparing.total() == 2:
                break
            threading.Event().wait(0.01)
        assert post(running, "/v1/completions", BODY)[0] == 429
        go_on.set()
        assert [answer.result()[0] for answer in slow] == [200, 200]
        assert post(running, "/v1/completions", BODY)[0] == 200


DEAR = "(([a-z]{1,50}){1,50}|([a-z ]{1,50}){1,50}){1,50}"


def test_a_grammar_that_would_keep_all_waiting_is_refused_at_once() -> None:
    with serving(open_llm()) as running:
        schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": f"^{DEAR}$"}}}
        shaped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "response_format": shaped}
        for path, body, param in (
            ("/v1/completions", {**BODY, "regex": DEAR}, "regex"),
            ("/v1/completions", {**BODY, "grammar": 'root ::= ([a-z]+ " "?)+'}, "grammar"),
            ("/v1/chat/completions", chat, "response_format"),
        ):
            status, _, answer = post(running, path, body)
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "invalid_value")
            assert "let it end in something else" in answer["error"]["message"]
        assert post(running, "/v1/completions", {**BODY, "regex": "([a-z]+ )*"})[0] == 200


def test_compilers_that_are_stuck_count_until_they_end_and_hold_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    with serving(open_llm(), request_timeout=0.4, max_concurrent_requests=6) as running:
        adapter = running.service.adapter
        compiled = adapter.sampling_params

        def slow(values: object, structure: object, param: str, tenant: str) -> object:
            if structure is not None:
                assert go_on.wait(30)
            return compiled(values, structure, param, tenant)  # type: ignore[arg-type]

        monkeypatch.setattr(adapter, "sampling_params", slow)
        constrained = {**BODY, "regex": "[a-z]"}
        with ThreadPoolExecutor(5) as pool:
            answers = [pool.submit(post, running, "/v1/completions", constrained) for _ in range(5)]
            assert [answer.result()[0] for answer in answers] == [504] * 5
        for _ in range(500):  # they are counted off in the server's loop, soon after their answer
            if (stuck := running.service._preparing.total()) < 5:
                break
            threading.Event().wait(0.01)
        assert 0 < stuck < 5, "those that had no thread yet are dropped"
        assert post(running, "/v1/completions", BODY)[0] == 200, "what needs no grammar has a thread"
        assert post(running, "/v1/completions", {**BODY, "n": 6 - stuck + 1})[0] == 429
        go_on.set()
        for _ in range(500):
            if not running.service._preparing.total():
                break
            threading.Event().wait(0.01)
        assert post(running, "/v1/completions", {**BODY, "n": 6})[0] == 200
        assert post(running, "/v1/completions", constrained)[0] == 200


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_has_a_time(stream: bool) -> None:
    with serving(open_llm(endless), request_timeout=0.5) as running:
        running.target.pause = 0.02
        client = running.client()

        def ask() -> None:
            answer = client.completions.create(model="tiny", prompt="x", max_tokens=400, stream=stream)
            for _ in answer if stream else ():
                pass

        with pytest.raises(Exception, match=r"more than the 0\.5 seconds") as raised:
            ask()
        if not stream:
            assert isinstance(raised.value, APIStatusError)
            assert raised.value.status_code == 504
            assert raised.value.response.headers["x-should-retry"] == "false"
        assert running.settled()


def test_a_request_that_is_not_made_ready_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar may take longer to compile than the request has."""
    go_on = threading.Event()
    with serving(open_llm(), request_timeout=0.3) as running:
        monkeypatch.setattr(running.service.adapter, "sampling_params", lambda *_: go_on.wait(30))
        assert post(running, "/v1/completions", {"model": "tiny", "prompt": "x"})[0] == 504
        go_on.set()
        assert running.service.engine.in_flight == 0


def test_a_body_that_does_not_come_in_time() -> None:
    with serving(open_llm(), request_timeout=0.3) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", "100")
        connection.endheaders(b'{"model"')
        assert connection.getresponse().status == 504
        connection.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"port": 70000}, "port=70000"),
        ({"host": ""}, "host is empty"),
        ({"max_choices": 0}, "max_choices=0"),
        ({"max_requests_per_key": 0}, "max_requests_per_key=0"),
        ({"min_priority": 1}, "min_priority=1"),
        ({"request_timeout": 0}, "request_timeout=0"),
        ({"drain_timeout": float("nan")}, "drain_timeout=nan"),
        ({"api_key": ["a", ""]}, "api_key holds an empty entry"),
    ],
)
def test_settings_check_themselves(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerConfig(**settings)  # type: ignore[arg-type]


def test_what_only_this_machine_can_reach() -> None:
    local = [ServerConfig(host=host).is_local for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    assert local == [True, True, True, False, False]
    assert ServerConfig().is_local
