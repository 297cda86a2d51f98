"""Prompts that carry a text: translations, summaries, passages with a question, and changes to a text."""

from __future__ import annotations

import random

from generators.grammar import Filler, bank


def article(rng: random.Random, fewest: int = 5) -> str:
    """A report put together from one of the skeletons of ``banks/articles.json``, at least ``fewest`` sentences long.

    The first sentence always stands; of the others some are left out, and the rest keep their order.
    """
    sentences = rng.choice(bank("articles")["articles"])
    count = rng.randint(min(fewest, len(sentences)), len(sentences))
    kept = sorted(rng.sample(range(1, len(sentences)), count - 1))
    filler = Filler(rng, bank("articles")["slots"])
    return filler.fill(" ".join([sentences[0], *(sentences[index] for index in kept)]))


def translation(rng: random.Random) -> str:
    """One to three sentences in one language, to be put into another."""
    content = bank("translation")
    language = rng.choice(content["languages"])
    into_english = rng.random() < 0.7
    source, target = (language, "English") if into_english else ("English", language)
    sentences = rng.sample(content["sentences"][source], rng.choice((1, 1, 1, 2, 2, 3)))
    text = ("" if source == "Chinese" else " ").join(sentences)
    frame = rng.choice(content["frames"])
    return frame.replace("{source}", source).replace("{target}", target).replace("{text}", Filler(rng).fill(text))


def summary(rng: random.Random) -> str:
    """A report of 80 to 400 words, now and then of two parts, to be summarised."""
    frame = rng.choice(bank("summary_frames"))
    text = article(rng, fewest=7)
    if rng.random() < 0.3:
        text = f"{text}\n\n{article(rng, fewest=5)}"
    return frame.replace("{text}", text)


def passages(rng: random.Random) -> str:
    """Two or three passages of an encyclopedia, and a question that one of them answers."""
    content = bank("passages")
    entries = rng.sample(content["entries"], rng.choice((2, 3, 3, 4)))
    question = rng.choice(rng.choice(entries)["questions"])
    style = rng.randrange(3)
    numbered = (
        [f"[{number}] {entry['text']}" for number, entry in enumerate(entries, 1)],
        [f"Passage {number}: {entry['title']}\n{entry['text']}" for number, entry in enumerate(entries, 1)],
        [entry["text"] for entry in entries],
    )[style]
    frame = rng.choice(content["frames"])
    return frame.replace("{passages}", "\n\n".join(numbered)).replace("{question}", question)


def rewrite(rng: random.Random) -> str:
    """A text and what to change in it, as a second turn would ask."""
    content = bank("rewrite")
    text = article(rng, fewest=3) if rng.random() < 0.4 else Filler(rng).fill(rng.choice(content["texts"]))
    return rng.choice(content["frames"]).replace("{change}", rng.choice(content["changes"])).replace("{text}", text)


def follow_up(rng: random.Random, kind: str) -> str:
    """What the user says after the answer to a prompt of this kind."""
    content = bank("follow_ups")
    return rng.choice(content[kind] if kind in content["alone"] else content[kind] * 3 + content["any"])
