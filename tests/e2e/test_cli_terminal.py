"""``outrider chat`` at a real terminal: a pseudo-terminal types, presses Ctrl-C and Ctrl-D, and reads the colours."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pty = pytest.importorskip("pty")

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0

PROGRAM = textwrap.dedent("""
    import sys, time, pytest
    from tests.support.fake_llm import repetitive_logits, use_fakes
    from outrider.cli.main import main

    def slow(history):
        time.sleep(float(sys.argv[1]))
        return repetitive_logits(history)

    use_fakes(pytest.MonkeyPatch(), slow)
    sys.exit(main(["chat", "toy", "--executor", "fake", "--max-context", "512", "--ignore-eos", *sys.argv[2:]]))
""")


class Terminal:
    """A child process on a pseudo-terminal."""

    def __init__(self, *words: str, environment: dict[str, str] | None = None) -> None:
        self._main, child = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=ROOT,
            stdin=child,
            stdout=child,
            stderr=child,
            start_new_session=True,
            preexec_fn=lambda: _make_controlling(child),
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "", **(environment or {})},
        )
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._main, text.encode())

    def wait_for(self, pattern: str) -> str:
        """Read until the pattern has come; returns what was read up to and with it."""
        deadline = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < deadline, f"waited for {pattern!r}, read {self.seen!r}"
            if select.select([self._main], [], [], 0.1)[0]:
                self.seen += os.read(self._main, 4096).decode(errors="replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def _make_controlling(terminal: int) -> None:
    """Let Ctrl-C typed at this terminal reach the process, as it does in a shell."""
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.close()


def test_a_conversation_at_a_terminal(terminals: list[Terminal]) -> None:
    terminal = Terminal("0", "--max-tokens", "60", "--method", "ngram", "--show-drafts")
    terminals.append(terminal)
    terminal.wait_for("toy, speculation: ngram.*Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("hello\r")
    answer = terminal.wait_for(r"\[60 tokens, .*accepted")
    assert "\x1b[32m" in answer, "accepted draft tokens are green"
    terminal.wait_for("> ")
    terminal.type("/stats\r")
    terminal.wait_for(r"acceptance rate\s+[\d.]+%")
    # Before the prompt is there, a terminal takes Ctrl-D for itself.
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.exit_code() == 0


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(terminals: list[Terminal]) -> None:
    terminal = Terminal("0.02", "--max-tokens", "400", "--method", "none")
    terminals.append(terminal)
    terminal.wait_for("> ")
    terminal.type("hello\r")
    terminal.wait_for("hello\r\n.{10}")
    terminal.type("\x03")
    line = terminal.wait_for(r"\[(\d+) tokens, [^\]]*interrupted\]")
    tokens = int(line.rsplit("[", 1)[1].split()[0])
    assert 0 < tokens < 400
    terminal.wait_for("> ")
    terminal.type("\x03")  # at the prompt it only drops what was typed
    # A signal between the prompt and the wait for a key is seen with the next key only: give it one.
    terminal.type("\r")
    terminal.wait_for("> ")
    terminal.type("/quit\r")
    assert terminal.exit_code() == 0


def test_no_color_is_honoured(terminals: list[Terminal]) -> None:
    options = ["--max-tokens", "60", "--method", "ngram", "--show-drafts"]
    terminal = Terminal("0", *options, environment={"NO_COLOR": "1"})
    terminals.append(terminal)
    terminal.wait_for("> ")
    terminal.type("hello\r")
    assert "\x1b[3" not in terminal.wait_for(r"\[60 tokens, .*accepted")
