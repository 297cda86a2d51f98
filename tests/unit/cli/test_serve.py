"""What ``outrider serve`` refuses before it loads a model."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from outrider.cli.main import main


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*args: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("outrider.models.loader.load_model", never)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "tiny", "--port", str(port)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"cannot listen at 127.0.0.1, port {port}" in line
    with pytest.raises(AssertionError, match="the model was loaded"):
        main(["serve", "tiny", "--port", str(port)])
