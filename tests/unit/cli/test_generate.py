from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.cli.main import build_parser, main
from outrider.cli.options import structured
from outrider.cli.terminal import DraftPainter, stream_answer
from outrider.core.sampling import SamplingParams
from outrider.core.structured import StructuredOutputs
from outrider.engine.outputs import Delta
from outrider.executors.base import QuantizationError
from tests.support.fake_llm import ChatTokenizer, fake_llm, repetitive_logits, use_fakes
from tests.support.fakes import FakeExecutor, random_logits

FAKE = ["--executor", "fake", "--max-context", "256"]
ROOT = Path(__file__).resolve().parents[3]


def generate(*words: str) -> int:
    return main(["generate", *FAKE, *words])


def test_what_quantising_cost_is_said_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(FakeExecutor, "quantization_error", QuantizationError("int4", 0.0712, 0.0934, "lm_head.weight"))
    assert generate("abc", "--compare", "--max-tokens", "5") == 0
    line = "quantised to int4: relative error 0.0712 (root mean square), worst tensor lm_head.weight with 0.0934\n"
    assert capsys.readouterr().err.count(line) == 1


def test_text_goes_to_stdout_and_statistics_to_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch, repetitive_logits)
    assert generate("abc", "--method", "ngram", "--max-tokens", "60") == 0
    out, err = capsys.readouterr()
    expected = fake_llm("none").chat([{"role": "user", "content": "abc"}], SamplingParams(max_tokens=60))[0]
    assert out == expected.text + "\n"
    assert "60 tokens" in err
    assert "draft tokens accepted" in err


def test_raw_leaves_the_chat_template_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_fakes(monkeypatch)
    assert generate("abc", "--raw", "--max-tokens", "10") == 0
    raw = capsys.readouterr().out
    assert raw == fake_llm("none").generate("abc", SamplingParams(max_tokens=10))[0].text + "\n"
    assert generate("abc", "--max-tokens", "10") == 0
    assert capsys.readouterr().out != raw


@pytest.mark.parametrize("way", ["argument", "stdin", "file"])
def test_the_prompt_comes_from(
    way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    use_fakes(monkeypatch)
    (tmp_path / "prompt").write_text("hello")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    words = {"argument": ["hello"], "stdin": ["-"], "file": ["--prompt-file", str(tmp_path / "prompt")]}[way]
    assert generate(*words, "--json", "--max-tokens", "5") == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len("hello!")


def test_json_holds_the_answer_and_its_statistics(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch, repetitive_logits)
    assert generate("abc", "--json", "--logprobs", "2", "--max-tokens", "40", "--method", "ngram") == 0
    record = json.loads(capsys.readouterr().out)
    assert len(record["token_ids"]) == len(record["logprobs"]) == 40
    assert len(record["logprobs"][0]["top"]) == 2
    assert record["finish_reason"] == "length"
    stats = record["speculation"]
    assert stats["committed"] == 40
    assert stats["accepted"] <= stats["drafted"]
    assert stats["mean_acceptance_length"] == pytest.approx(stats["committed"] / stats["rounds"])


def test_a_drawn_seed_is_told_and_gives_the_text_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch)
    words = ["abc", "--temperature", "1.5", "--max-tokens", "30"]
    assert generate(*words) == 0
    out, err = capsys.readouterr()
    seed = err.split("[seed ")[1].split(":")[0]
    assert generate(*words, "--seed", seed) == 0
    assert capsys.readouterr().out == out


