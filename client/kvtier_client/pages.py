"""Pages in hand: what a lease or a reservation gives access to, where it lies, with no copy.

A page's memory is the daemon's own, mapped. It may be used until the lease or reservation ends; after that, `view`,
`numpy` and `torch` raise StaleHandle, and arrays made before must not be used: the frame may hold another page by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvtier import wire
from kvtier.errors import DaemonLost, InvalidRequest, StaleHandle
from kvtier.layout import Layout
from kvtier.wire import GRANTED, Handle
from kvtier_client import gpu
from kvtier_client.gpu import DeviceMapping

if TYPE_CHECKING:
    import numpy
    from torch import Tensor
    from torch import dtype as TorchType

    from kvtier_client.attachment import Attachment
    from kvtier_client.namespace import NamespaceClient

_NUMPY = {
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "u2",
    "float8_e4m3fn": "u1",
    "int8": "i1",
    "int4": "u1",
    "uint8": "u1",
}


class PageView:
    """A page of a lease or reservation: 2**order units in one piece of memory."""

    __slots__ = ("handle", "holder")

    def __init__(self, holder: Lease | Reservation, handle: Handle) -> None:
        self.holder = holder
        self.handle = handle

    @property
    def view(self) -> memoryview:
        """Its bytes. Raises StaleHandle when the lease or reservation has ended."""
        holder = self.holder
        holder.require()
        _, _, offset, length = self.handle
        return holder.attachment.mapping(self.handle.slab).view[offset : offset + length]

    @property
    def address(self) -> int:
        """Of its first byte in this process."""
        self.holder.require()
        return self.holder.attachment.mapping(self.handle.slab).address + self.handle.offset

    @property
    def device_address(self) -> int:
        """As `address`, for kernels and copies of this client's GPU: host memory is pinned at first use."""
        self.holder.require()
        return self.holder.attachment.device_address(self.handle.slab) + self.handle.offset

    def __repr__(self) -> str:
        slab, _, offset, length = self.handle
        return f"<PageView: {length} bytes at {offset} of slab {slab}>"

    @property
    def units(self) -> int:
        return self.handle.length // self.holder.layout.unit_stride

    @property
    def tier(self) -> str:
        """Name of the tier that it lies in."""
        attachment = self.holder.attachment
        attachment.mapping(self.handle.slab)
        return attachment.tiers[attachment.slab_tiers[self.handle.slab]]

    def unit_addresses(self) -> list[int]:
        """Of each of its units: what a kernel's table is made of."""
        stride = self.holder.layout.unit_stride
        start = self.address
        return [start + unit * stride for unit in range(self.units)]

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """`[unit, *layout.shape]` over the page's memory; bfloat16 and float8 as unsigned integers of their width,
        int4 with two values a byte in the last axis."""
        import numpy as np

        layout = self.holder.layout
        dtype = np.dtype(_NUMPY[layout.dtype])
        shape = (*layout.shape[:-1], layout.row_bytes // dtype.itemsize)
        strides = [dtype.itemsize]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        memory = np.frombuffer(self.view, np.uint8)  # holds the mapping; an ndarray straight over the view would not
        return np.ndarray((self.units, *shape), dtype, buffer=memory, strides=(layout.unit_stride, *strides))

    def torch(self) -> Tensor:
        """`[unit, *layout.shape]` over the page's memory, where it lies (CPU or GPU), in the layout's dtype (int4: uint8,
        two values a byte in the last axis). Pages of host memory need a session that can write: torch knows no read-only
        tensors."""
        import torch

        mapping = self.holder.attachment.mapping(self.handle.slab)
        if isinstance(mapping, DeviceMapping):
            self.holder.require()
            plain = mapping.tensor(self.handle.offset, self.handle.length)
            return self._shaped(plain.view(self._dtype()))
        if self.holder.attachment.read_only:
            raise InvalidRequest("torch has no read-only tensors: attach with read_only=False, or use .numpy()")
        return self._shaped(torch.frombuffer(self.view, dtype=self._dtype()))

    def _dtype(self) -> TorchType:
        import torch

        name = self.holder.layout.dtype
        dtype: TorchType = torch.uint8 if name == "int4" else getattr(torch, name)
        return dtype

    def _shaped(self, flat: Tensor) -> Tensor:
        layout, dtype = self.holder.layout, flat.dtype
        shape = (*layout.shape[:-1], layout.row_bytes // dtype.itemsize)
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * size)
        return flat.as_strided((self.units, *shape), (layout.unit_stride // dtype.itemsize, *strides))


class Lease:
    """Borrowed pages, the leading run of what was asked for. A context manager that releases.

    Falsy when nothing was to be had. `len()` is the number of pages, `tokens` what they hold.
    """

    __slots__ = ("__weakref__", "_ended", "_handles", "_origins", "_packed", "attachment", "id", "namespace")

    def __init__(
        self, namespace: NamespaceClient, attachment: Attachment, lease: int, handles: bytes, origins: bytes = b""
    ) -> None:
        self.namespace = namespace
        self.attachment = attachment
        self.id = lease
        self._packed = handles
        self._handles: list[wire.Handle] | None = None
        self._origins = origins
        self._ended = False

    @property
    def handles(self) -> list[wire.Handle]:
        if self._handles is None:  # most leases of many pages are only made a table of
            self._handles = wire.unpack_handles(self._packed)
        return self._handles

    @property
    def layout(self) -> Layout:
        return self.namespace.spec.layout

    @property
    def tokens(self) -> int:
        """Of the run, if it was asked for from page 0."""
        return self.namespace.schedule.span(len(self) - 1).stop if len(self) else 0

    @property
    def pages(self) -> list[PageView]:
        return [PageView(self, handle) for handle in self.handles]

    @property
    def found_in(self) -> list[str]:
        """Name of the tier that each page was found in; it may have been brought to another since (`PageView.tier`)."""
        return [self.attachment.tiers[tier] for tier in self._origins]

    def __repr__(self) -> str:
        return f"<Lease {self.id}: {len(self)} pages{', released' if self._ended else ''}>"

    def __len__(self) -> int:
        return len(self._packed) // wire.HANDLE_BYTES

    def __iter__(self) -> Iterator[PageView]:
        return iter(self.pages)

    def __getitem__(self, index: int) -> PageView:
        return PageView(self, self.handles[index])

    def require(self) -> None:
        """Raises StaleHandle if the lease has ended, DaemonLost if its daemon has."""
        if self._ended:
            raise StaleHandle(f"lease {self.id} was released: its pages may be anything by now; borrow again")

    def table(self) -> Tensor:
        """int64 `[units]` on this client's GPU: the address of every unit of the run, first token first, as kernels of
        `kvtier_kernels` take it. Units in HBM, in a peer's HBM and in host memory (pinned at first use) stand alike."""
        import numpy as np
        import torch

        self.require()
        stride = self.layout.unit_stride
        handles = np.frombuffer(self._packed, wire.HANDLE_FIELDS)
        slabs, which = np.unique(handles["slab"], return_inverse=True)
        bases = np.array([self.attachment.device_address(int(slab)) for slab in slabs], np.int64)
        start = bases[which] + handles["offset"].astype(np.int64)
        units = handles["length"].astype(np.int64) // stride
        within = np.arange(units.sum()) - np.repeat(np.cumsum(units) - units, units)
        addresses = np.repeat(start, units) + within * stride
        own = self.attachment.gpu
        if own is None:
            raise InvalidRequest("this client is not on a GPU: make it with Client(device=...)")
        return torch.from_numpy(addresses).to(f"cuda:{own.ordinal}")

    def release(self, after: Any = None) -> None:
        """Let the pages go; the second time, StaleHandle. A lost daemon has let them go already.

        `after`, a torch stream or CUDA event: not before the kernels given to it so far have read them. This returns at
        once; the release is sent with a later call of the client, or when it is closed.
        """
        self.require()
        self._ended = True
        if self.id:
            self.namespace.client.release_lease(self.attachment, self.id, after)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended:
            self.release()


class Reservation:
    """Frames to write pages in, that only this process sees until `commit`. A context manager that aborts what is not
    committed.

    `status` says of every page asked for whether it was GRANTED, EXISTS or is BUSY (another writes it); it is shorter
    than the question where frames ran out. `pages` are those granted; `numbers` say which of the chain they are.
    """

    __slots__ = ("__weakref__", "_open", "attachment", "first", "handles", "id", "namespace", "status")

    def __init__(
        self,
        namespace: NamespaceClient,
        attachment: Attachment,
        first: int,
        reservation: int,
        status: bytes,
        handles: bytes,
    ) -> None:
        self.namespace = namespace
        self.attachment = attachment
        self.first = first
        self.id = reservation
        self.status = status
        self.handles = wire.unpack_handles(handles)
        self._open = set(range(len(self.handles)))

    @property
    def layout(self) -> Layout:
        return self.namespace.spec.layout

    @property
    def pages(self) -> list[PageView]:
        return [PageView(self, handle) for handle in self.handles]

    def __repr__(self) -> str:
        return f"<Reservation {self.id}: {len(self)} pages from number {self.first} on, {len(self._open)} open>"

    @property
    def numbers(self) -> list[int]:
        """Page number in the chain of each of `pages`."""
        return [self.first + at for at, status in enumerate(self.status) if status == GRANTED]

    def __len__(self) -> int:
        return len(self.handles)

    def __iter__(self) -> Iterator[PageView]:
        return iter(self.pages)

    def __getitem__(self, index: int) -> PageView:
        return PageView(self, self.handles[index])

    def require(self) -> None:
        """Raises StaleHandle when nothing of it is open any more."""
        if not self._open:
            raise StaleHandle(
                f"reservation {self.id} is committed or aborted: its frames are not to be written any more"
            )

    def commit(
        self,
        slots: Sequence[int] | None = None,
        *,
        keys: Sequence[bytes] = (),
        parent: bytes = b"",
        after: Any = None,
    ) -> bytes:
        """Seal and publish `slots` (indices into `pages`; all that are open, if None), written to the last byte.

        `keys` are theirs, in the same order, if the reservation was made without; `parent` is the key of the page before
        the reservation's first, if it was made without that. Returns a status byte each, in that order: GRANTED
        (published), EXISTS (someone else was first), ORPHAN (the page before it is held no more, so nothing could find
        it). With `after`, a torch stream or CUDA event, it waits until what that was given so far is done: a
        page is published only when it is written.
        Raises StaleHandle for a slot that is not open, DaemonLost.
        """
        return self._commit(slots, keys, parent, after, lease=False)[0]

    def commit_and_lease(
        self,
        slots: Sequence[int] | None = None,
        *,
        keys: Sequence[bytes] = (),
        parent: bytes = b"",
        after: Any = None,
    ) -> tuple[bytes, Lease]:
        """As `commit`, and keep what was published leased. A page that is not stays this reservation's own, readable."""
        return self._commit(slots, keys, parent, after, lease=True)

    def abort(self, slots: Sequence[int] | None = None) -> None:
        """Give frames back unpublished."""
        chosen = sorted(self._open if slots is None else slots)
        if chosen:
            body = wire.Abort(self.id, wire.pack_u32(chosen))
            self._open.difference_update(chosen)
            self.namespace.client.on(self.attachment, "abort", body)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            try:
                self.abort()
            except DaemonLost:
                pass

    def _commit(
        self, slots: Sequence[int] | None, keys: Sequence[bytes], parent: bytes, after: Any, *, lease: bool
    ) -> tuple[bytes, Lease]:
        if after is not None:
            gpu.event(after).synchronize()
        chosen = sorted(self._open) if slots is None else list(slots)
        if not chosen:
            return b"", Lease(self.namespace, self.attachment, 0, b"")
        if keys and len(keys) != len(chosen):
            raise InvalidRequest(f"{len(keys)} keys for {len(chosen)} pages")
        for slot in chosen:
            if slot not in self._open:
                raise StaleHandle(
                    f"page {slot} of reservation {self.id} is not open: it was committed, or never granted"
                )
        body = wire.Commit(self.id, wire.pack_u32(chosen), b"".join(keys), lease, parent)
        answer = self.namespace.client.on(self.attachment, "commit", body, wire.Committed)
        published = sorted(slot for slot, status in zip(chosen, answer.status, strict=True) if status == GRANTED)
        kept = {slot for slot, status in zip(chosen, answer.status, strict=True) if lease and status != GRANTED}
        self._open.difference_update(set(chosen) - kept)
        handles = b"".join(wire.pack_handle(*self.handles[slot]) for slot in published) if lease else b""
        return answer.status, Lease(self.namespace, self.attachment, answer.lease, handles)
