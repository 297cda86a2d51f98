from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from outrider.cli import export
from outrider.cli.main import main
from outrider.heads.save import save_head
from outrider.models.loader import Model
from outrider.models.weights import TensorWeights
from tests.support.heads import DRAFT_IDS, TARGET, random_head
from tests.unit.heads.checkpoints import normal


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = TensorWeights({"model.embed_tokens.weight": normal(96, 32)})
    monkeypatch.setattr("outrider.models.loader.load_model", lambda name: Model(name, TARGET, weights))


@pytest.fixture
def medusa(tmp_path: Path) -> Path:
    save_head(random_head("medusa", draft_ids=DRAFT_IDS), tmp_path / "mine")
    return tmp_path / "mine"


def test_a_drafter_is_written_and_the_command_for_it_printed(
    medusa: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "their's and mine"
    assert main(["export", str(medusa), "tiny", "--for", "vllm", "--out", str(out)]) == 0
    assert json.loads((out / "config.json").read_text())["truncated_vocab_size"] == 96
    said, command = capsys.readouterr().out.splitlines()
    assert said == f"medusa drafter for tiny, for vllm: {out}"
    *_, config = shlex.split(command)
    assert json.loads(config) == {"method": "medusa", "model": str(out), "num_speculative_tokens": 4}


def test_sglang_is_told_its_own_name_of_the_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_head(random_head("eagle3", draft_ids=DRAFT_IDS), tmp_path / "mine")
    assert main(["export", str(tmp_path / "mine"), "tiny", "--for", "sglang", "--out", str(tmp_path / "out")]) == 0
    assert "--speculative-algorithm EAGLE3 " in capsys.readouterr().out


def test_a_library_is_started_by_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_head(random_head("eagle", draft_ids=DRAFT_IDS), tmp_path / "mine")
    out = tmp_path / "out"
    assert main(["export", str(tmp_path / "mine"), "tiny", "--for", "speculators", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"eagle drafter for tiny, for speculators: {out}\n"
    assert json.loads((out / "config.json").read_text())["fusion_bias"] is True


def test_one_that_comes_with_the_model_is_named_by_its_method(
    medusa: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.heads.shipped.heads_at_hand", lambda model: {"medusa": medusa})
    assert main(["export", "medusa", "tiny", "--for", "vllm", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["mine", "--for", "sglang", "--out", "out"], 2, "sglang runs no medusa heads"),
        (["mine", "--for", "vllm", "--out", "mine"], 2, "is where the drafter lies; give another folder"),
        (["nothing", "--for", "vllm", "--out", "out"], 2, "there is no such file or folder"),
        (["mine", "--for", "vllm", "--out", "mine/config.json"], 2, "cannot write to"),
        (["mine", "--out", "out"], 2, "--for"),
    ],
)
def test_what_cannot_be_done(
    words: list[str],
    code: int,
    says: str,
    medusa: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        found = main(["export", words[0], "tiny", *words[1:]])
    except SystemExit as error:
        found = int(error.code or 0)
    assert found == code
    assert says in capsys.readouterr().err


def test_every_engine_that_is_started_by_hand_has_a_command() -> None:
    assert set(export._COMMANDS) == {"vllm", "sglang"}