def test_compare_shows_both_and_agrees(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_fakes(monkeypatch, repetitive_logits)
    assert generate("abc", "--compare", "--method", "ngram", "--max-tokens", "80", "--temperature", "0.7") == 0
    out = capsys.readouterr().out
    for figure in ("tokens/s", "speed-up", "rounds", "acceptance rate", "mean acceptance length", "time in verify"):
        assert figure in out
    assert out.rstrip().endswith("identical output: yes")


def logits_that_depend_on_company(seen: list[int]) -> object:
    """A target with the fault that compare is there to find: what a row gets depends on how many calls came before."""

    def logits(history: Sequence[int]) -> torch.Tensor:
        seen.append(len(history))
        row = repetitive_logits(history)
        if len(history) > 30 and len(seen) % 7 == 0:
            row = -row
        return row

    return logits


def test_compare_finds_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_fakes(monkeypatch, logits_that_depend_on_company([]))  # type: ignore[arg-type]
    assert generate("abc", "--compare", "--method", "ngram", "--max-tokens", "80") == 1
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("identical output: no (first difference at output token ")
    assert re.search(r"; the target scores them \d\S* apart\)$", line)


def test_compare_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    use_fakes(monkeypatch, repetitive_logits)
    assert generate("abc", "--compare", "--json", "--method", "ngram", "--max-tokens", "50") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["identical"] is True
    assert record["first_difference"] is None
    assert record["plain"]["token_ids"] == record["speculative"]["token_ids"]
    assert record["plain"]["speculation"]["rounds"] > record["speculative"]["speculation"]["rounds"]


def interrupting_logits(after: int) -> object:
    calls: list[int] = []

    def logits(history: Sequence[int]) -> torch.Tensor:
        if any(history):  # the cost curve is measured over zeros
            calls.append(1)
        if len(calls) == after and any(history):
            signal.raise_signal(signal.SIGINT)
        return random_logits(history)

    return logits


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_ctrl_c_keeps_what_was_committed_and_exits_with_130(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch, interrupting_logits(after=12))  # type: ignore[arg-type]
    code = generate("abc", "--method", "none", "--max-tokens", "60", "--ignore-eos", *words)
    out = capsys.readouterr().out
    assert code == 130
    monkeypatch.undo()
    use_fakes(monkeypatch)
    whole = fake_llm("none").chat([{"role": "user", "content": "abc"}], SamplingParams(max_tokens=60, ignore_eos=True))
    text = json.loads(out)["text"] if words else out.rstrip("\n")
    assert 0 < len(text) < len(whole[0].text)
    assert whole[0].text.startswith(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no prompt"),
        (["hi", "--prompt-file", "x"], "given twice"),
        (["--prompt-file", "missing.txt"], "cannot read the prompt"),
        (["hi", "--raw", "--system", "be kind"], "--raw leaves no place"),
        (["hi", "--logprobs", "1"], "--logprobs needs --json"),
        (["hi", "--json", "--show-drafts"], "drop one"),
        (["hi", "--compare", "--method", "none"], "--compare needs a drafter"),
        (["hi", "--temperature", "-1"], "temperature"),
        (["hi", "--min-tokens", "9", "--max-tokens", "3"], "min_tokens=9 is more than max_tokens=3"),
        (["hi", "--method", "sufix"], "did you mean 'suffix'?"),
        (["hi", "--prefill-chunk", "0"], "prefill_chunk=0"),
        (["abc" * 200], "shorten it"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch)
    assert generate(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("outrider: ")
    assert err.count("\n") == 1
    assert message in err


def test_an_unknown_executor_is_refused_before_a_model_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--executor", "trch", "--model", "no-such-model"]) == 2
    assert "did you mean 'torch'?" in capsys.readouterr().err


def test_a_failure_at_run_time_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_fakes(monkeypatch, lambda history: torch.full((32,), float("nan")))
    assert generate("abc", "--method", "none") == 1
    assert capsys.readouterr().err.startswith("outrider: the model returned NaN")


def test_a_reader_that_leaves_is_no_error() -> None:
    program = textwrap.dedent("""
        import sys, pytest
        from tests.support.fake_llm import use_fakes
        from outrider.cli.main import main
        use_fakes(pytest.MonkeyPatch())
        sys.stdin.readline()  # until then the reader has gone
        sys.exit(main(["generate", "abc", "--executor", "fake", "--max-context", "256", "--ignore-eos"]))
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate("go\n", timeout=60)
    assert process.returncode == 141
    assert err == ""


# -- pieces of a streamed answer ---------------------------------------------------------------------------------------


def marked(text: str, style: str) -> str:
    return f"<{text}>" if text else ""


def ids(text: str) -> list[int]:
    return ChatTokenizer().encode(text)


def test_accepted_draft_tokens_are_coloured() -> None:
    paint = DraftPainter(ChatTokenizer(), marked, skip_special_tokens=True)  # type: ignore[arg-type]
    assert paint(Delta("abc", ids("abc"), [False, True, True])) == "a<b><c>"


def test_colours_wait_for_text_that_is_held_back_and_stop_where_it_is_cut() -> None:
    paint = DraftPainter(ChatTokenizer(), marked, skip_special_tokens=True)  # type: ignore[arg-type]
    assert paint(Delta("a", ids("abc"), [False, True, False])) == "a"
    assert paint(Delta("bcd", ids("def"), [True, True, True])) == "<b>c<d>"


def test_special_tokens_that_are_left_out_take_no_text() -> None:
    paint = DraftPainter(ChatTokenizer(), marked, skip_special_tokens=True)  # type: ignore[arg-type]
    assert paint(Delta("ab", [*ids("a"), 2, *ids("b")], [True, True, False])) == "<a>b"


def test_a_token_that_comes_in_two_pieces_keeps_its_colour() -> None:
    class Syllables:
        def stream(self, skip_special_tokens: bool) -> Syllables:
            return self

        def push(self, token: int) -> str:
            return ["ba", "nana"][token]

    paint = DraftPainter(Syllables(), marked, skip_special_tokens=True)  # type: ignore[arg-type]
    assert paint(Delta("ban", [0, 1], [False, True])) == "ba<n>"
    assert paint(Delta("ana", [], [])) == "<ana>"


def test_a_stream_is_closed_when_the_reader_is_interrupted() -> None:
    closed: list[bool] = []

    def deltas():  # type: ignore[no-untyped-def]
        try:
            yield Delta("a", ids("a"), [False])
            yield Delta("b", ids("b"), [False])
        finally:
            closed.append(True)

    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        raise KeyboardInterrupt

    answer = stream_answer(deltas(), write)
    assert answer.interrupted
    assert answer.text == "a"
    assert closed == [True]


@pytest.mark.parametrize("pieces", [1, 3])
def test_an_interrupt_between_pieces_still_gets_what_was_committed(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_fakes(monkeypatch)
    llm = fake_llm("none")
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == pieces:
            raise KeyboardInterrupt

    answer = stream_answer(llm.stream([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True)), write)
    assert answer.interrupted
    assert answer.output is not None
    assert len(answer.output.token_ids) == pieces
    assert answer.output.finish_reason == "aborted"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], None),
        (["--json-schema", "file"], StructuredOutputs(json={"type": "integer"})),
        (["--grammar", "file"], StructuredOutputs(grammar='{"type": "integer"}')),
        (["--regex", "a+"], StructuredOutputs(regex="a+")),
        (["--choice", "a", "--choice", "b"], StructuredOutputs(choice=["a", "b"])),
        (["--json-object"], StructuredOutputs(json_object=True)),
    ],
)
def test_constraints(words: list[str], expected: StructuredOutputs | None, tmp_path: Path) -> None:
    file = tmp_path / "schema"
    file.write_text('{"type": "integer"}')
    words = [str(file) if word == "file" else word for word in words]
    assert structured(build_parser("generate").parse(["generate", "x", *words])) == expected


def test_constraints_that_cannot_be_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for words, reason in (
        (["--json-schema", "nowhere.json"], "cannot read nowhere.json: No such file"),
        (["--grammar", str(tmp_path / "binary")], "is not UTF-8 text"),
        (["--regex", ""], "regex must be a text that is not empty"),
    ):
        assert generate("x", *words) == 2
        assert reason in capsys.readouterr().err
    with pytest.raises(SystemExit):
        generate("x", "--regex", "a", "--choice", "b")
    assert "not allowed with" in capsys.readouterr().err
