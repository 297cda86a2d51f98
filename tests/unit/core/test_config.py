"""Configuration: the ecosystem's keys, and nothing accepted that is then ignored."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from outrider.core.config import EngineConfig, SpeculativeConfig, SpeculativeOverride, as_speculative_config
from outrider.core.errors import ConfigError, LossyNotAllowedError, UnknownNameError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", 2.5),
        ("num_speculative_tokens", True),
        ("max_draft_depth", 0),
        ("tree_width", -1),
        ("prompt_lookup_max", 0),
        ("prompt_lookup_min", 0),
        ("suffix_decoding_max_tree_depth", 0),
        ("suffix_decoding_max_cached_requests", -1),
        ("suffix_decoding_min_token_prob", 1.5),
        ("posterior_threshold", "0.1"),
        ("posterior_alpha", -0.1),
        ("allow_lossy", "false"),
        ("adaptive", 0),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        SpeculativeConfig(**{name: value})


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="prompt_lookup_min=5 is more than prompt_lookup_max=4"):
        SpeculativeConfig(prompt_lookup_min=5)
    with pytest.raises(ConfigError, match="needs 'model'"):
        SpeculativeConfig(method="suffix+draft_model")
    with pytest.raises(ConfigError, match="would ignore it"):
        SpeculativeConfig(method="ngram", model="m")


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp", "medusa", "suffix+eagle3", "auto", "auto+ngram"])
def test_a_trained_drafter_may_be_named_or_left_to_be_found(method: str) -> None:
    assert SpeculativeConfig(method=method).model is None
    assert SpeculativeConfig(method=method, model="org/drafter").model == "org/drafter"


def test_a_model_that_nothing_would_read_is_refused() -> None:
    for method in ("ngram", "suffix+recycle", "none"):
        with pytest.raises(ConfigError, match=r"model is for method 'draft_model' or .*'eagle3'.* would ignore it"):
            SpeculativeConfig(method=method, model="m")


def test_vllms_names_of_a_method() -> None:
    assert SpeculativeConfig(method="deepseek_mtp").members == ("mtp",)
    assert SpeculativeConfig(method="suffix+mimo_mtp", model="m").members == ("suffix", "mtp")
    assert SpeculativeOverride("mimo_mtp").members == ("mtp",)
    with pytest.raises(ConfigError, match="names a drafter twice"):
        SpeculativeOverride("mtp+deepseek_mtp")


def test_lossy_output_needs_consent() -> None:
    with pytest.raises(LossyNotAllowedError, match="allow_lossy"):
        SpeculativeConfig(acceptance="typical")
    assert SpeculativeConfig(acceptance="typical", allow_lossy=True).acceptance == "typical"


def test_unknown_keys_name_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'num_speculative_tokens'"):
        SpeculativeConfig.from_dict({"num_speculative_token": 3})


@pytest.mark.parametrize(
    ("text", "method"),
    [("ngram", "ngram"), (' {"method": "suffix"} ', "suffix"), ("suffix+recycle", "suffix+recycle"), ("{}", "auto")],
)
def test_parse(text: str, method: str) -> None:
    assert SpeculativeConfig.parse(text).method == method


@pytest.mark.parametrize("text", ['{"method": ', "[1]", '"ngram"', '{"method": 3}', '{"method": null}'])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ConfigError):
        SpeculativeConfig.parse(text)


def test_every_form_that_users_write() -> None:
    assert as_speculative_config(None) == SpeculativeConfig()
    assert as_speculative_config("ngram") == as_speculative_config({"method": "ngram"})
    config = SpeculativeConfig(method="none")
    assert as_speculative_config(config) is config
    assert SpeculativeConfig(method="suffix + recycle").members == ("suffix", "recycle")


@pytest.mark.parametrize("name", ["max_batch_size", "max_context", "prefill_chunk", "kv_tokens", "max_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_engine_sizes(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**{name: value})


def test_sizes_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="max_batched_tokens=8 must leave a row for each"):
        EngineConfig(max_batched_tokens=8, max_batch_size=9)
    with pytest.raises(ConfigError, match="give one of them"):
        EngineConfig(kv_tokens=100, kv_cache_memory="1GiB")
    with pytest.raises(ConfigError, match="max_batched_tokens=None"):
        EngineConfig(max_batched_tokens=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        EngineConfig(enable_prefix_caching="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GiB", 2 << 30), ("512 MiB", 512 << 20), ("1.5kib", 1536), ("2GB", 2 * 10**9), ("4096", 4096), (77, 77)],
)
def test_memory_is_read_with_its_unit(text: str | int, expected: int) -> None:
    assert EngineConfig(kv_cache_memory=text).kv_bytes == expected


@pytest.mark.parametrize("text", ["", "GiB", "2 GiB more", "-1", "0", "0.1B", "2XB", 0, -5, True, 1.5, "1e9"])
def test_memory_that_is_none(text: Any) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        EngineConfig(kv_cache_memory=text)


@pytest.mark.parametrize(
    ("method", "number", "says"),
    [
        (3, None, "must be a string"),
        ("suffix", 0, "from 1 to 256"),
        ("suffix", 257, "from 1 to 256"),
        ("suffix", True, "from 1 to 256"),
        ("none", 4, "would ignore num_speculative_tokens"),
        ("none+suffix", None, "drop one of them"),
    ],
)
def test_what_a_request_may_not_ask_for(method: Any, number: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SpeculativeOverride(method, number)


def test_every_option_has_a_help_text() -> None:
    """The command line and the documentation are generated from these."""
    for option in (*fields(SpeculativeConfig), *fields(EngineConfig)):
        assert option.metadata["help"]
