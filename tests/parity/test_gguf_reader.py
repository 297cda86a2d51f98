"""Our GGUF reader against the `gguf` package, on files that package wrote."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from outrider.models.gguf import GGUFFile
from tests.support.models import random_model, write_gguf

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
METADATA = {
    "tokenizer.ggml.tokens": ["a", "ü", "\u2581the", "", "🎉"],
    "tokenizer.ggml.scores": [0.5, -1.0, 2.0, 0.0, 1e-9],
    "tokenizer.chat_template": "{{ messages }}",
    "tokenizer.ggml.add_bos_token": True,
}


@pytest.mark.parametrize("kind", KINDS)
def test_same_fields_and_bytes(tmp_path: Path, kind: str) -> None:
    path = write_gguf(random_model("llama"), tmp_path / "m.gguf", kind, metadata=METADATA)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for each in theirs.tensors:
        info = ours.tensors[each.name]
        assert info.kind == each.tensor_type.name
        assert info.shape == tuple(int(n) for n in reversed(each.shape))
        assert np.array_equal(ours.data(each.name), each.data.reshape(-1).view(np.uint8))
    fields = {name: each.contents() for name, each in theirs.fields.items() if not name.startswith("GGUF.")}
    assert set(ours.fields) == set(fields)
    for name, value in fields.items():
        if isinstance(value, list):
            assert (ours.strings(name) if isinstance(value[0], str) else ours.numbers(name)) == value
        else:
            assert ours.fields[name] == value
