"""Samples: the target's own tokens, and spans that hold what the assistant wrote and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.core.errors import UsageError
from outrider.train.data import Sample, SampleMaker, check_usable, read_samples
from outrider.train.records import Conversation, Text
from tests.support.training import CHATML, chat_model

CHAT = Conversation(
    (
        {"role": "system", "content": "The fox is quick."},
        {"role": "user", "content": "What does the fox do?"},
        {"role": "assistant", "content": "It jumps over the dog. "},
        {"role": "user", "content": "And the dog?"},
        {"role": "assistant", "content": "It is lazy."},
    )
)


def learned(sample: Sample) -> list[str]:
    tokenizer = chat_model().tokenizer
    assert tokenizer is not None
    return [tokenizer.decode(sample.tokens[a:b], skip_special_tokens=False) for a, b in sample.loss_from]


def test_a_conversation_is_the_templates_text_and_its_answers_are_learned() -> None:
    model = chat_model()
    assert model.tokenizer is not None
    [sample] = SampleMaker(model).make(CHAT)
    assert list(sample.tokens) == model.tokenizer.encode_chat(CHAT.messages, add_generation_prompt=False)
    assert learned(sample) == ["It jumps over the dog.<|im_end|>", "It is lazy.<|im_end|>"]
    assert sample.learned == sum(end - start for start, end in sample.loss_from)


def test_the_end_of_an_answer_that_was_cut_short_is_not_learned() -> None:
    [sample] = SampleMaker(chat_model()).make(Conversation(CHAT.messages, complete=False))
    assert learned(sample) == ["It jumps over the dog.<|im_end|>", "It is lazy."]
    assert sample.loss_from[-1][1] == len(sample.tokens)


def test_turns_after_the_last_answer_are_left_out() -> None:
    asked_again = Conversation((*CHAT.messages, {"role": "user", "content": "Really?"}))
    maker = SampleMaker(chat_model())
    assert maker.make(asked_again) == maker.make(CHAT)


def test_a_long_conversation_is_cut() -> None:
    model = chat_model()
    [whole] = SampleMaker(model).make(CHAT)
    start = whole.loss_from[1][0]
    [cut] = SampleMaker(model, start + 2).make(CHAT)
    assert list(cut.tokens) == list(whole.tokens[: start + 2])
    assert cut.loss_from == [whole.loss_from[0], (start, start + 2)]
    [first] = SampleMaker(model, whole.loss_from[0][1]).make(CHAT)
    assert first.loss_from == [whole.loss_from[0]]


def test_a_long_text_makes_several_samples() -> None:
    model = chat_model()
    assert model.tokenizer is not None
    text = "The quick brown fox jumps over the lazy dog. " * 5
    samples = SampleMaker(model, 16).make(Text(text))
    assert max(len(sample.tokens) for sample in samples) == 16
    assert [token for sample in samples for token in sample.tokens] == model.tokenizer.encode(text)[
        : sum(len(sample.tokens) for sample in samples)
    ]
    assert all(sample.loss_from == [(1, len(sample.tokens))] for sample in samples)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Text("fox"), "nothing to learn from within 512 tokens"),
        (Conversation(({"role": "user", "content": "hm?"},)), "there is no answer in it"),
    ],
)
def test_records_with_nothing_to_learn_from(record: Conversation | Text, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SampleMaker(chat_model()).make(record)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages | length }}" + CHATML, "does not put an answer where it asks for one"),
        (
            "{% for m in messages %}{{ m['content'] if loop.last or m['role'] == 'user' else '...' }}|{% endfor %}",
            "changes what was said before",
        ),
    ],
)
def test_templates_that_do_not_serve(template: str | None, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        SampleMaker(chat_model(template)).make(CHAT)


def test_the_default_length_is_no_more_than_the_models() -> None:
    assert SampleMaker(chat_model()).max_length == 512
    assert SampleMaker(chat_model(max_position=4096)).max_length == 2048


def test_lengths_that_make_no_sense() -> None:
    for length in (0, 7, 513):
        with pytest.raises(UsageError, match=f"max_length={length} must be from 8 to the model's 512 tokens"):
            SampleMaker(chat_model(), length)


def test_files_are_read_up_to_a_number_of_tokens(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    line = json.dumps({"messages": list(CHAT.messages)}) + "\n"
    first.write_text(line + "broken\n" + line)
    second.write_text(json.dumps({"prompt": "why?"}) + "\n" + line)
    maker = SampleMaker(chat_model())
    found = read_samples([first, second], maker)
    assert len(found.samples) == 3
    assert [(bad.number, bad.reason.split(" (")[0]) for bad in found.bad] == [
        (2, "not JSON"),
        (1, "there is no answer in it"),
    ]
    one = len(found.samples[0].tokens)
    assert found.tokens == 3 * one
    assert len(read_samples([first, second], maker, max_tokens=one).samples) == 1
    assert len(read_samples([first, second], maker, max_tokens=one + 1).samples) == 2


def test_no_usable_data_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("broken\n")
    with pytest.raises(UsageError, match=r"data.jsonl holds nothing to learn from \(line 1: not JSON"):
        check_usable(read_samples([path], SampleMaker(chat_model())), "data.jsonl")
    path.write_text("")
    with pytest.raises(UsageError, match="it is empty"):
        check_usable(read_samples([path], SampleMaker(chat_model())), "data.jsonl")
