"""How decode's work is cut: one line of tiles, laid over all sequences and heads, split evenly among the programs.

Every (sequence, head) is a *segment* of consecutive tiles of that line, and program p takes tiles [p * share,
(p + 1) * share). So one sequence of a million tokens and 256 of a thousand load the device alike, whatever the
lengths, with no plan made on the host: each program works the cut out of the lengths, which is what makes a captured
CUDA graph right for any lengths. A program that holds a whole segment writes the output; one that holds a part leaves
a partial state in one of its two slots: slot 0 for the segment it starts in, slot 1 for a later one that it cannot
finish. (The cut is that of stream-K matrix products, Osama et al. 2023.)
"""

from __future__ import annotations

import triton
import triton.language as tl


def lanes(batch: int) -> int:
    """How many sequences a kernel's vectors hold for a batch of that size. Few sizes, since each is compiled for itself."""
    most = 16
    while most < batch:
        most *= 4
    return most


@triton.jit
def spans(lengths, index, batch, width, T, window, U: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr):
    """Of each sequence in `index`: its length within the table, its first tile, and its count of tiles (at least one,
    so that an empty sequence has a program that writes its zeros; none for an index past the batch)."""
    length = tl.load(lengths + index, mask=index < batch, other=0)
    length = tl.maximum(tl.minimum(length, width * U), 0)
    if WINDOW:
        first = tl.maximum(length - T - window + 1, 0) // BLOCK
    else:
        first = length * 0  # an expression: Gluon gives a constant no layout
    count = tl.maximum(tl.cdiv(length, BLOCK) - first, 1)
    return length, first, tl.where(index < batch, count, 0)


@triton.jit
def pick(values, index, at):
    """The element `at` of a vector held in registers."""
    return tl.sum(tl.where(index == at, values, 0), 0)


@triton.jit
def locate(counts, ends, index, tile, HEADS: tl.constexpr):
    """The sequence that holds `tile` of the line, and the tile at which its first segment starts."""
    sequence = tl.sum((ends * HEADS <= tile).to(tl.int32), 0)
    start = pick(ends - counts, index, sequence) * HEADS
    return sequence, start


@triton.jit
def share_of(counts, total, programs, batch, HEADS: tl.constexpr):
    """Tiles a program. Where all segments are of one length, a few more than an even share if that puts every cut at the
    end of a segment, or cuts every segment alike: fewer partial states, and fewer programs that change segments. Never
    many more, for while some programs have more to do, others have nothing."""
    share = tl.cdiv(total, programs)
    longest = tl.max(counts, 0)
    alike = longest * batch * HEADS == total
    even = tl.where(
        share >= longest,
        tl.cdiv(share, longest) * longest,
        tl.cdiv(longest, tl.maximum(longest // tl.maximum(share, 1), 1)),
    )
    return tl.where(alike & (even - share <= tl.minimum(share // 16, 4)), even, share)
