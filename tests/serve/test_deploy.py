"""What is in deploy/: files that no engine of their kind runs here, so they are parsed, linted and held to the code."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from outrider.cli.main import build_parser
from tests.serve.support import circling, open_llm, post, serving

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
INSTRUCTIONS = {
    *("FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"),
    *("ENTRYPOINT", "CMD"),
}


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


# -- Grafana -----------------------------------------------------------------------------------------------------------


def test_every_expression_asks_for_metrics_that_exist() -> None:
    with serving(open_llm(circling)) as running:
        post(running, "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 100})
        names = {sample.partition("{")[0] for sample in running.metrics()}
    # These have samples once a drafter has drafted, or failed.
    labelled = {"outrider:drafter_num_drafts_total", "outrider:drafter_num_failures_total"}
    for expression in expressions():
        asked = set(re.findall(r"outrider:\w+", expression))
        assert asked, expression
        assert asked <= names | labelled, expression


def test_counters_are_shown_as_rates() -> None:
    for expression in expressions():
        for name in re.findall(r"outrider:\w+(?:_total|_bucket)\b", expression):
            assert f"rate({name}" in expression


def test_panels_have_their_own_place() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_quotes_and_brackets_are_closed() -> None:
    for expression in expressions():
        assert expression.count("(") == expression.count(")")
        assert expression.count("{") == expression.count("}")
        assert expression.count('"') % 2 == 0


# -- Docker ------------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile, in order, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in text.splitlines() if line.strip()]


def test_the_dockerfile_is_well_formed() -> None:
    found = instructions()
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= INSTRUCTIONS
    for name, rest in found:
        if rest.lstrip().startswith("["):
            assert all(isinstance(word, str) for word in json.loads(rest)), f"{name} is not in exec form"
        if name == "RUN":
            assert "apt-get install" not in rest or "rm -rf /var/lib/apt/lists" in rest
            subprocess.run(["sh", "-n", "-c", rest], check=True)


def test_the_image_copies_what_is_there_and_runs_as_nobody_special() -> None:
    found = instructions()
    for name, rest in found:
        words = rest.split()
        if name == "COPY" and not words[0].startswith("--from"):
            assert all((DEPLOY.parent / word).exists() for word in words[:-1])
    names = [name for name, _ in found]
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert all(":" in rest.split()[0] for name, rest in found if name == "FROM"), "an image without a tag"


def test_the_image_starts_the_server() -> None:
    found = dict(instructions())
    words = [*json.loads(found["ENTRYPOINT"]), *json.loads(found["CMD"])]
    args = build_parser(words[1]).parse(words[1:])
    assert vars(args)["server.port"] == int(found["EXPOSE"])


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint")
def test_hadolint_takes_the_dockerfile() -> None:
    """Packages of the distribution are not pinned: its mirrors keep the newest version alone (DL3008)."""
    words = ["hadolint", "--ignore", "DL3008", str(DEPLOY / "Dockerfile")]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


# -- systemd -----------------------------------------------------------------------------------------------------------


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(DEPLOY / "outrider.service")
    return parser


def test_the_unit_starts_the_server_and_gives_it_time_to_drain() -> None:
    service = unit()["Service"]
    words = shlex.split(service["ExecStart"].replace("${OUTRIDER_MODEL}", "smollm2-135m"))
    args = build_parser(words[1]).parse(words[1:])
    assert int(service["TimeoutStopSec"]) > vars(args)["server.drain_timeout"]
    assert service["KillSignal"] == "SIGTERM"
    assert service["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """The program is not installed where the unit looks for it, so that it is replaced by one that is."""
    text = re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", (DEPLOY / "outrider.service").read_text())
    (tmp_path / "outrider.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "outrider.service")], capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if "outrider.service" in line]
    assert ours == []
