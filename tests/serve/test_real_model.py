"""The default model behind the server, as a process started from the command line."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from openai import OpenAI

from outrider import LLM, SamplingParams
from outrider.models.aliases import ALIASES
from outrider.models.fetch import fetch

MODEL = "smollm2-135m"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    fetch(ALIASES[MODEL], progress=False)
    words = [sys.executable, "-m", "outrider", "serve", MODEL, "--port", "0", "--max-context", "1024", "--api-key", "k"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.search(r"http://\S+", line)
    assert found is not None, line
    yield OpenAI(base_url=found[0], api_key="k", max_retries=0)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_it_says_what_the_python_api_says(client: OpenAI) -> None:
    llm = LLM(MODEL, "none")
    messages = [{"role": "user", "content": "Repeat three times: the quick brown fox."}]
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 4}):
        right = llm.chat(messages, SamplingParams(max_tokens=24, **options))[0].text  # type: ignore[arg-type]
        got = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, **options)  # type: ignore[call-overload]
        assert got.choices[0].message.content == right
        stream = client.chat.completions.create(
            **{"model": MODEL, "messages": messages, "max_tokens": 24, "stream": True, **options}  # type: ignore[call-overload]
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == right
