"""What lies at a path, and what is said when it is no head."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.core.errors import HeadMismatchError, ModelFileError, ModelNotFoundError, UnknownNameError
from outrider.heads import LAYOUTS
from outrider.heads.base import Layout
from outrider.heads.load import head_method, load_head
from outrider.heads.save import save_head
from tests.support.heads import DRAFT_IDS, TARGET, assert_same_head, random_head
from tests.unit.heads.checkpoints import normal, write


def test_every_layout_is_one() -> None:
    for name in LAYOUTS.names():
        layout = LAYOUTS.get(name)()
        assert isinstance(layout, Layout)
        assert set(layout.methods) <= {"eagle", "eagle3", "medusa", "mtp"}
    for method in ("eagle", "eagle3", "medusa", "mtp"):
        assert method in LAYOUTS.get(method).methods, "save_head writes the layout that has the method's name"


class _Runs:
    """A pickle of it would run a command."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        import os

        return os.system, ("touch ran",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"0.0.linear.weight": normal(2, 2), "more": _Runs()}, tmp_path / "medusa_lm_head.pt")
    (tmp_path / "plain.bin").write_bytes(pickle.dumps(_Runs(), protocol=2))
    for name in ("medusa_lm_head.pt", "plain.bin"):
        with pytest.raises(ModelFileError, match="holds more than tensors"):
            head_method(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_broken_files(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    save_head(random_head("eagle3"), whole)
    data = (whole / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(data[:-10])
    (tmp_path / "empty.safetensors").write_bytes(b"")
    torch.save({"a": normal(100, 100)}, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:1000])
    for name in ("cut.safetensors", "empty.safetensors", "cut.pt"):
        with pytest.raises(ModelFileError, match=rf"{name}: not a complete .*get it again") as refused:
            head_method(tmp_path / name)
        assert "\n" not in str(refused.value)
    for number, ops in enumerate((b"\x80\x02R.", b"\x80\x02}U", b"\x80\x02K\x01K\x02s.", b"")):
        (tmp_path / f"broken{number}.pt").write_bytes(ops)
        with pytest.raises(ModelFileError, match=r"this pickle holds more|not a complete .*get it again") as refused:
            head_method(tmp_path / f"broken{number}.pt")
        assert "\n" not in str(refused.value)
    torch.save([normal(2)], tmp_path / "list.pt")
    with pytest.raises(ModelFileError, match="not a table of tensors"):
        head_method(tmp_path / "list.pt")


def test_a_training_that_has_not_ended_is_said_to_be_one(tmp_path: Path) -> None:
    torch.save({"module": {}, "optimizers": [], "update": 3}, tmp_path / "checkpoint.pt")
    with pytest.raises(ModelFileError, match="the training of this drafter has not ended; the same 'outrider train'"):
        load_head(tmp_path, TARGET, "target")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file or folder"):
        head_method(tmp_path / "missing")
    with pytest.raises(ModelNotFoundError, match="no drafter here"):
        head_method(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ModelFileError, match=r"a drafter's tensors lie in \.safetensors"):
        head_method(tmp_path / "notes.txt")
    for name in ("a.safetensors", "b.safetensors"):
        write(tmp_path, None, {"x": normal(2)}, name)
    with pytest.raises(ModelNotFoundError, match=r"several files of tensors \(a.safetensors, b.safetensors\)"):
        head_method(tmp_path)


def test_something_else_is_named_with_its_tensors(tmp_path: Path) -> None:
    write(tmp_path, {"model_type": "llama"}, {"model.layers.0.mlp.up_proj.weight": normal(2, 2)})
    with pytest.raises(ModelFileError, match=r"not a drafter in a layout that is known \(.*model.layers.0.mlp.up_proj"):
        head_method(tmp_path)
    write(tmp_path, {"model_type": "llama"}, {"midlayer.self_attn.q_proj.qweight": normal(2, 2)})
    with pytest.raises(HeadMismatchError, match="quantised drafter"):
        head_method(tmp_path)


@pytest.mark.parametrize("found", ["often", {"1": 0.5}, [0.5, 1.5], [0.5, None], [float("nan")]])
def test_accuracies_that_are_none_are_refused_in_one_line(found: object, tmp_path: Path) -> None:
    save_head(random_head("eagle3"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    values["outrider"]["accept_by_depth"] = found
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelFileError, match=r"outrider\.accept_by_depth must be a list of numbers from 0 to 1"):
        load_head(tmp_path, TARGET, "target")


@pytest.mark.parametrize(
    ("method", "layout", "name", "shape", "says"),
    [
        ("eagle3", None, "fc.weight", (), "'fc.weight' is a single number"),
        ("medusa", None, "lm_heads.0.weight", (), "'lm_heads.0.weight' is a single number"),
        ("medusa", "medusa-lm-head", "0.0.linear.weight", (), "'0.0.linear.weight' is a single number"),
        ("medusa", None, "lm_heads.0.weight", (32, 11), r"has shape \(32, 11\); \(11, 32\) is expected"),
        ("mtp", "mtp-mimo", "model.mtp_layers.0.input_proj.weight", (2048,), r"has shape \(2048,\)"),
        ("mtp", "mtp-mimo", "model.mtp_layers.0.input_proj.weight", (0,), r"has shape \(0,\)"),
    ],
)
def test_tensors_of_another_rank_are_refused_in_one_line(
    method: str, layout: str | None, name: str, shape: tuple[int, ...], says: str, tmp_path: Path
) -> None:
    reduced = DRAFT_IDS if method == "medusa" and layout is None else None
    save_head(random_head(method, own_output=method == "medusa", draft_ids=reduced), tmp_path, layout)
    file = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(file)
    assert name in tensors
    save_file({**tensors, name: torch.zeros(shape)}, file)
    with pytest.raises(HeadMismatchError, match=says) as refused:
        load_head(tmp_path, TARGET, "target")
    assert "\n" not in str(refused.value)


def test_a_number_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    save_head(random_head("eagle3"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "eos_token_id": float("inf")}))
    with pytest.raises(ModelFileError, match="infinity"):
        load_head(tmp_path, TARGET, "target")


_NOT_RANKED = "must be a list of lists of numbers from 0 to 1, none of which adds up to more than 1"


@pytest.mark.parametrize(
    ("method", "found", "says"),
    [
        ("medusa", "often", _NOT_RANKED),
        ("medusa", [0.5, 0.2, 0.1], _NOT_RANKED),
        ("medusa", [[0.5], [0.5], []], _NOT_RANKED),
        ("medusa", [[0.5], [0.5], [1.5]], _NOT_RANKED),
        ("medusa", [[0.5], [0.5], [float("nan")]], _NOT_RANKED),
        ("medusa", [[0.5], [0.5], ["0.5"]], _NOT_RANKED),
        ("medusa", [[0.5], [0.5], [0.6, 0.5]], _NOT_RANKED),
        ("medusa", [[0.5], [0.5]], "is of 2 heads, but the drafter has 3"),
        ("eagle3", [[0.5], [0.5]], "is of 2 heads, but the drafter has 0"),
    ],
)
def test_accuracies_by_rank_that_are_none_are_refused_in_one_line(
    method: str, found: object, says: str, tmp_path: Path
) -> None:
    save_head(random_head(method), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert "accept_by_rank" not in values["outrider"]
    values["outrider"]["accept_by_rank"] = found
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ModelFileError, match=rf"outrider\.accept_by_rank {says}") as refused:
        load_head(tmp_path, TARGET, "target")
    assert "\n" not in str(refused.value)


def test_a_checkpoint_in_several_files(tmp_path: Path) -> None:
    head = random_head("eagle3")
    save_head(head, tmp_path)
    tensors = write_shards(tmp_path)
    assert_same_head(load_head(tmp_path, TARGET, "target"), head)
    (tmp_path / tensors[1]).unlink()
    with pytest.raises(ModelNotFoundError, match=r"missing, but named in model\.safetensors\.index\.json"):
        load_head(tmp_path, TARGET, "target")


def write_shards(folder: Path) -> list[str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = ["model-1.safetensors", "model-2.safetensors"]
    places = {name: files[number % 2] for number, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return files


def test_an_unknown_layout_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'eagle3'"):
        save_head(random_head("eagle3"), tmp_path, "egle3")


def test_nothing_is_left_behind_but_the_two_files(tmp_path: Path) -> None:
    save_head(random_head("mtp"), tmp_path / "a" / "b")
    save_head(random_head("mtp", seed=1), tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]
    assert_same_head(load_head(str(tmp_path / "a" / "b"), TARGET, "target"), random_head("mtp", seed=1))
