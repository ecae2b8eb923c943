"""Pages as sequences hold them: counted, since forks share them, and given back when the last holder lets go.

A `Page` stands on a lease (borrowed, or published by us and kept) or on a slot of a reservation (being written, or not
publishable). Only the worker's loop counts; what is left to be given back is handed to a thread that may wait
(`Leftovers.give_back`). Not here: which pages a sequence has (`sequence`), what is asked of kvtierd (`errands`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from kvtier.errors import KvtierError
from kvtier.layout import ALIGNMENT, AttentionLayout
from kvtier.schedule import Schedule
from kvtier_client.pages import Lease, PageView, Reservation


class Hold:
    """A lease or a reservation, and how many pages stand on it. Until `unmap` its memory stays mapped, whatever becomes of
    the daemon. `of` None: memory of this process. Making one raises DaemonLost if the memory may be gone already."""

    __slots__ = ("_mapped", "of", "pages")

    def __init__(self, of: Lease | Reservation | None) -> None:
        self.of = of
        self.pages = 0
        self._mapped: contextlib.AbstractContextManager[None] | None = None
        if of is not None:
            mapped = of.attachment.hold()
            mapped.__enter__()
            self._mapped = mapped

    def leave(self) -> bool:
        """A page less; whether that was the last, and `unmap` is due."""
        self.pages -= 1
        return self.pages == 0

    def unmap(self) -> None:
        """Nobody reads or writes there any more. The second time it does nothing."""
        if self._mapped is not None:
            self._mapped.__exit__(None, None, None)
            self._mapped = None


class Page:
    """Page `number` of a chain. `units` is its memory `[unit, layer, K or V, kv head, token, dim]`, which keeps it mapped;
    `address` that of its first unit for kernels. `slot` is its own in a reservation, -1 on a lease; `asked` says that it is
    on its way to be published, `refused` that it could not be."""

    __slots__ = ("address", "asked", "hold", "number", "refs", "refused", "slot", "units")
    moves: ClassVar[int] = 0
    """How many pages have come to stand elsewhere: tables made before may be wrong."""

    def __init__(self, number: int, units: torch.Tensor, address: int, hold: Hold, slot: int = -1) -> None:
        self.number = number
        self.units = units
        self.address = address
        self.hold = hold
        self.slot = slot
        self.refs = 1
        self.asked = self.refused = False
        hold.pages += 1

    def __repr__(self) -> str:
        return f"<Page {self.number}: {self.refs} holders, {'leased' if self.slot < 0 else f'slot {self.slot}'}>"

    def move(self, equal: Page, leftovers: Leftovers) -> None:
        """Stand where an equal page does, from now on."""
        equal.hold.pages += 1
        leftovers.add(self)
        self.units, self.address, self.hold, self.slot = equal.units, equal.address, equal.hold, equal.slot
        Page.moves += 1

    def published(self, hold: Hold) -> None:
        """What was written in the slot is a page now, which `hold` keeps."""
        hold.pages += 1
        if self.hold.leave():
            self.hold.unmap()  # what is mapped is the same, and `hold` keeps it
        self.hold, self.slot = hold, -1


def address_of(view: PageView) -> int:
    """Where kernels find the page: those of this process's GPU, if it is on one, also where it lies in host memory."""
    attachment = view.holder.attachment
    if attachment.gpu is None:
        return view.address
    return attachment.device_address(view.handle.slab) + view.handle.offset


class Leftovers:
    """What nobody holds any more, to be given back in one go."""

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.slots: dict[int, tuple[Reservation, list[int]]] = {}
        self.holds: list[Hold] = []

    def __bool__(self) -> bool:
        return bool(self.leases or self.slots or self.holds)

    def drop(self, pages: Iterable[Page]) -> None:
        """One holder less for each."""
        for page in pages:
            page.refs -= 1
            if page.refs == 0:
                self.add(page)
            assert page.refs >= 0, f"{page} was let go more often than it was held"

    def add(self, page: Page) -> None:
        """What the page stands on, which it leaves."""
        hold = page.hold
        last = hold.leave()
        if isinstance(hold.of, Reservation):
            self.slots.setdefault(id(hold.of), (hold.of, []))[1].append(page.slot)
        elif hold.of is not None and last:
            self.leases.append(hold.of)
        if last:
            self.holds.append(hold)

    def unused(self, hold: Hold) -> None:
        """If no page came to stand on it."""
        if not hold.pages:
            self.holds.append(hold)
            if isinstance(hold.of, Lease):
                self.leases.append(hold.of)

    def give_back(self, after: Any = None) -> None:
        """Release and abort, when `after` (a CUDA event) is done. A lost daemon has taken it all back already."""
        if after is not None:
            after.synchronize()
        for lease in self.leases:
            with contextlib.suppress(KvtierError):
                lease.release()
        for reservation, slots in self.slots.values():
            if slots:
                with contextlib.suppress(KvtierError):
                    reservation.abort(slots)
        for hold in self.holds:
            hold.unmap()


def on_lease(lease: Lease) -> list[Page]:
    """The pages of a chain, from the first on, that `lease` holds."""
    return _standing(Hold(lease), [(number, view, -1) for number, view in enumerate(lease)])


def on_reservation(reservation: Reservation) -> list[Page]:
    numbers = zip(reservation.numbers, reservation, strict=True)
    return _standing(Hold(reservation), [(number, view, slot) for slot, (number, view) in enumerate(numbers)])


def _standing(hold: Hold, places: Sequence[tuple[int, PageView, int]]) -> list[Page]:
    try:
        pages = [Page(number, view.torch(), address_of(view), hold, slot) for number, view, slot in places]
    except BaseException:
        hold.unmap()
        raise
    if not pages:
        hold.unmap()
    return pages


def in_own_memory(
    layout: AttentionLayout, schedule: Schedule, first: int, count: int, device: torch.device
) -> list[Page]:
    """Pages in memory of this process, which cannot be published: for when there is no other."""
    return [_own(layout, number, schedule.order(number), device) for number in range(first, first + count)]


def _own(layout: AttentionLayout, number: int, order: int, device: torch.device) -> Page:
    nbytes = layout.unit_stride << order
    memory = torch.zeros(nbytes + ALIGNMENT, dtype=torch.uint8, device=device)
    at = -memory.data_ptr() % ALIGNMENT
    values = memory[at : at + nbytes].view(getattr(torch, layout.dtype))
    shape, strides = layout.shape, [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    units = values.as_strided((1 << order, *shape), (layout.unit_stride // values.itemsize, *strides))
    return Page(number, units, memory.data_ptr() + at, Hold(None), 0)
