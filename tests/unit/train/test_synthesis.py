"""Conversations that a model writes itself: the same whatever the batch, filtered, and gone on with after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from outrider.core.errors import OutriderError, UsageError
from outrider.engine.llm import LLM
from outrider.train import synthesis
from outrider.train.journal import Journal
from outrider.train.records import Conversation
from outrider.train.synthesis import (
    Author,
    Plan,
    SynthesisSettings,
    Written,
    answer_plans,
    own_plans,
    synthesize,
)
from tests.support.training import wordy_llm

SETTINGS = SynthesisSettings(answer_tokens=24, question_tokens=16, temperature=0.9, seed=3)
MADE_WITH = {"seed": 3}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return wordy_llm()


def write(llm: LLM, plans: Iterator[Plan], batch: int = 4) -> list[Written]:
    return list(Author(llm, SETTINGS, batch).write(plans))


def make(llm: LLM, path: Path, wanted: int, batch: int = 4) -> Journal:
    with Journal(path, MADE_WITH) as journal:
        synthesize(Author(llm, SETTINGS, batch), own_plans(journal.next), journal, wanted)
    return journal


def test_both_sides_are_the_models_own_text(llm: LLM) -> None:
    found = write(llm, islice(own_plans(0), 12))
    assert [written.plan.number for written in found] == list(range(12))
    usable = [written for written in found if written.dropped is None]
    assert usable
    for written in usable:
        roles = [message["role"] for message in written.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        question = llm.generate("<|im_start|>user\n", _question_params(llm, written), use_tqdm=False)[0]
        assert question.text.strip() == written.messages[0]["content"]
        answer = llm.chat(written.messages[:1], _answer_params(llm, written), use_tqdm=False)[0]
        assert answer.text.strip() == written.messages[1]["content"]
    assert {written.temperature for written in found} == {0.0, 0.9}


def _question_params(llm: LLM, written: Written) -> object:
    return Author(llm, SETTINGS, 1)._params(Written(written.plan, written.temperature))


def _answer_params(llm: LLM, written: Written) -> object:
    asked = Written(written.plan, written.temperature, written.messages[:1])
    return Author(llm, SETTINGS, 1)._params(asked)


def test_every_fifth_goes_on_for_a_second_turn() -> None:
    assert [len(plan.questions) for plan in islice(own_plans(3), 7)] == [1, 2, 1, 1, 1, 1, 2]


def test_the_batch_changes_nothing(llm: LLM) -> None:
    one, many = (write(llm, islice(own_plans(0), 10), batch) for batch in (1, 7))
    assert [written.messages for written in one] == [written.messages for written in many]
    assert [written.dropped for written in one] == [written.dropped for written in many]


def test_questions_that_are_given_are_answered_turn_by_turn(llm: LLM) -> None:
    system = {"role": "system", "content": "The fox is quick."}
    asked = Conversation((system, *({"role": "user", "content": text} for text in ("Who jumps?", "And then?"))))
    [plan] = answer_plans([asked])
    assert plan == Plan(0, ("Who jumps?", "And then?"), (system,))
    for number in range(20):
        [written] = write(llm, iter([Plan(number, plan.questions, plan.opening)]))
        if written.dropped is None and written.complete:
            break
    roles = [message["role"] for message in written.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in written.messages if m["role"] == "user"] == ["Who jumps?", "And then?"]


def test_an_answer_cut_at_the_limit_is_the_last_and_says_so(llm: LLM) -> None:
    found = [w for w in write(llm, (Plan(n, ("Who?", "Why?")) for n in range(12))) if not w.complete]
    assert found
    for written in found:
        assert written.ended
        assert written.messages[-1]["role"] == "assistant"


def test_a_question_without_an_end_or_too_long_for_the_model_is_dropped(llm: LLM) -> None:
    settings = SynthesisSettings(question_tokens=4)
    found = list(Author(llm, settings, 4).write(islice(own_plans(0), 4)))
    assert {written.dropped for written in found} <= {"a question without an end", "too short", "empty"}
    [written] = write(llm, iter([Plan(0, ("the fox " * 100,))]))
    assert written.dropped == "too long"


def test_answers_of_tools_cannot_be_made_up() -> None:
    messages = ({"role": "user", "content": "?"}, {"role": "tool", "content": "3"})
    with pytest.raises(UsageError, match="results of tools"):
        answer_plans([Conversation(messages)])


def test_as_many_as_wanted_are_kept_and_more_can_follow(llm: LLM, tmp_path: Path) -> None:
    few = make(llm, tmp_path / "own.jsonl", 3)
    assert few.kept == 3
    before = (tmp_path / "own.jsonl").read_bytes()
    assert make(llm, tmp_path / "own.jsonl", 3).kept == 3
    assert (tmp_path / "own.jsonl").read_bytes() == before
    make(llm, tmp_path / "own.jsonl", 6)
    make(llm, tmp_path / "once.jsonl", 6, batch=2)
    assert (tmp_path / "own.jsonl").read_bytes() == (tmp_path / "once.jsonl").read_bytes()
    state, once = (json.loads((tmp_path / name).read_text()) for name in ("own.state.json", "once.state.json"))
    assert state == once


def test_two_that_ask_the_same_are_one(llm: LLM, tmp_path: Path) -> None:
    question = {"role": "user", "content": "Who jumps?"}
    with Journal(tmp_path / "j.jsonl", {}) as journal:
        assert journal.keep(0, (question, {"role": "assistant", "content": "a fox"}))
        assert not journal.keep(4, (question, {"role": "assistant", "content": "a dog"}))
        assert (journal.kept, journal.next) == (1, 5)
        assert journal.dropped == {"asks what another one asks": 1}


KILLED = """
import sys
from pathlib import Path
from tests.unit.train.test_synthesis import make, wordy_llm
from outrider.train import journal
settle = journal.Journal._settle
def told(self, number):
    print("settled", flush=True)
    settle(self, number)
