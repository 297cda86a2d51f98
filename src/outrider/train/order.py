"""Which samples are trained on, in which order: a function of the samples and the seed alone."""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

from outrider.train.batches import AHEAD
from outrider.train.data import Sample

_WINDOW = 16
"""Batches' worth of samples that are sorted by length, so that those of one batch are about as long as one another."""


def digest(tokens: Sequence[int]) -> bytes:
    """What tells one sample from another."""
    return hashlib.sha256(array("q", tokens).tobytes()).digest()


def data_digest(samples: Sequence[Sample]) -> str:
    """What tells one set of samples, and what is to be learned of it, from another."""
    whole = hashlib.sha256()
    for sample in samples:
        whole.update(digest(sample.tokens))
        whole.update(repr([tuple(span) for span in sample.loss_from]).encode())
    return whole.hexdigest()


def split(samples: Sequence[Sample], held_out: float) -> tuple[list[int], list[int]]:
    """Numbers of the samples to train on, and of those held out, chosen by a hash of their tokens.

    A sample stays on its side whatever else there is, and equal samples are on the same side. Those too short for a
    single row are on neither.
    """
    sides: tuple[list[int], list[int]] = ([], [])
    for number, sample in enumerate(samples):
        if len(sample.tokens) > AHEAD:
            share = int.from_bytes(digest(sample.tokens)[:8], "big") / 2**64
            sides[share < held_out].append(number)
    return sides


def with_questions(samples: Sequence[Sample], held_out: float) -> list[Sample]:
    """The samples to train on with all that is said in them to be learned, up to the end of the last answer.

    What all of them begin with, as a template does, is left out. Those held out stay as they are: what counts is how
    well answers are guessed.
    """
    shortest = min((len(sample.tokens) for sample in samples), default=0)
    common = 0
    while common < shortest and len({sample.tokens[common] for sample in samples}) == 1:
        common += 1
    changed = list(samples)
    for number in split(samples, held_out)[0]:
        end = samples[number].loss_from[-1][1]
        if common < end:
            changed[number] = replace(samples[number], loss_from=[(max(common, 1), end)])
    return changed


def batches(samples: Sequence[Sample], chosen: Sequence[int], batch_tokens: int, seed: int) -> list[list[int]]:
    """The chosen samples in random order, cut into batches of about ``batch_tokens``, each of similar lengths."""
    randomness = random.Random(seed)
    order = list(chosen)
    randomness.shuffle(order)
    found: list[list[int]] = []
    for window in _cut(samples, order, _WINDOW * batch_tokens):
        window.sort(key=lambda number: len(samples[number].tokens))
        cut = _cut(samples, window, batch_tokens)
        randomness.shuffle(cut)
        found += cut
    return found


def in_order(samples: Sequence[Sample], chosen: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """The chosen samples in batches, shortest first."""
    return _cut(samples, sorted(chosen, key=lambda number: len(samples[number].tokens)), batch_tokens)


def _cut(samples: Sequence[Sample], order: Sequence[int], tokens: int) -> list[list[int]]:
    """``order`` in pieces of at most that many tokens, or of one sample."""
    pieces: list[list[int]] = []
    room = 0
    for number in order:
        size = len(samples[number].tokens)
        if size > room:
            pieces.append([])
            room = tokens
        pieces[-1].append(number)
        room -= size
    return pieces
