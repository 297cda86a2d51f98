"""A suffix trie with counts: how often each context was seen, and what followed it.

Every context of up to ``depth`` tokens is counted, but a context that was seen only once is not stored: it is a *leaf*,
a position in the text from which its continuation can be read. A leaf becomes a node when it is seen again. So a text
of n tokens takes about n leaves and as many nodes as it has repeats, and appending a token costs only as many steps as
the text's end has earlier occurrences of different lengths (at most ``depth``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

BORDER = -1
"""Ends a text in the store. No token has this id, so that nothing is ever read on into the next text."""


class Node:
    """A context. count: how often it was seen. followed: how often with a known next token (the sum over children)."""

    __slots__ = ("children", "count", "followed")

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.followed = 0
        self.children: dict[int, Node | int] = {}


Cursor = Node | int
"""A place in the trie: a node, or (inside a leaf) the position of the token that comes next."""


class SuffixTrie:
    """Counts over one growing text, or over several texts of which the oldest can be forgotten.

    depth: the longest string that is counted; contexts are up to depth - 1 long, their last token's follower included.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._root = Node()
        self._text: list[int] = []
        self._base = 0
        self._lengths: deque[int] = deque()
        self._open_length = 0
        self._suffixes: list[Node] = []

    @property
    def num_texts(self) -> int:
        """Texts that were ended and not forgotten."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts in the store."""
        return self._root.count

    def append(self, token: int) -> None:
        """Add a token to the current text."""
        self._text.append(token)
        self._open_length += 1
        self._root.count += 1
        after = self._base + len(self._text)
        grown: list[Node] = []
        # Suffixes of the text that are nodes, longest first. Their lengths need no bookkeeping: every suffix of a
        # string that was seen before was itself seen before, so that the i-th from the end has length i.
        deepest = len(self._suffixes) == self._depth - 1
        for node in (*self._suffixes, self._root):
            node.followed += 1
            child = node.children.get(token)
            if child is None:
                node.children[token] = after
            else:
                if isinstance(child, int):
                    child = node.children[token] = Node(count=1) if deepest else self._opened(child)
                child.count += 1
                if not deepest:
                    grown.append(child)
            deepest = False
        self._suffixes = grown

    def end_text(self) -> None:
        """End the current text; what is appended next belongs to another one."""
        self._text.append(BORDER)
        self._lengths.append(self._open_length)
        self._open_length = 0
        self._suffixes = []

    def forget_oldest(self) -> None:
        """Take back everything that the oldest ended text added."""
        length = self._lengths.popleft()
        text = self._text[:length]
        for start in range(length):
            self._uncount(text[start : start + self._depth])
        self._root.count -= length
        del self._text[: length + 1]
        self._base += length + 1

    def find(self, context: Sequence[int]) -> tuple[Cursor, int] | None:
        """Cursor and length of the longest end of ``context`` that was seen with something after it; None if none was.

        If a string was seen so, its own ends were too: the length is found by bisection.
        """
        low, high = 0, min(len(context), self._depth - 1)
        best: Cursor | None = None
        while low < high:
            middle = (low + high + 1) // 2
            cursor = self._walk(context[len(context) - middle :])
            if cursor is not None and self.followed(cursor):
                low, best = middle, cursor
            else:
                high = middle - 1
        return None if best is None else (best, low)

    def followed(self, cursor: Cursor) -> int:
        """How often the cursor's context was seen with something after it."""
        if isinstance(cursor, Node):
            return cursor.followed
        return int(self._token_at(cursor) != BORDER)

    def followers(self, cursor: Cursor, least: float = 0.0) -> list[tuple[int, int, Cursor]]:
        """(token, count, cursor after it) for everything that followed the cursor's context ``least`` times or more."""
        if isinstance(cursor, Node):
            seen = (
                (token, child.count if isinstance(child, Node) else 1, child)
                for token, child in cursor.children.items()
            )
            return [follower for follower in seen if follower[1] >= least]
        token = self._token_at(cursor)
        return [(token, 1, cursor + 1)] if token != BORDER and least <= 1 else []

    def _token_at(self, position: int) -> int:
        index = position - self._base
        return self._text[index] if index < len(self._text) else BORDER

    def _opened(self, leaf: int) -> Node:
        """The node that a leaf becomes: seen once, with its one continuation as a leaf."""
        node = Node(count=1)
        token = self._token_at(leaf)
        if token != BORDER:
            node.children[token] = leaf + 1
            node.followed = 1
        return node

    def _walk(self, string: Sequence[int]) -> Cursor | None:
        cursor: Cursor = self._root
        for token in string:
            if isinstance(cursor, Node):
                child = cursor.children.get(token)
                if child is None:
                    return None
                cursor = child
            elif self._token_at(cursor) == token:
                cursor += 1
            else:
                return None
        return cursor

    def _uncount(self, string: Sequence[int]) -> None:
        node = self._root
        for token in string:
            node.followed -= 1
            child = node.children[token]
            if isinstance(child, int):
                # Seen once, and that was here; what lies below is not stored.
                del node.children[token]
                return
            child.count -= 1
            if child.count == 0:
                del node.children[token]
                return
            node = child
