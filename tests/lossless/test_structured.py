"""Constrained output: always valid, and with every drafter and rule what the target itself would have written.

Targets are functions of the visible history (tests/support/fakes.py), so that equality is exact.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from outrider.core.config import EngineConfig, SpeculativeConfig
from outrider.core.sampling import SamplingParams
from outrider.core.structured import StructuredOutputs
from outrider.drafters import DRAFTERS
from outrider.drafters.base import DrafterContext
from outrider.drafters.none import NoDrafter
from outrider.engine.outputs import RequestOutput
from tests.support.fake_heads import OpenFakeHeads, build_with_heads, hidden
from tests.support.fakes import (
    EOS,
    ChaosDrafter,
    FakeExecutor,
    make_engine,
    random_logits,
    run,
)
from tests.support.grammars import CHOICE, MODEL, NESTED, REGEX

METHODS = [*(name for name in DRAFTERS if name not in ("draft_model", "none")), "auto", "suffix+recycle+ngram"]
PARAMS = [
    SamplingParams(max_tokens=70, structured_outputs=REGEX, frequency_penalty=0.5),
    SamplingParams(max_tokens=70, structured_outputs=NESTED, temperature=0.8, top_p=0.95, seed=1),
    SamplingParams(max_tokens=40, temperature=1.0, seed=2, repetition_penalty=1.2),
    SamplingParams(max_tokens=70, structured_outputs=CHOICE, temperature=1.2, seed=3, top_k=3),
    SamplingParams(
        max_tokens=70,
        structured_outputs=REGEX,
        temperature=1.5,
        seed=4,
        frequency_penalty=0.4,
        min_tokens=12,
        min_p=0.01,
    ),
    SamplingParams(max_tokens=9, structured_outputs=REGEX, temperature=1.0, seed=5),
]
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [8] * 40, [3, 4, 5, 6, 7, 3, 4, 5], [20], [9, 12, 9, 12, 13], [4, 4]]


def answers(
    config: SpeculativeConfig, *, noise: float = 1.0, params: Sequence[SamplingParams] = PARAMS, batch: int = 6
) -> list[RequestOutput]:
    drafter = build_with_heads(DrafterContext(config, MODEL, OpenFakeHeads(noise)))
    executor = FakeExecutor(hidden=hidden)
    engine_config = EngineConfig(max_batch_size=batch, prefill_chunk=16)
    engine = make_engine(drafter, config=config, executor=executor, engine_config=engine_config, model=MODEL)
    requests = [engine.add(prompt, own) for prompt, own in zip(PROMPTS, params, strict=False)]
    run(engine, requests)
    assert executor.open_sequences == 0
    return [request.result() for request in requests]


def well_nested(text: str) -> bool:
    """Membership in the language of `NESTED`, by hand."""
    inner = re.fullmatch(r"x([ac]*)([e-m]+)([bd]*)x", text)
    return inner is not None and inner[3] == inner[1][::-1].translate(str.maketrans("ac", "bd"))


def check(output: RequestOutput, params: SamplingParams) -> None:
    """The text has the form that was asked for, or is the beginning of one that max_tokens cut short."""
    spec, text = params.structured_outputs, output.text
    if spec is None:
        return
    assert output.finish_reason == ("length" if len(output.token_ids) == params.max_tokens else "stop"), output
    if output.finish_reason == "length":
        assert re.fullmatch(r"[a-z .!]*", text)
    elif spec == REGEX:
        assert re.fullmatch(str(spec.regex), text), text
    elif spec == NESTED:
        assert well_nested(text), text
    else:
        assert text in CHOICE.choice, text  # type: ignore[operator]


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    """One by one, without speculation."""
    return answers(SpeculativeConfig(method="none"), batch=1)


def test_plain_text_has_the_form(plain: list[RequestOutput]) -> None:
    for output, params in zip(plain, PARAMS, strict=True):
        check(output, params)
    assert [output.finish_reason for output in plain[:5]] == ["stop", "stop", plain[2].finish_reason, "stop", "stop"]
    assert plain[5].finish_reason == "length"
    assert len(plain[4].token_ids) >= 12
    free = [SamplingParams(max_tokens=30) for _ in PROMPTS]
    for output in answers(SpeculativeConfig(method="none"), params=free):
        assert not re.fullmatch(str(REGEX.regex), output.text)


def configs() -> list[SpeculativeConfig]:
    chosen = [SpeculativeConfig(method=method, num_speculative_tokens=n) for method in METHODS for n in (4, 16)]
    chosen += [
        SpeculativeConfig(
            method="draft_model", model="target", num_speculative_tokens=5 * width, tree_width=width, adaptive=False
        )
        for width in (1, 3)
    ]
    return [*chosen, SpeculativeConfig(method="draft_model+suffix", model="target", num_speculative_tokens=12)]


@pytest.mark.parametrize("config", configs(), ids=lambda c: f"{c.method}-{c.num_speculative_tokens}")
def test_no_drafter_changes_a_token(config: SpeculativeConfig, plain: list[RequestOutput]) -> None:
    """In one batch: neighbours have other grammars, or none."""
    drafted = answers(config)
    for left, right in zip(drafted, plain, strict=True):
        assert (left.token_ids, left.text, left.finish_reason) == (right.token_ids, right.text, right.finish_reason)
    assert all(output.statistics.failures == 0 for output in drafted)
    if "draft_model" in config.method:
        assert all(output.statistics.accepted > 0 for output in drafted[:3])


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_change_nothing(seed: int, plain: list[RequestOutput]) -> None:
    """Trees of right, wrong, forbidden and end tokens, wide and deep."""
    engine = make_engine(ChaosDrafter(seed), model=MODEL)
    requests = [engine.add(prompt, own) for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
    run(engine, requests)
    assert [request.result().token_ids for request in requests] == [output.token_ids for output in plain]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("rule", ["rejection", "block", "typical"])
@pytest.mark.parametrize("method", ["draft_model", "recycle"])
def test_every_rule_keeps_the_form(method: str, rule: str, width: int) -> None:
    if rule == "block" and width > 1:
        pytest.skip("block verification judges chains")
    config = SpeculativeConfig(
        method=method,
        model="target" if method == "draft_model" else None,
        num_speculative_tokens=5 * width,
        tree_width=width,
        adaptive=False,
        acceptance=rule,
        allow_lossy=rule == "typical",
    )
    for shift in range(4):
        params = [
            SamplingParams(
                max_tokens=70,
                structured_outputs=own.structured_outputs,
                temperature=own.temperature,
                seed=10 * shift + i,
            )
            for i, own in enumerate(PARAMS)
        ]
        outputs = answers(config, params=params)
        for output, own in zip(outputs, params, strict=True):
            check(output, own)
        assert all(output.statistics.failures == 0 for output in outputs)


@pytest.mark.parametrize("rule", ["coupled", "rejection", "block"])
def test_the_target_as_its_own_drafter_is_accepted_in_full(rule: str) -> None:
    """The mask is the same for p and q: what is drawn from q is never forbidden, and where p = q nothing is lost."""
    config = SpeculativeConfig(
        method="draft_model", model="target", num_speculative_tokens=4, adaptive=False, acceptance=rule
    )
    for output in answers(config, noise=0.0):
        assert output.statistics.accepted_by_position[0] == output.statistics.drafted_rounds
        assert output.statistics.accepted >= output.statistics.committed - output.statistics.rounds


# -- where the constraint meets other parameters -----------------------------------------------------------------------


def fail_config(method: str) -> SpeculativeConfig:
    if method == "none":
        return SpeculativeConfig(method=method)
    model = "target" if method == "draft_model" else None
    return SpeculativeConfig(method=method, model=model, num_speculative_tokens=6, adaptive=False)


YES = StructuredOutputs(choice=["yes"])


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"structured_outputs": YES, "min_tokens": 5}, "yes"),
        ({"structured_outputs": YES, "banned_token_ids": [ord("s") - ord("a") + 3]}, "ye"),
        ({"structured_outputs": StructuredOutputs(grammar="root ::= root")}, ""),
    ],
    ids=["too short", "banned", "empty language"],
)
def test_where_nothing_is_left_the_request_fails_cleanly(
    more: dict[str, object], text: str, temperature: float, method: str
) -> None:
    """With the same tokens as without speculation; its neighbour goes on."""
    failing = SamplingParams(max_tokens=20, temperature=temperature, seed=1, **more)  # type: ignore[arg-type]
    good = SamplingParams(max_tokens=20, structured_outputs=CHOICE, temperature=temperature, seed=2)
    failed, fine = answers(fail_config(method), params=[failing, good])
    assert (failed.finish_reason, failed.text) == ("error", text)
    assert "no token is left" in str(failed.error)
    assert (fine.finish_reason, fine.error) == ("stop", None)


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_stop_tokens(method: str) -> None:
    """One that writes text cuts the output short; a control token ends it where the grammar does."""
    space = SamplingParams(max_tokens=20, structured_outputs=REGEX, stop_token_ids=[29], logit_bias={29: 9.0})
    control = SamplingParams(max_tokens=20, structured_outputs=YES, stop_token_ids=[1], logit_bias={1: 100.0})
    cut, ended = answers(fail_config(method), params=[space, control])
    assert (cut.finish_reason, cut.stop_reason, cut.token_ids[-1]) == ("stop", 29, 29)
    assert (ended.text, ended.token_ids[-1], ended.stop_reason) == ("yes", 1, 1)


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
def test_stop_strings_and_complete_texts(method: str) -> None:
    """A complete text is followed by the end and nothing else, however much the model would rather go on."""
    eager = SamplingParams(max_tokens=20, structured_outputs=YES, logit_bias={EOS: -100.0})
    stopped = SamplingParams(max_tokens=20, structured_outputs=YES, stop="e")
    whole, short = answers(fail_config(method), params=[eager, stopped])
    assert (whole.text, whole.token_ids[-1], whole.finish_reason) == ("yes", EOS, "stop")
    assert (short.text, short.stop_reason) == ("y", "e")


def test_logprobs_are_the_models_own() -> None:
    output = answers(fail_config("draft_model"), params=[SamplingParams(structured_outputs=YES, logprobs=1)])[0]
    assert output.logprobs is not None
    history = list(PROMPTS[0])
    for entry, token in zip(output.logprobs, output.token_ids, strict=True):
        assert entry.logprob == pytest.approx(float(random_logits(history).log_softmax(-1)[token]))
        history.append(token)


def test_a_target_that_breaks_off_fails_with_the_same_tokens() -> None:
    """NaN after the third token: the tokens before it are emitted, drafted or not."""

    def logits(history: Sequence[int]) -> torch.Tensor:
        broken = torch.full((32,), float("nan"))
        return broken if len(history) - len(PROMPTS[0]) == 3 else random_logits(history)

    results = []
    for drafter in (None, ChaosDrafter(1), ChaosDrafter(2)):
        executor = FakeExecutor(logits)
        engine = make_engine(drafter or NoDrafter(None), executor=executor, model=MODEL)
        request = engine.add(PROMPTS[0], SamplingParams(max_tokens=20))
        run(engine, [request])
        results.append((request.result().token_ids, request.result().finish_reason))
    assert results[0] == results[1] == results[2]
    assert len(results[0][0]) == 3
    assert results[0][1] == "error"
