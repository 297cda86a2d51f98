"""Repetitions that a text can be divided among in many ways are refused: every request of a batch would wait for them.

xgrammar follows all readings of a text at once. Where a repeated part may go on with the very characters that begin
the next part, as in ``([a-z]+ ?)*``, each character can belong to either, and a token takes up to thousands of times
as long as where parts end in something of their own, as in ``([a-z]+ )*``. (Measured with xgrammar 0.2.9 and a
vocabulary of 49,000: 20 to 2,500 ms against 0.1.) What is counted here depends on the grammar alone, not on a clock.

It is an estimate: an ambiguity between alternatives, or by a recursion other than a loop, is not seen.
`GrammarMask` gives up on what is slow for such reasons.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.grammar.vocabulary import xgrammar

MOST_WAYS = 16
"""Parts times the places in each: ``([a-z]{1,4} ?){1,3}`` has 3 times (4 + 1), and an unlimited repetition too many."""
_MANY = MOST_WAYS + 1

_TURNS = 8
"""Times that a rule is looked at, on average, before a grammar counts as too intricate to be measured."""

_FORMAT = "v18"
"""The form of serialised grammars that is read here. Of one in another form nothing is known, and nothing refused."""
_BYTES, _CLASS, _CLASS_STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _REPEAT = 0, 1, 2, 3, 4, 5, 6, 8
_OTHERS = 1 << 128
"""Stands for all characters beyond ASCII, in sets of characters that are written as bits."""
_ALL = 2 * _OTHERS - 1


def fault_of_grammar(grammar: Any) -> str | None:
    """What is wrong with the repetitions of an ``xgrammar.Grammar``; None if nothing is."""
    data = json.loads(grammar.serialize_json())
    if data["__VERSION__"] != _FORMAT or _Rules(data).ways() <= MOST_WAYS:
        return None
    return (
        "a repeated part can go on with the characters that begin the next one, which takes too long to follow; let it "
        "end in something else, as in ([a-z]+ )* rather than ([a-z]+ ?)* or ([a-z]+)*"
    )


def fault_of_regex(expression: str) -> str | None:
    """As `fault_of_grammar`; raises what xgrammar raises for an expression that it cannot read."""
    return fault_of_grammar(xgrammar().Grammar.from_regex(expression))


@dataclass(frozen=True)
class _Part:
    """What a piece of a grammar writes. empty: nothing, possibly. first: characters that it may begin with. more: those
    that a whole text of it may go on with and still be one. size: places in it, `_MANY` at most.
    """

    empty: bool = False
    first: int = 0
    more: int = 0
    size: int = 0

    def ways(self, times: int) -> int:
        """In how many ways, about, that many of it in a row can divide a text; 1 if there is but one."""
        return times * self.size if times > 1 and self.size > 1 and self.first & self.more else 1


class _Rules:
    """The rules of one grammar, and what is known of each: the least that agrees with all of them."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        ends = [*data["grammar_expr_indptr"][1:], len(data["grammar_expr_data"])]
        self._expressions: list[Sequence[int]] = [
            data["grammar_expr_data"][start:end] for start, end in zip(data["grammar_expr_indptr"], ends, strict=True)
        ]
        self._bodies: list[int] = [rule[1] for rule in data["rules"]]
        self._loops: list[list[Sequence[int]]] = []
        self._ends: list[list[int]] = []
        for rule in range(len(self._bodies)):
            self._divide(rule)
        self._known = [_Part()] * len(self._bodies)
        self._settle()

    def ways(self) -> int:
        """The most that one repetition or loop has."""
        found = [1]
        for kind, _, *rest in self._expressions:
            if kind == _REPEAT:
                found.append(self._known[rest[0]].ways(_MANY if rest[2] < 0 else rest[2]))
        found.extend(_either(map(self._sequence, loops)).ways(_MANY) for loops in self._loops)
        return max(found)

    def _settle(self) -> None:
        """Go on until nothing changes; a grammar so intricate that it takes too long is left as it is known by then."""
        uses = [list(self._rules_in(body)) for body in self._bodies]
        users: defaultdict[int, list[int]] = defaultdict(list)
        for rule, used in enumerate(uses):
            for other in used:
                users[other].append(rule)
        waiting = deque(_used_first(uses))
        queued = set(waiting)
        for _ in range(_TURNS * len(uses)):
            if not waiting:
                break
            rule = waiting.popleft()
            queued.discard(rule)
            part, before = self._rule(rule), self._known[rule]
            if before.size:  # what grows once more is part of a recursion, which has no end
                part = replace(part, size=_MANY if part.size > before.size else before.size)
            if part != before:
                self._known[rule] = part
                again = [user for user in dict.fromkeys(users[rule]) if user not in queued]
                waiting.extend(again)
                queued.update(again)

    def _rule(self, rule: int) -> _Part:
        """What is known of a rule by what is known of others. A loop goes on where what ends it begins like a turn."""
        part = self._of(self._bodies[rule])
        turn = _either(map(self._sequence, self._loops[rule]))
        end = _either(map(self._of, self._ends[rule]))
        goes_on = end.empty or end.first & turn.first
        return _Part(part.empty, part.first, part.more | (turn.first if goes_on else 0), part.size)

    def _rules_in(self, expression: int) -> Iterator[int]:
        kind, _, *rest = self._expressions[expression]
        if kind in (_RULE, _REPEAT):
            yield rest[0]
        elif kind in (_SEQUENCE, _CHOICES):
            for inner in rest:
                yield from self._rules_in(inner)

    def _divide(self, rule: int) -> None:
        """Tell a rule's alternatives that end in its own name, and so make a loop, from those that end the loop."""
        kind, _, *choices = self._expressions[self._bodies[rule]]
        loops: list[Sequence[int]] = []
        ends: list[int] = []
        for choice in choices if kind == _CHOICES else ():
            inner, _, *rest = self._expressions[choice]
            if inner == _SEQUENCE and len(rest) > 1 and list(self._expressions[rest[-1]]) == [_RULE, 1, rule]:
                loops.append(rest[:-1])
            else:
                ends.append(choice)
        self._loops.append(loops)
        self._ends.append(ends)

    def _of(self, expression: int) -> _Part:
        kind, _, *rest = self._expressions[expression]
        if kind == _BYTES:
            return _Part(first=_bit(rest[0]), size=1) if rest else _Part(empty=True)
        if kind == _CLASS:
            return _Part(first=_class(rest), size=1)
        if kind == _CLASS_STAR:
            return _Part(empty=True, first=_class(rest), more=_class(rest), size=_MANY)
        if kind == _RULE:
            return self._known[rest[0]]
        if kind == _SEQUENCE:
            return self._sequence(rest)
        if kind == _CHOICES:
            return _either(map(self._of, rest))
        if kind == _REPEAT:
            return _repeated(self._known[rest[0]], rest[1], rest[2])
        return _Part(empty=kind == _EMPTY, size=int(kind != _EMPTY))

    def _sequence(self, expressions: Iterable[int]) -> _Part:
        whole = _Part(empty=True)
        for part in map(self._of, expressions):
            whole = _Part(
                whole.empty and part.empty,
                whole.first | (part.first if whole.empty else 0),
                part.more | (whole.more | part.first if part.empty else 0),
                min(whole.size + part.size, _MANY),
            )
        return whole


