"""/v1/completions through OpenAI's own client: every option gives what the engine alone gives for it."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from outrider import LLM, SamplingParams
from tests.serve.support import tokenizer

PROMPT = "The quick brown fox"

OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "default temperature": ({"seed": 7}, {"temperature": 1.0, "seed": 7}),
    "negative seed": ({"seed": -3}, {"temperature": 1.0, "seed": 2**64 - 3}),
    "top_p": ({"seed": 1, "top_p": 0.5}, {"temperature": 1.0, "seed": 1, "top_p": 0.5}),
    "temperature": ({"seed": 1, "temperature": 1.7}, {"temperature": 1.7, "seed": 1}),
    "penalties": (
        {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    ),
    "logit_bias": ({"temperature": 0, "logit_bias": {"330": 50}}, {"logit_bias": {330: 50}}),
    "top_k": ({"seed": 4, "extra_body": {"top_k": 3}}, {"temperature": 1.0, "seed": 4, "top_k": 3}),
    "top_k off": ({"seed": 4, "extra_body": {"top_k": -1}}, {"temperature": 1.0, "seed": 4}),
    "min_p": ({"seed": 4, "extra_body": {"min_p": 0.2}}, {"temperature": 1.0, "seed": 4, "min_p": 0.2}),
    "repetition": ({"temperature": 0, "extra_body": {"repetition_penalty": 1.4}}, {"repetition_penalty": 1.4}),
    "min_tokens": (
        {"seed": 3, "logit_bias": {"2": 20}, "extra_body": {"min_tokens": 9}},
        {"temperature": 1.0, "seed": 3, "logit_bias": {2: 20}, "min_tokens": 9},
    ),
    "ignore_eos": (
        {"seed": 3, "logit_bias": {"2": 20}, "extra_body": {"ignore_eos": True}},
        {"temperature": 1.0, "seed": 3, "logit_bias": {2: 20}, "ignore_eos": True},
    ),
    "special tokens": (
        {"seed": 3, "logit_bias": {"2": 20}, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}},
        {"temperature": 1.0, "seed": 3, "logit_bias": {2: 20}, "ignore_eos": True, "skip_special_tokens": False},
    ),
    "stop token": (
        {"temperature": 0, "logit_bias": {"330": 50}, "extra_body": {"stop_token_ids": [330]}},
        {"logit_bias": {330: 50}, "stop_token_ids": [330]},
    ),
    "harmless": ({"temperature": 0, "user": "someone", "extra_body": {"cache_salt": "a"}}, {}),
}


def expected(plain: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    return plain.generate(prompt, SamplingParams(**{"max_tokens": 40, **params}))[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_does_what_it_does_in_the_engine(client: OpenAI, plain: LLM, name: str, stream: bool) -> None:
    options, params = OPTIONS[name]
    right = expected(plain, **params)
    answer: Any = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=40, stream=stream, **options)
    if stream:
        chunks = list(answer)
        text = "".join(chunk.choices[0].text for chunk in chunks)
        last = chunks[-1].choices[0]
    else:
        last = answer.choices[0]
        text = last.text
        assert answer.usage.completion_tokens == len(right.token_ids)
        assert answer.usage.prompt_tokens == len(right.prompt_token_ids)
    assert text == right.text
    assert (last.finish_reason, last.stop_reason) == (right.finish_reason, right.stop_reason)


def test_the_options_are_told_apart() -> None:
    """Twins that must differ: were an option dropped, its test could still pass if it changed nothing."""
    from tests.serve.support import open_llm

    llm = open_llm(config="none")
    texts = {
        name: (output := expected(llm, **params)).text + str(output.finish_reason)
        for name, (_, params) in OPTIONS.items()
    }
    same = {"harmless": "greedy", "top_k off": None, "default temperature": None}
    for name, text in texts.items():
        for other, other_text in texts.items():
            assert name == other or same.get(name) == other or same.get(other) == name or text != other_text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("place", range(1, 12, 3))
def test_a_stop_string_ends_the_text_wherever_it_begins_and_ends(
    client: OpenAI, plain: LLM, place: int, stream: bool
) -> None:
    text = expected(plain).text
    stop = text[place : place + 4]
    assert len(stop) == 4
    answer: Any = client.completions.create(
        model="tiny", prompt=PROMPT, temperature=0, max_tokens=40, stop=[stop, "never there"], stream=stream
    )
    if stream:
        pieces = [chunk.choices[0] for chunk in answer]
        found, last = "".join(piece.text for piece in pieces), pieces[-1]
    else:
        found, last = answer.choices[0].text, answer.choices[0]
    assert found == text[: text.index(stop)]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)


def test_the_stop_string_can_be_kept(client: OpenAI, plain: LLM) -> None:
    text = expected(plain).text
    answer = client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 40, "stop": text[5:8]},
        extra_body={"include_stop_str_in_output": True},
    )
    assert answer.choices[0].text == text[: text.index(text[5:8]) + 3]


def test_every_form_of_a_prompt(client: OpenAI, plain: LLM) -> None:
    texts = ["The quick", "def f(x):"]
    ids = [tokenizer().encode(text) for text in texts]
    right = [expected(plain, text, max_tokens=8).text for text in texts]
    for prompt, answers in ((texts[0], right[:1]), (texts, right), (ids[0], right[:1]), (ids, right)):
        got = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=8)
        assert [choice.text for choice in got.choices] == answers
        assert [choice.index for choice in got.choices] == list(range(len(answers)))
        assert got.usage is not None
        assert got.usage.prompt_tokens == sum(map(len, ids[: len(answers)]))


def test_default_is_sixteen_tokens(client: OpenAI) -> None:
    got = client.completions.create(model="tiny", prompt=PROMPT, temperature=0)
    assert got.usage is not None
    assert got.usage.completion_tokens == 16


def test_several_answers_have_seeds_that_follow_each_other(client: OpenAI, plain: LLM) -> None:
    got = client.completions.create(model="tiny", prompt=["a", "b"], n=3, best_of=3, seed=40, max_tokens=6)
    assert len({choice.text for choice in got.choices}) > 1
    for choice in got.choices:
        seed = 40 + choice.index % 3
        right = expected(plain, "ab"[choice.index // 3], temperature=1.0, seed=seed, max_tokens=6)
        assert (choice.text, choice.seed) == (right.text, seed)  # type: ignore[attr-defined]
    assert got.usage is not None
    assert got.usage.prompt_tokens == 2


def test_the_seed_that_was_drawn_gives_the_text_again(client: OpenAI) -> None:
    first = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20).choices[0]
    seed = first.seed  # type: ignore[attr-defined]
    again = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=seed)
    assert again.choices[0].text == first.text


@pytest.mark.parametrize("prompt", [PROMPT, tokenizer().encode(PROMPT)], ids=["text", "ids"])
def test_echo(client: OpenAI, plain: LLM, prompt: Any) -> None:
    right = PROMPT + expected(plain, max_tokens=8).text
    options = {"model": "tiny", "prompt": prompt, "echo": True, "temperature": 0, "max_tokens": 8}
    assert client.completions.create(**options).choices[0].text == right
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**options, stream=True)) == right


def test_logprobs_are_those_of_plain_decoding(client: OpenAI, plain: LLM) -> None:
    right = expected(plain, max_tokens=12, logprobs=3)
    options = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 3}
    whole = client.completions.create(**options).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.token_logprobs == [entry.logprob for entry in right.logprobs]
    assert whole.logprobs.tokens == [tokenizer().token_bytes(token).decode() for token in right.token_ids]
    assert "".join(whole.logprobs.tokens or []) == whole.text
    for token, offset in zip(whole.logprobs.tokens or [], whole.logprobs.text_offset or [], strict=True):
        assert whole.text[offset : offset + len(token)] == token
    tops = whole.logprobs.top_logprobs or []
    assert [sorted(top.values(), reverse=True) for top in tops] == [[v for _, v in e.top] for e in right.logprobs]
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in client.completions.create(**options, stream=True):
        for name, found in streamed.items():
            found.extend(getattr(chunk.choices[0].logprobs, name))
    assert streamed == {name: getattr(whole.logprobs, name) for name in streamed}


def test_logprobs_zero_is_the_token_alone(client: OpenAI) -> None:
    got = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, logprobs=0).choices[0].logprobs
    assert got is not None
    assert [len(top) for top in got.top_logprobs or []] == [1, 1, 1]


def test_a_stream_ends_with_usage_if_asked(client: OpenAI) -> None:
    options = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 9, "stream": True}
    assert all(chunk.usage is None for chunk in client.completions.create(**options))
    chunks = list(client.completions.create(**options, stream_options={"include_usage": True}))
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_says_what_speculation_did(client: OpenAI) -> None:
    got = client.completions.create(model="tiny", prompt="a b a b a b", temperature=0, max_tokens=100)
    assert got.usage is not None
    assert got.usage.prompt_tokens_details is not None
    assert 0 <= (got.usage.prompt_tokens_details.cached_tokens or 0) < got.usage.prompt_tokens
    stats = got.usage.speculative  # type: ignore[attr-defined]
    assert 0 < stats["drafted"] <= sum(stats["drafted_by_source"].values())
    assert stats["accepted"] == sum(stats["accepted_by_position"])
    assert stats["mean_acceptance_length"] == 100 / stats["rounds"]
    assert stats["lossy"] is False


@pytest.mark.parametrize(
    ("options", "param", "words"),
    [
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"n": 1, "best_of": 2}, "best_of", "ask for n answers"),
        ({"echo": True, "logprobs": 1}, "echo", "log-probabilities"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream=true"),
        ({"prompt": ""}, None, "no tokens"),
        ({"prompt": [[]]}, "prompt", "at least 1 item"),
        ({"prompt": 3}, "prompt", "none of the forms"),
        ({"prompt": [9999]}, None, "vocabulary ends"),
        ({"prompt": "a " * 600}, None, "the context holds 256"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 17}, "n", "17 answers"),
        ({"stop": [""]}, "stop", ""),
        ({"logit_bias": {"x": 1}}, None, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, None, "vocabulary ends"),
        ({"extra_body": {"temprature": 1}}, "temprature", "did you mean 'temperature'?"),
        ({"extra_body": {"min_tokens": 99}}, None, "more than max_tokens"),
        ({"extra_body": {"regex": "["}}, "regex", ""),
        ({"extra_body": {"speculative": {}}}, "speculative", "needs method"),
        ({"extra_body": {"speculative": {"method": "ngram+ngram"}}}, "speculative", "twice"),
        ({"extra_body": {"speculative": {"metod": "none"}}}, "metod", "did you mean 'method'?"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: OpenAI, options: dict[str, Any], param: str | None, words: str
) -> None:
    with pytest.raises(BadRequestError) as raised:
        client.completions.create(**{"model": "tiny", "prompt": "a", **options})
    assert words in raised.value.message
    assert raised.value.param == param
    assert raised.value.type == "invalid_request_error"


def test_another_model_is_not_here(client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="this server has tiny"):
        client.completions.create(model="gpt-4", prompt="a")


@pytest.mark.parametrize("prompt", ["", [99_999_999]])
def test_a_prompt_that_is_none_is_not_said_to_be_too_long(client: OpenAI, prompt: Any) -> None:
    with pytest.raises(BadRequestError) as error:
        client.completions.create(model="tiny", prompt=prompt)
    assert error.value.code == "invalid_value"
