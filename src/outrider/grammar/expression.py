"""What of a regular expression cannot be kept to is refused.

xgrammar passes over an anchor in the middle of an expression, and takes an escape that it does not know for the letter
itself, with a warning at best. (Found by trying each letter, xgrammar 0.2.9; the tests try them again.)
"""

from __future__ import annotations

_UNKNOWN = frozenset("ghijlmoqyzACEFGHIJKLMNOQRTUVXYZ")
"""Letters that mean nothing behind a backslash."""
_UNKNOWN_IN_CLASS = _UNKNOWN | frozenset("kpBP123456789")


def fault_of(expression: str) -> str | None:
    """What is not supported in an expression that has to match a whole text; None if there is nothing to be said here.

    Anchors may stand where they change nothing: at the ends of the expression and of its outermost alternatives.
    """
    depth, in_class, at = 0, False, 0
    while at < len(expression):
        character, before, behind = expression[at], expression[at - 1 : at], expression[at + 1 : at + 2]
        if character == "\\":
            if behind in (_UNKNOWN_IN_CLASS if in_class else _UNKNOWN) and behind:
                return f"the escape \\{behind} at position {at} is not supported"
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif (character == "^" and (depth or before not in ("", "|"))) or (
            character == "$" and (depth or behind not in ("", "|"))
        ):
            return f"{character} at position {at} is supported only at the ends of an expression"
        at += 1
    return None
