from __future__ import annotations

import io
import sys

import pytest

from outrider.cli.chat import Chat
from outrider.cli.main import main
from outrider.core.sampling import SamplingParams
from tests.support.fake_llm import fake_llm, repetitive_logits, use_fakes


def chat(monkeypatch: pytest.MonkeyPatch, said: str, *words: str) -> int:
    use_fakes(monkeypatch, repetitive_logits)
    monkeypatch.setattr(sys, "stdin", io.StringIO(said))
    return main(["chat", "--executor", "fake", "--max-context", "256", "--max-tokens", "20", *words])


def answer(*turns: tuple[str, str]) -> str:
    messages = [{"role": role, "content": text} for role, text in turns]
    return fake_llm("none").chat(messages, SamplingParams(max_tokens=20))[0].text


def test_piped_turns_give_one_answer_each_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "hello\nagain\n", "--show-drafts") == 0
    out, err = capsys.readouterr()
    first = answer(("user", "hello"))
    second = answer(("user", "hello"), ("assistant", first), ("user", "again"))
    assert out == f"{first}\n{second}\n"
    assert err == ""


def test_the_system_message_comes_first_and_survives_a_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "hello\n/reset\nhello\n", "--system", "be kind") == 0
    expected = answer(("system", "be kind"), ("user", "hello"))
    assert capsys.readouterr().out == f"{expected}\n{expected}\n"


def test_a_line_can_go_on_and_a_slash_can_be_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "one\\\ntwo\n//abc\n") == 0
    first = answer(("user", "one\ntwo"))
    second = answer(("user", "one\ntwo"), ("assistant", first), ("user", "/abc"))
    assert capsys.readouterr().out == f"{first}\n{second}\n"


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(monkeypatch, "hello\n/stats\n/hlp\n/help\n/drafts\n/quit\nnot read\n", "--method", "ngram") == 0
    out = capsys.readouterr().out
    assert "answers" in out
    assert "mean acceptance length" in out
    assert "unknown command '/hlp'; did you mean '/help'?" in out
    assert "/reset" in out
    assert "accepted draft tokens are coloured" in out
    assert out.count(answer(("user", "hello"))) == 1


def test_a_conversation_that_outgrows_the_context_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, f"{'x' * 300}\nhello\n") == 0
    out, err = capsys.readouterr()
    assert "/reset" in err
    assert out == answer(("user", "hello")) + "\n"


def test_ctrl_c_stops_the_answer_and_not_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch, repetitive_logits)
    talk = Chat(fake_llm(), SamplingParams(max_tokens=20), system=None, show_drafts=False, interactive=True)
    turns = iter(["hello", KeyboardInterrupt, "again", EOFError])

    def typed(prompt: str) -> str:
        turn = next(turns)
        if isinstance(turn, str):
            return turn
        raise turn

    monkeypatch.setattr("builtins.input", typed)
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.terminal.to_stdout", write)
    talk.loop()
    whole = answer(("user", "hello"))
    cut = "".join(pieces[:2])
    assert whole.startswith(cut)
    assert len(cut) < len(whole)
    # What was shown of the first answer is what the second turn builds on.
    second = answer(("user", "hello"), ("assistant", cut), ("user", "again"))
    assert "".join(pieces[2:]) == f"\n{second}\n"
    assert "20 tokens" in capsys.readouterr().err


def test_the_model_may_be_named_once_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "one", "--model", "two"]) == 2
    assert "two models were named" in capsys.readouterr().err
