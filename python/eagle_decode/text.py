"""Text of a growing list of tokens: never a split character, never a piece of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what decoders write for bytes that do not yet make a character


class UnreadableToken(Exception):
    """The tokenizer raised, which is the cause, at `token`, the first after `count` that it could read."""

    def __init__(self, token: int, count: int):
        super().__init__(token, count)
        self.token, self.count = token, count


class TextStream:
    """Decodes tokens as they come. `take` returns text that no later token can change.

    tokenizer: has `decode(ids, skip_special_tokens=, clean_up_tokenization_spaces=)`, as transformers' have.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        # A decoder may write a token's leading space or bytes depending on what stands before it. Tokens from
        # _begin on are therefore decoded together; _done characters of them are in _text. At _begin and at
        # _read no character was cut, and those from _begin to _read have text: behind special tokens alone a
        # leading space would be lost.
        self._begin = self._read = self._done = 0
        self._text = ""
        self._taken = 0
        self.stopped_by: str | None = None  # the stop string that was found

    def push(self, tokens: Sequence[int]) -> int | None:
        """Adds tokens. Returns how many of them there are up to the one that completes a stop string, None if
        none does. Raises UnreadableToken where the tokenizer raises, after adding those before that token."""
        # One by one, so that the same tokens are read however many came at a time.
        for count, token in enumerate(tokens):
            before = (self._begin, self._read, self._done, self._text, self.stopped_by)
            self._tokens.append(token)
            try:
                self._decode(flush=False)
            except Exception as fault:
                self._tokens.pop()
                self._begin, self._read, self._done, self._text, self.stopped_by = before
                raise UnreadableToken(token, count) from fault
            if self.stopped_by is not None:
                return count + 1
        return None

    def take(self, *, final: bool = False) -> str:
        """The text since the last call. Text that may turn out to be a character's or a stop string's part is
        held back until `final`."""
        if final and self.stopped_by is None:
            self._decode(flush=True)
        end = len(self._text)
        if not final:
            end -= max((self._held_for(stop) for stop in self._stop), default=0)
        taken, self._taken = self._text[self._taken : end], max(end, self._taken)
        return taken

    def _decode(self, *, flush: bool) -> None:
        window = self._decoded(self._tokens[self._begin :])
        stable = window if flush else window.rstrip(_INCOMPLETE)
        if len(stable) > self._done:
            longest = max((len(stop) for stop in self._stop), default=1)
            search_from = max(len(self._text) - longest + 1, 0)
            self._text += stable[self._done :]
            self._done = len(stable)
            found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, search_from)) >= 0]
            if found:
                at, self.stopped_by = min(found)
                self._text = self._text[:at]
        if stable == window and (tail := self._decoded(self._tokens[self._read :])):
            self._begin, self._read, self._done = self._read, len(self._tokens), len(tail)

    def _decoded(self, tokens: Sequence[int]) -> str:
        if not tokens:
            return ""
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _held_for(self, stop: str) -> int:
        """Length of the longest end of the text that could begin `stop`."""
        if self.stopped_by is not None:
            return 0
        for length in range(min(len(stop) - 1, len(self._text) - self._taken), 0, -1):
            if self._text.endswith(stop[:length]):
                return length
        return 0
