"""Writes user prompts of many kinds, for the data that the shipped drafters are trained on.

    python training/prompts.py --count 6000 --seed 1 --out prompts.jsonl [--exclude FILE ...]

One JSON object a line: ``prompt`` (what the user says), ``kind``, and on some lines ``turns`` (the prompt, and what the
user says after the answer). The same count, seed and Python version give the same file. Kinds are evenly represented,
and no prompt comes twice.

``--exclude FILE`` drops every prompt that shares a run of twelve words with the file, whatever its format: name the
prompts that a drafter will be measured on, and none of them can be in its training data.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from generators import code, texts
from generators.grammar import from_templates

RUN = 12
"""Words in a row that make two texts share something."""

FOLLOW_UPS = 0.15
"""Share of the prompts that have a second turn."""

PATIENCE = 200
"""Tries for a prompt that is new, before its kind counts as used up."""


def _templates(name: str) -> Callable[[random.Random], str]:
    return lambda rng: from_templates(name, rng)


def _summary(rng: random.Random) -> str:
    return code.documentation(rng) if rng.random() < 0.2 else texts.summary(rng)


def _coding(rng: random.Random) -> str:
    return code.question(rng) if rng.random() < 0.3 else from_templates("coding", rng)


KINDS: dict[str, Callable[[random.Random], str]] = {
    "open": _templates("open"),
    "writing": _templates("writing"),
    "roleplay": _templates("roleplay"),
    "instruction": _templates("instruction"),
    "reasoning": _templates("reasoning"),
    "math": _templates("math"),
    "extraction": _templates("extraction"),
    "stem": _templates("stem"),
    "humanities": _templates("humanities"),
    "qa": _templates("qa"),
    "coding": _coding,
    "code_completion": code.completion,
    "code_edit": code.edit,
    "translation": texts.translation,
    "summary": _summary,
    "passages": texts.passages,
    "rewrite": texts.rewrite,
}


class Prompt(NamedTuple):
    """One line of the output."""

    kind: str
    prompt: str
    follow_up: str | None


def runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of ``RUN`` words in the text, case and punctuation left out.

    A text that is shorter counts as one run, so that a short prompt is found where it stands alone.
    """
    words = re.findall(r"\w+", text.lower())
    for start in range(max(1, len(words) - RUN + 1)):
        yield tuple(words[start : start + RUN])


def excluded_runs(path: Path) -> set[tuple[str, ...]]:
    """The runs of a file: of each string in each line where lines are JSON, else of the whole text."""
    text = path.read_text(encoding="utf-8")
    try:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return set(runs(text))
    return {run for value in found for string in _strings(value) for run in runs(string)}


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)


def generate(count: int, seed: int, excluded: set[tuple[str, ...]]) -> Iterator[Prompt]:
    """``count`` prompts, the kinds taken in turn; fewer once every kind is used up."""
    seen: set[str] = set()
    active = {kind: random.Random(f"{seed}/{kind}") for kind in KINDS}
    made = 0
    while made < count and active:
        for kind, rng in list(active.items()):
            for _ in range(PATIENCE):
                prompt = KINDS[kind](rng)
                if prompt not in seen and excluded.isdisjoint(runs(prompt)):
                    break
            else:
                del active[kind]
                continue
            seen.add(prompt)
            yield Prompt(kind, prompt, texts.follow_up(rng, kind) if rng.random() < FOLLOW_UPS else None)
            made += 1
            if made == count:
                return


def main() -> int:
    parser = argparse.ArgumentParser(description="Write user prompts of many kinds as JSON lines.")
    parser.add_argument("--count", type=int, default=6000, help="how many prompts")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives other prompts")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--exclude", type=Path, nargs="*", default=[], help="files that no prompt may share words with")
    options = parser.parse_args()
    excluded = {run for path in options.exclude for run in excluded_runs(path)}
    prompts = list(generate(options.count, options.seed, excluded))
    random.Random(options.seed).shuffle(prompts)
    with options.out.open("w", encoding="utf-8") as out:
        for kind, prompt, follow_up in prompts:
            line = {"prompt": prompt, "kind": kind} | ({"turns": [prompt, follow_up]} if follow_up else {})
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
    for kind, number in sorted(Counter(prompt.kind for prompt in prompts).items()):
        print(f"{number:7d}  {kind}", file=sys.stderr)
    if len(prompts) < options.count:
        print(f"only {len(prompts)} of {options.count}: every kind is used up", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