journal.Journal._settle = told
make(wordy_llm(), Path(sys.argv[1]), 1000)
"""


def test_a_killed_synthesis_is_gone_on_with_to_the_same_texts(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "killed.jsonl"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(9):
            assert process.stdout.readline() == "settled\n"
        process.send_signal(signal.SIGKILL)
    kept = path.read_bytes().count(b"\n")
    assert kept > 0
    with path.open("ab") as file:
        file.write(b'{"id": 99, "mess')
    make(llm, path, kept + 5)
    make(llm, tmp_path / "whole.jsonl", kept + 5)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_journal_in_which_nothing_is_settled_yet_is_gone_on_with(tmp_path: Path) -> None:
    for _ in range(2):
        with Journal(tmp_path / "j.jsonl", {"seed": 2}) as journal:
            assert (journal.next, journal.kept) == (0, 0)


def test_a_journal_that_is_behind_its_file_believes_the_file(tmp_path: Path) -> None:
    said = ({"role": "user", "content": "Who?"}, {"role": "assistant", "content": "a fox"})
    with Journal(tmp_path / "j.jsonl", {}) as journal:
        journal.keep(0, said)
        state = (tmp_path / "j.state.json").read_bytes()
        journal.keep(3, ({"role": "user", "content": "Why?"}, said[1]))
    (tmp_path / "j.state.json").write_bytes(state)
    with Journal(tmp_path / "j.jsonl", {}) as journal:
        assert (journal.next, journal.kept) == (4, 2)


@pytest.mark.parametrize(
    ("state", "line", "message"),
    [
        (None, '{"id": 0, "messages": []}\n', "was not written by this command"),
        ({"settings": {"seed": 1}, "next": 1, "dropped": {}}, "", r"was made with other settings \(seed\)"),
        ({"settings": {"seed": 2}, "next": 1, "dropped": {}}, "hello\n", "holds lines that were not written by"),
    ],
)
def test_files_of_other_makers_are_left_alone(tmp_path: Path, state: object, line: str, message: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_text(line)
    if state is not None:
        (tmp_path / "j.state.json").write_text(json.dumps(state))
    with pytest.raises(UsageError, match=message):
        Journal(path, {"seed": 2})
    assert path.read_text() == line


def test_a_model_that_writes_nothing_of_use_is_told_of(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthesis, "fault", lambda tokens, text: "empty")
    with (
        Journal(tmp_path / "j.jsonl", {}) as journal,
        pytest.raises(OutriderError, match=r"only 0 of 64 .* \(empty: \d+.*is it a chat model\?"),
    ):
        synthesize(Author(llm, SETTINGS, 16), own_plans(0), journal, 10)


def test_a_model_without_a_chat_template_is_refused() -> None:
    bare = wordy_llm(None)
    with pytest.raises(UsageError, match="has no chat template"):
        write(bare, islice(own_plans(0), 1))
    assert write(bare, iter(())) == []
