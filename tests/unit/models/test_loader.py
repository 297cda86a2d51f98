"""What a model's name may be, and what is said when it stands for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from outrider.core.errors import ModelNotFoundError, UnknownNameError, UnsupportedModelError
from outrider.models import fetch as fetch_module
from outrider.models.aliases import ALIASES
from outrider.models.loader import load_model
from tests.support.models import random_model, write_gguf, write_hf_folder


def test_file_folder_and_folder_of_one_file(tmp_path: Path) -> None:
    model = random_model("llama")
    (tmp_path / "one").mkdir()
    file = write_gguf(model, tmp_path / "one" / "m.gguf")
    folder = write_hf_folder(model, tmp_path / "hf")
    for name, source in ((str(file), file), (str(tmp_path / "one"), file), (str(folder), folder)):
        loaded = load_model(name)
        assert loaded.name == name
        assert loaded.source == source
        assert loaded.tokenizer is None
        assert loaded.config.hidden_size == model.config.hidden_size


def test_paths_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(random_model("llama"), tmp_path / "m.gguf")
    assert load_model("~/m.gguf").source == tmp_path / "m.gguf"


def test_an_alias_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "m.gguf")
    asked: list[tuple[str, bool]] = []

    def fake(alias: object, *, progress: bool) -> Path:
        asked.append((getattr(alias, "name", ""), progress))
        return path

    monkeypatch.setattr(fetch_module, "fetch", fake)
    assert load_model("smollm2-135m", progress=False).source == path
    assert asked == [("smollm2-135m", False)]


@pytest.mark.parametrize("name", ["smolm2-135m", "qwen2.5-coder", "", "a/b/c", "two words"])
def test_names_that_stand_for_nothing(name: str) -> None:
    with pytest.raises(UnknownNameError, match="unknown model") as caught:
        load_model(name)
    for alias in ALIASES:
        assert alias in str(caught.value)


def test_the_nearest_alias_is_named() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'smollm2-135m'"):
        load_model("smolm2-135m")


@pytest.mark.parametrize("name", ["./no", "/no/such/folder", "~/no-such-model", "no.gguf", "folder/no.gguf"])
def test_paths_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        load_model(name)


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"neither config\.json nor a GGUF file"):
        load_model(str(tmp_path))
    write_gguf(random_model("llama"), tmp_path / "a.gguf")
    write_gguf(random_model("llama"), tmp_path / "b.gguf")
    with pytest.raises(ModelNotFoundError, match=r"several GGUF files \(a\.gguf, b\.gguf\); name the one"):
        load_model(str(tmp_path))


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    write_hf_folder(random_model("llama"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        load_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no model\.safetensors"):
        load_model(str(tmp_path))


def test_hub_repository_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("llama")
    folder = write_hf_folder(model, tmp_path / "hf")
    file = write_gguf(model, tmp_path / "m.gguf")
    asked: list[tuple[str, ...]] = []

    def whole(repository: str, *, allow_patterns: list[str]) -> str:
        assert "*.bin" not in allow_patterns
        asked.append((repository,))
        return str(folder)

    def one(repository: str, name: str) -> str:
        asked.append((repository, name))
        return str(file)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", whole)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    assert load_model("org/name-1.5B").source == folder
    assert load_model("org/name:sub/m-Q4_K_M.gguf").source == file
    assert load_model("org/name:m.gguf").source == file
    assert load_model("org/name/m.gguf").source == file
    expected = [("org/name-1.5B",), ("org/name", "sub/m-Q4_K_M.gguf"), ("org/name", "m.gguf"), ("org/name", "m.gguf")]
    assert asked == expected


def test_hub_out_of_reach_or_without_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[tuple[Exception, str]] = [
        (LocalEntryNotFoundError("offline"), "hub cannot be reached; `outrider models` lists"),
        (OSError("404 Client Error\nRepository Not Found"), "404 Client Error"),
        (ValueError("Repo id must use alphanumeric chars"), "alphanumeric"),
    ]
    for failure, message in failures:

        def fail(*args: object, failure: Exception = failure, **kwargs: object) -> str:
            raise failure

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ModelNotFoundError, match=message) as caught:
            load_model("org/name")
        assert "\n" not in str(caught.value)
        assert str(caught.value).startswith("org/name: ")


def test_progress_false_silences_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import are_progress_bars_disabled

    folder = write_hf_folder(random_model("llama"), tmp_path / "hf")
    seen: list[bool] = []

    def whole(repository: str, **options: object) -> str:
        seen.append(are_progress_bars_disabled())
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", whole)
    before = are_progress_bars_disabled()
    load_model("org/name", progress=False)
    load_model("org/name", progress=True)
    assert seen == [True, before]
    assert are_progress_bars_disabled() == before


def test_a_local_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_hf_folder(random_model("llama"), tmp_path / "org" / "name")
    assert load_model("org/name").source == Path("org/name")


def test_opening_a_gguf_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "m.gguf")
    code = (
        "import sys; from outrider.models.loader import load_model; load_model(sys.argv[1]);"
        "print([m for m in ('torch', 'transformers', 'gguf', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
