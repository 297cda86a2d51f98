"""Which samples are trained on, and in which order."""

from __future__ import annotations

import random

from outrider.train.data import Sample
from outrider.train.order import batches, data_digest, in_order, split, with_questions


def samples(count: int) -> list[Sample]:
    rng = random.Random(0)
    lengths = [rng.randrange(3, 60) for _ in range(count)]
    return [Sample([rng.randrange(1000) for _ in range(length)], [(1, length)]) for length in lengths]


def test_held_out_samples_stay_held_out() -> None:
    some = samples(600)
    learned, held = split(some, 0.1)
    assert sorted(learned + held) == list(range(600))
    assert 30 < len(held) < 90
    half = split(some[:300], 0.1)
    assert half == ([n for n in learned if n < 300], [n for n in held if n < 300])
    assert set(split(some, 0.05)[1]) < set(held)
    assert split(some, 0.0)[1] == []


def test_equal_samples_are_on_one_side_and_short_ones_on_none() -> None:
    some = samples(200)
    learned, held = split([*some, *some, Sample([1, 2], [(0, 2)])], 0.2)
    assert {n % 200 for n in learned} & {n % 200 for n in held} == set()
    assert 400 not in {*learned, *held}


def test_questions_are_learned_but_not_measured() -> None:
    template = [1, 2, 3, 4]
    some = [
        Sample([*template, *sample.tokens, 0, 0, 0], [(len(sample.tokens), len(sample.tokens) + 5)])
        for sample in samples(200)
    ]
    changed = with_questions(some, 0.1)
    learned, held = split(some, 0.1)
    assert {n: changed[n].loss_from for n in learned} == {n: [(4, some[n].loss_from[-1][1])] for n in learned}
    assert [changed[n] for n in held] == [some[n] for n in held]
    assert all(new.tokens == old.tokens for new, old in zip(changed, some, strict=True))
    assert data_digest(changed) != data_digest(some)
    assert with_questions([], 0.1) == []


def test_batches_hold_every_sample_once_within_the_limit() -> None:
    some = samples(300)
    chosen = list(range(0, 300, 2))
    made = batches(some, chosen, 200, seed=1)
    assert sorted(number for batch in made for number in batch) == chosen
    sizes = [[len(some[number].tokens) for number in batch] for batch in made]
    assert all(sum(size) <= 200 for size in sizes)
    padded = sum(max(size) * len(size) for size in sizes)
    assert padded < 1.25 * sum(map(sum, sizes))
    assert made == batches(some, chosen, 200, seed=1)
    assert made != batches(some, chosen, 200, seed=2)


def test_a_sample_that_is_longer_than_a_batch_has_one_of_its_own() -> None:
    some = samples(20)
    made = in_order(some, range(20), 10)
    assert sorted(number for batch in made for number in batch) == list(range(20))
    assert [] not in made


def test_other_data_has_another_digest() -> None:
    some = samples(5)
    changed = [*some[:4], Sample(some[4].tokens, [(2, len(some[4].tokens))])]
    assert len({data_digest(some), data_digest(some[:4]), data_digest(changed)}) == 3
    assert data_digest(some) == data_digest(samples(5))
