"""Stop rules, applied token by token to committed tokens only.

Because a block of accepted tokens passes through here one by one, the rule that fires first wins, wherever in the
block it fires, and nothing behind it is emitted or counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.errors import SamplingParamsError

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingState
    from outrider.engine.outputs import FinishReason
    from outrider.models.tokenizer import Tokenizer


class _Beginning:
    """How much of a stop string's beginning the text ends with, kept up to date character by character.

    Knuth, Morris and Pratt's automaton: the time does not depend on how long the stop string is, nor on how much of it
    the text repeats. length: characters of it that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0, 0]
        self.length = 0

    def push(self, text: str) -> None:
        stop, size = self._stop, self.length
        for character in text:
            if size == len(stop):
                size = self._border(size)
            while size and stop[size] != character:
                size = self._border(size)
            size += stop[size] == character
        self.length = size

    def _border(self, size: int) -> int:
        """Length of the longest text that the first ``size`` characters begin with and end with, but for themselves."""
        stop, borders = self._stop, self._borders
        while len(borders) <= size:  # no further than the text has come
            last = stop[len(borders) - 1]
            border = borders[-1]
            while border and stop[border] != last:
                border = borders[border]
            borders.append(border + (stop[border] == last))
        return borders[size]


class OutputStream:
    """Tokens of one request becoming text, until a stop rule ends it.

    text: what may be shown: no unfinished character, no beginning of a stop string that may yet be completed.
    finish_reason: None while running. stop_reason: see `RequestOutput`.
    """

    def __init__(self, sampling: SamplingState, max_tokens: int, tokenizer: Tokenizer | None) -> None:
        """``max_tokens``: output tokens at most, the context's limit included."""
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._stops = sampling.params.stop_strings
        if self._stops and tokenizer is None:
            raise SamplingParamsError("stop strings need a tokenizer; this model has none, use stop_token_ids")
        self._decoder = tokenizer.stream(sampling.params.skip_special_tokens) if tokenizer is not None else None
        self._text = ""
        self._shown = 0
        self._beginnings = [_Beginning(stop) for stop in self._stops]
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return self._text

    @property
    def remaining(self) -> int:
        """Tokens that may still be emitted."""
        return 0 if self.finish_reason else self._max_tokens - len(self.token_ids)

    def push(self, token: int) -> bool:
        """Emit one committed token. Returns whether the request goes on."""
        params = self._sampling.params
        self.token_ids.append(token)
        self._sampling.commit(token)
        if token in self._sampling.end_ids:
            self._flush()
            self._finish("stop", token if token in params.stop_token_ids else None)
            return False
        before = len(self._text)
        if self._decoder is not None:
            piece = self._decoder.push(token)
            self._text += piece
            for beginning in self._beginnings:
                beginning.push(piece)
        if len(self.token_ids) >= params.min_tokens and self._cut_at_stop_string(before):
            return False
        if len(self.token_ids) >= self._max_tokens:
            self._flush()
            if not self._cut_at_stop_string(before):
                self._finish("length", None)
            return False
        return True

    def abort(self, reason: FinishReason = "aborted") -> None:
        """End the request as it is; everything committed stays."""
        if self.finish_reason is None:
            self._flush()
            self._finish(reason, None)

    def take_text(self) -> str:
        """Text that has become final since the last call."""
        end = len(self._text)
        if self.finish_reason is None:
            end -= max((beginning.length for beginning in self._beginnings), default=0)
        piece = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return piece

    def _finish(self, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _flush(self) -> None:
        if self._decoder is not None:
            self._text += self._decoder.flush()

    def _cut_at_stop_string(self, before: int) -> bool:
        """End the text at the first stop string that reaches beyond position ``before``; whether there was one."""
        if not self._stops:
            return False
        # Each by its own length: one that ended earlier, while min_tokens held it off, must not be found again.
        starts = ((stop, max(0, before - len(stop) + 1)) for stop in self._stops)
        found = [(at, stop) for stop, start in starts if (at := self._text.find(stop, start)) >= 0]
        if not found:
            return False
        at, stop = min(found, key=lambda hit: hit[0])
        keep = at + len(stop) if self._sampling.params.include_stop_str_in_output else at
        self._text = self._text[:keep]
        self._finish("stop", stop)
        return True
