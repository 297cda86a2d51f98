"""What one client may find out about another, or take from it, over HTTP: nothing, by speed or by counters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from outrider.core.config import SpeculativeConfig
from outrider.core.structured import StructuredOutputs
from outrider.grammar.compiler import Compiler
from tests.serve.support import Running, circling, open_llm, readable, serving, tokenizer

KEYS = ("key-of-a", "key-of-b")
PROMPT = "one two three four five six seven eight nine ten " * 3
SALTS: tuple[str | None, ...] = (None, None, "zz", "zz")


def wordy() -> str:
    """A text of the circle that the target goes round in."""
    return "".join(tokenizer().decode([token]) for token in readable()[100:140])


@pytest.fixture
def shared() -> Iterator[Running]:
    """A server with two keys, whose requests draft from what their tenant has said before and from nothing else."""
    config = SpeculativeConfig(method="suffix+recycle", num_speculative_tokens=8, adaptive=False)
    with serving(open_llm(circling, config), api_key=KEYS) as running:
        yield running
        assert running.settled()


def ask(client: OpenAI, prompt: str = PROMPT, salt: str | None = None, **options: Any) -> Any:
    """The usage of one completion; ``options`` go into the body."""
    extra = {**({"cache_salt": salt} if salt is not None else {}), **options}
    got = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8, extra_body=extra)
    return got.usage


def cached(client: OpenAI, salt: str | None) -> int:
    details = ask(client, salt=salt).prompt_tokens_details
    assert details is not None
    return details.cached_tokens


def test_a_cached_prompt_is_found_by_its_own_tenant_alone(shared: Running) -> None:
    found = len(tokenizer().encode(PROMPT)) - 1
    assert found > 50
    for key in KEYS:
        assert [cached(shared.client(key), salt) for salt in SALTS] == [0, found, 0, found], key


def test_without_a_prefix_cache_nothing_is_found() -> None:
    """The twin of the test above: its figures come from the cache."""
    with serving(open_llm(circling, "none", enable_prefix_caching=False), api_key=KEYS) as running:
        assert [cached(running.client(KEYS[0]), salt) for salt in SALTS] == [0, 0, 0, 0]


def test_an_empty_salt_is_none(shared: Running) -> None:
    client = shared.client(KEYS[0])
    assert cached(client, "") == 0
    assert cached(client, None) > 0


@pytest.mark.parametrize("salts", [0, 40])
def test_what_is_remembered_of_one_key_outlives_any_number_of_salts_of_another(shared: Running, salts: int) -> None:
    a, b = (shared.client(key) for key in KEYS)
    text = wordy()
    first = ask(b, text).speculative["accepted"]
    learned = ask(b, text).speculative["accepted"]
    assert learned > first, "memory does help B, or the test says nothing"
    for number in range(salts):
        ask(a, text, salt=str(number))
    assert ask(b, text).speculative["accepted"] == learned


def test_what_one_key_was_answered_under_a_schema_changes_nothing_for_another(shared: Running) -> None:
    """A has had the very same answer, held to the same schema; then B asks, in the same server and in a fresh one."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}

    def asked(client: OpenAI) -> tuple[str, int, int]:
        got = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": PROMPT}],
            temperature=0,
            max_tokens=24,
            response_format=wanted,  # type: ignore[arg-type]
        )
        statistics = got.usage.speculative  # type: ignore[union-attr]
        return got.choices[0].message.content or "", statistics["drafted"], statistics["accepted"]

    a, b = (shared.client(key) for key in KEYS)
    first, *_, learned = [asked(a) for _ in range(4)]
    assert learned[2] > first[2], "memory does help A, or the test says nothing"
    assert asked(b) == first


def test_a_key_that_makes_up_salts_pushes_out_its_own_memories(shared: Running) -> None:
    a = shared.client(KEYS[0])
    text = wordy()
    first, learned = (ask(a, text, salt="first").speculative["accepted"] for _ in range(2))
    for number in range(40):
        ask(a, text, salt=str(number))
    assert ask(a, text, salt="first").speculative["accepted"] == first < learned


def test_what_one_tenant_compiled_is_not_there_for_another(shared: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[StructuredOutputs] = []
    plain = Compiler._compile

    def counted(self: Compiler, spec: StructuredOutputs) -> Any:
        compiled.append(spec)
        return plain(self, spec)

    monkeypatch.setattr(Compiler, "_compile", counted)
    counts = []
    for key, salt in ((KEYS[0], None), (KEYS[0], None), (KEYS[0], "b"), (KEYS[1], None), (KEYS[1], None)):
        ask(shared.client(key), salt=salt, regex="[a-f]{3,9}")
        counts.append(len(compiled))
    assert counts == [1, 1, 2, 3, 3]
    assert {spec.regex for spec in compiled} == {"[a-f]{3,9}"}
