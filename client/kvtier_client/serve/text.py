"""Tokens to text, as they come: whole characters only, and never a stop string or a part of one.

Characters of several tokens are held until complete (tokenizers' `DecodeStream` does that); text that may be the
beginning of a stop string is held until it is one, and then never shown, or is none, and then shown. What was held when
the answer ends is shown, except for a character that never became complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from tokenizers.decoders import DecodeStream

_TAIL = 8
"""Tokens of the prompt that decide how the first token after it is written (with a space in front, say)."""
_BROKEN = "\ufffd"

ItemT = TypeVar("ItemT")


class Piece(NamedTuple, Generic[ItemT]):
    """What may be shown now: text, and the items that came with it."""

    text: str
    items: list[ItemT]
    offsets: list[int]
    """Where in the whole text each item's text begins."""


class Text(Generic[ItemT]):
    """The text of one sample that follows `prompt`. `tokenizer` is a fast one of transformers; `silent` tokens (those
    that end a sequence) have no text."""

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stops: Sequence[str] = (),
        silent: frozenset[int] = frozenset(),
    ) -> None:
        self.stopped = False
        """A stop string has come; nothing more is to be added."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(ids=_tail(self._tokenizer, prompt), skip_special_tokens=True)
        self._stops = stops
        self._silent = silent
        self._held = ""
        self._shown = 0
        self._items: deque[tuple[int, ItemT]] = deque()

    def add(self, token: int, item: ItemT) -> None:
        """One more token; `item` is handed out with its text."""
        assert not self.stopped
        self._items.append((self._shown + len(self._held), item))
        if token in self._silent:
            return
        before = len(self._held)
        self._held += self._step(token)
        at = min(
            (at for stop in self._stops if (at := self._held.find(stop, _earliest(before, stop))) >= 0), default=-1
        )
        if at >= 0:
            self._held = self._held[:at]
            self.stopped = True

    def take(self, *, all_of_it: bool = False) -> Piece[ItemT]:
        """What can be shown by now; `all_of_it`: the answer has ended."""
        keep = 0 if all_of_it or self.stopped else self._possible_stop()
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        self._shown += len(text)
        items: list[ItemT] = []
        offsets: list[int] = []
        while self._items and (self._items[0][0] < self._shown):
            offset, item = self._items.popleft()
            offsets.append(offset)
            items.append(item)
        return Piece(text, items, offsets)

    def _step(self, token: int) -> str:
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # noqa: BLE001 (it raises no other; so it says of bytes that are no UTF-8)
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token) or ""

    def _possible_stop(self) -> int:
        """How many characters at the end may be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


def _earliest(before: int, stop: str) -> int:
    """Where a stop string that the last token completed begins at the earliest."""
    return max(0, before - len(stop) + 1)


def _tail(tokenizer: Any, prompt: Sequence[int]) -> list[int]:
    """The last tokens of the prompt that make whole characters; none, where it ends within one."""
    tail = list(prompt[-_TAIL:])
    while tail and tokenizer.decode(tail)[:1] == _BROKEN:
        tail.pop(0)
    return [] if tokenizer.decode(tail)[-1:] == _BROKEN else tail


def token_bytes(tokenizer: Any, token: int) -> list[int] | None:
    """The bytes that a token stands for, also where they are a part of a character; None where that cannot be told."""
    text = str(tokenizer.decode([token]))
    if _BROKEN not in text:
        return list(text.encode())
    piece = str(tokenizer.convert_ids_to_tokens(token))
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return [int(piece[3:5], 16)]
    if all(character in _ALPHABET for character in piece):
        return [_ALPHABET[character] for character in piece]
    return None


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: printable ones as they are, others from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()