def _used_first(uses: Sequence[Sequence[int]]) -> list[int]:
    """All rules, each behind those that it uses as far as they do not use one another."""
    order: dict[int, None] = {}
    seen: set[int] = set()
    for start in range(len(uses)):
        path = [] if start in seen else [(start, iter(uses[start]))]
        seen.add(start)
        while path:
            rule, left = path[-1]
            following = next((other for other in left if other not in seen), None)
            if following is None:
                order[rule] = None
                path.pop()
            else:
                seen.add(following)
                path.append((following, iter(uses[following])))
    return list(order)


def _either(parts: Iterable[_Part]) -> _Part:
    whole = _Part()
    for part in parts:
        size = min(whole.size + part.size, _MANY)
        whole = _Part(whole.empty or part.empty, whole.first | part.first, whole.more | part.more, size)
    return whole


def _repeated(part: _Part, least: int, most: int) -> _Part:
    """most: -1 for no limit."""
    if not most:
        return _Part(empty=True)
    more = part.more | (part.first if most != least else 0)
    return _Part(least == 0 or part.empty, part.first, more, min(part.size * (_MANY if most < 0 else most), _MANY))


def _bit(character: int) -> int:
    character &= 0xFFFFFFFF
    return 1 << character if character < 128 else _OTHERS


def _class(data: Sequence[int]) -> int:
    """The characters of a class: whether it is negated, then first and last of each range."""
    found = 0
    for low, high in zip(data[1::2], data[2::2], strict=True):
        found |= _OTHERS if high > 127 else 0
        found |= (1 << (min(high, 127) + 1)) - (1 << low) if low < 128 else 0
    return found if not data[0] else (_ALL & ~found) | _OTHERS
