"""Samples: the target's own tokens, and spans that hold what the assistant wrote and nothing else."""

from __future__ import annotations

import pytest

from outrider.core.errors import UsageError
from outrider.train.data import Sample, SampleMaker, check_usable, make_samples
from outrider.train.records import BadLine, Conversation, Line, Text
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


def test_lines_are_read_up_to_a_number_of_tokens() -> None:
    bad = BadLine("a.jsonl", 2, "not JSON")
    unanswered = Conversation(({"role": "user", "content": "hm?"},))
    lines = [Line("a.jsonl", 1, CHAT), bad, Line("a.jsonl", 3, CHAT), Line("b.jsonl", 1, unanswered)]
    maker = SampleMaker(chat_model())
    found = make_samples(lines, maker)
    assert len(found.samples) == 2
    assert found.bad == [bad, BadLine("b.jsonl", 1, "there is no answer in it")]
    one = len(found.samples[0].tokens)
    assert found.tokens == 2 * one
    assert len(make_samples(lines, maker, max_tokens=one).samples) == 1
    assert len(make_samples(lines, maker, max_tokens=one + 1).samples) == 2


def test_no_usable_data_is_one_clear_error() -> None:
    maker = SampleMaker(chat_model())
    with pytest.raises(UsageError, match=r"nothing to learn from \(a.jsonl, line 7: not JSON\)"):
        check_usable(make_samples([BadLine("a.jsonl", 7, "not JSON")], maker))
    with pytest.raises(UsageError, match="there is not one line"):
        check_usable(make_samples([], maker))
