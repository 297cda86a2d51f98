from __future__ import annotations

import pytest

from outrider.cli.parser import Parser
from outrider.cli.speculation import add_speculation, speculation
from outrider.core.config import SpeculativeConfig
from outrider.core.errors import ConfigError, LossyNotAllowedError, UnknownNameError, UsageError


def config(*words: str) -> SpeculativeConfig:
    parser = Parser(prog="test")
    add_speculation(parser)
    return speculation(parser.parse(words))


def test_nothing_given_is_the_default() -> None:
    assert config() == SpeculativeConfig()


@pytest.mark.parametrize(
    "words",
    [
        ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}'],
        ["--speculative-config", "ngram", "--num-speculative-tokens", "5"],
        ["--method", "ngram", "--num-speculative-tokens", "5"],
        ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6"],
        ["--speculative-algorithm", "ngram", "--num-speculative-tokens", "5"],
        ["--method", "ngram", "--speculative-config", '{"method": "ngram"}', "--num-speculative-tokens", "5"],
    ],
)
def test_every_way_of_saying_the_same_thing(words: list[str]) -> None:
    assert config(*words) == SpeculativeConfig(method="ngram", num_speculative_tokens=5)


def test_sglang_flags() -> None:
    words = "--speculative-algorithm STANDALONE --speculative-draft-model-path some/model --speculative-num-steps 3"
    assert config(*words.split(), "--speculative-eagle-topk", "4", "--speculative-num-draft-tokens", "16") == (
        SpeculativeConfig(
            method="draft_model", model="some/model", max_draft_depth=3, tree_width=4, num_speculative_tokens=15
        )
    )


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--method", "ngram", "--speculative-config", '{"method": "suffix"}'], ["--method", "--speculative-config"]),
        (["--method", "ngram", "--speculative-algorithm", "NONE"], ["--method", "--speculative-algorithm"]),
        (
            ["--num-speculative-tokens", "4", "--speculative-num-draft-tokens", "4"],
            ["--num-speculative-tokens", "--speculative-num-draft-tokens"],
        ),
        (["--tree-width", "2", "--speculative-eagle-topk", "3"], ["--tree-width", "--speculative-eagle-topk"]),
    ],
)
def test_contradictions_name_both_options(words: list[str], options: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config(*words)
    assert all(option in str(error.value) for option in options)
    assert "drop one" in str(error.value)


@pytest.mark.parametrize(
    ("words", "kind", "message"),
    [
        (["--method", "sufix"], UnknownNameError, "did you mean 'suffix'?"),
        (["--method", "suffix+ngrm"], UnknownNameError, "did you mean 'ngram'?"),
        (["--speculative-algorithm", "FANCY"], UnknownNameError, "unknown speculative method 'fancy'"),
        (["--speculative-config", '{"methd": "suffix"}'], UnknownNameError, "did you mean 'method'?"),
        (["--speculative-config", '{"method": '], ConfigError, "not valid JSON"),
        (["--speculative-config", '["suffix"]'], ConfigError, "must be a JSON object"),
        (["--speculative-config", '{"method": 3}'], ConfigError, "must be a string"),
        (["--acceptance", "cupled"], UnknownNameError, "did you mean 'coupled'?"),
        (["--acceptance", "typical"], LossyNotAllowedError, "allow_lossy"),
        (["--method", "draft_model"], ConfigError, "needs 'model'"),
        (["--method", "ngram", "--draft-model", "x"], ConfigError, "would ignore it"),
        (["--speculative-num-draft-tokens", "1"], ConfigError, "at least 2"),
        (["--num-speculative-tokens", "0"], ConfigError, "at least 1"),
    ],
)
def test_bad_input(words: list[str], kind: type[UsageError], message: str) -> None:
    with pytest.raises(kind) as error:
        config(*words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
