from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli.main import main
from outrider.models.aliases import ALIASES


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


def test_the_list_tells_size_licence_and_what_is_there(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    for alias in ALIASES.values():
        (line,) = [line for line in out.splitlines() if line.startswith(alias.name + " ")]
        assert alias.licence in line
        assert line.endswith("no")
    assert str(cache) in out


def test_the_list_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {record["name"] for record in records} == set(ALIASES)
    assert all(record["fetched"] is False and record["path"] is None for record in records)


def test_the_list_names_the_drafters_that_are_shipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for method in ("medusa", "eagle3"):
        (tmp_path / "heads" / "smollm2-135m" / method).mkdir(parents=True)
        (tmp_path / "heads" / "smollm2-135m" / method / "config.json").write_text("{}")
    monkeypatch.setattr("outrider.heads.shipped.SHIPPED", tmp_path / "heads")
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("smollm2-135m ")]
    assert "eagle3, medusa" in line
    assert main(["models", "--json"]) == 0
    records = {record["name"]: record["drafters"] for record in json.loads(capsys.readouterr().out)}
    assert records["smollm2-135m"] == ["eagle3", "medusa"]
    assert records["qwen2.5-coder-0.5b"] == []


def test_fetch_prints_the_path(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("outrider.models.fetch.fetch", lambda alias, progress: Path("there", alias.file))
    assert main(["models", "fetch", "smollm2-135m"]) == 0
    assert capsys.readouterr().out == str(Path("there", ALIASES["smollm2-135m"].file)) + "\n"


def test_an_unknown_name_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "fetch", "smollm-135"]) == 2
    assert "did you mean 'smollm2-135m'?" in capsys.readouterr().err


def test_an_unknown_option_is_told_by_the_action_it_was_given_to(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["models", "fetch", "smollm2-135m", "--fast"])
    assert exit_.value.code == 2
    assert capsys.readouterr().err.startswith("outrider models fetch: unknown option --fast")
