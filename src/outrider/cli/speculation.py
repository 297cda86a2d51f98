"""From command-line options to a `SpeculativeConfig`: ours, vLLM's JSON, and SGLang's flag names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

from outrider.cli.parser import add_fields, given
from outrider.core.config import SpeculativeConfig
from outrider.core.errors import ConfigError

_PREFIX = "speculation"
_RENAMED = {"model": "draft_model"}

SGLANG_ALGORITHMS = {
    "NONE": "none",
    "NGRAM": "ngram",
    "STANDALONE": "draft_model",
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "NEXTN": "mtp",
}
"""SGLang's algorithm names and ours."""


def add_speculation(parser: argparse.ArgumentParser) -> None:
    """Add ``--speculative-config``, one option a field, and SGLang's flags."""
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='a JSON object with the keys below, such as {"method": "suffix"}, or just the name of a method',
    )
    add_fields(group, SpeculativeConfig, _PREFIX, rename=_RENAMED)
    sglang = parser.add_argument_group("speculation, in SGLang's words")
    sglang.add_argument("--speculative-algorithm", metavar="NAME", help="method: " + ", ".join(SGLANG_ALGORITHMS))
    sglang.add_argument("--speculative-draft-model-path", metavar="MODEL", help="model of the drafter")
    sglang.add_argument(
        "--speculative-num-draft-tokens",
        metavar="N",
        type=int,
        help="tokens verified per round, the last committed one included: num_speculative_tokens + 1",
    )
    sglang.add_argument("--speculative-num-steps", metavar="N", type=int, help="max_draft_depth")
    sglang.add_argument("--speculative-eagle-topk", metavar="N", type=int, help="tree_width")


def speculation(args: argparse.Namespace) -> SpeculativeConfig:
    """The configuration that the options ask for, its method and acceptance rule checked.

    A key may be given twice only with the same value; otherwise ConfigError names both options.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, key, value in (*_from_json(args), *_from_fields(args), *_from_sglang(args)):
        if key in values and values[key] != value:
            raise ConfigError(f"{origins[key]} says {key}={values[key]!r}, {origin} says {key}={value!r}; drop one")
        values[key], origins[key] = value, origin
    config = SpeculativeConfig.from_dict(values)
    from outrider.engine.names import check_names

    check_names(config)
    return config


_Setting = tuple[str, str, Any]
"""(option it came from, key, value)"""


def _from_json(args: argparse.Namespace) -> Iterable[_Setting]:
    text: str | None = getattr(args, "speculative_config", None)
    if text is None:
        return
    if not text.lstrip().startswith("{"):
        yield "--speculative-config", "method", SpeculativeConfig.parse(text).method
        return
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--speculative-config is not valid JSON: {error}") from None
    for key, value in values.items():
        yield "--speculative-config", key, value


def _from_fields(args: argparse.Namespace) -> Iterable[_Setting]:
    for key, value in given(args, _PREFIX).items():
        yield "--" + _RENAMED.get(key, key).replace("_", "-"), key, value


def _from_sglang(args: argparse.Namespace) -> Iterable[_Setting]:
    if args.speculative_algorithm is not None:
        name = args.speculative_algorithm
        yield "--speculative-algorithm", "method", SGLANG_ALGORITHMS.get(name.upper(), name.lower())
    if args.speculative_draft_model_path is not None:
        yield "--speculative-draft-model-path", "model", args.speculative_draft_model_path
    if args.speculative_num_draft_tokens is not None:
        number = args.speculative_num_draft_tokens
        if number < 2:
            raise ConfigError(
                f"--speculative-num-draft-tokens={number} counts the last committed token too, so it must be at least 2"
            )
        yield "--speculative-num-draft-tokens", "num_speculative_tokens", number - 1
    if args.speculative_num_steps is not None:
        yield "--speculative-num-steps", "max_draft_depth", args.speculative_num_steps
    if args.speculative_eagle_topk is not None:
        yield "--speculative-eagle-topk", "tree_width", args.speculative_eagle_topk
