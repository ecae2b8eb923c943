"""The recency order of a slab class: which frames may leave it, the coldest first.

A list that runs through the frames themselves, since a page's every move changes it: no search, and nothing allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtier_daemon.slabs import Frame


class Recency:
    """Frames of one slab class, each of which says itself whether it is `listed`."""

    __slots__ = ("coldest", "warmest")

    def __init__(self) -> None:
        self.coldest: Frame | None = None
        self.warmest: Frame | None = None

    def add(self, frame: Frame) -> None:
        """`frame` is the warmest, unless it has its place already."""
        if not frame.listed:
            self._put(self.warmest, frame, None)

    def add_coldest(self, frame: Frame) -> None:
        """`frame` is the next to leave, unless it has its place already."""
        if not frame.listed:
            self._put(None, frame, self.coldest)

    def renew(self, frame: Frame) -> None:
        """If `frame` is here, it is the warmest now."""
        if frame.listed and frame is not self.warmest:
            self.discard(frame)
            self.add(frame)

    def discard(self, frame: Frame) -> None:
        """`frame` is here no more, if it was."""
        if not frame.listed:
            return
        colder, warmer = frame.colder, frame.warmer
        if colder is None:
            self.coldest = warmer
        else:
            colder.warmer = warmer
        if warmer is None:
            self.warmest = colder
        else:
            warmer.colder = colder
        frame.colder = frame.warmer = None
        frame.listed = False

    def _put(self, colder: Frame | None, frame: Frame, warmer: Frame | None) -> None:
        """Between two neighbours, or at an end (None)."""
        if colder is None:
            self.coldest = frame
        else:
            colder.warmer = frame
        if warmer is None:
            self.warmest = frame
        else:
            warmer.colder = frame
        frame.colder, frame.warmer, frame.listed = colder, warmer, True

    def __iter__(self) -> Iterator[Frame]:
        frame = self.coldest
        while frame is not None:
            following = frame.warmer  # what is yielded may be discarded
            yield frame
            frame = following
