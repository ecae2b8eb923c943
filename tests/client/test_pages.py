"""Pages in a worker's hand: views that outlive nothing they should not, and edges of the calls that give them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from kvtier.errors import StaleHandle
from kvtier.memory import Mapping, create_memfd
from kvtier.wire import Handle
from kvtier_client import EXISTS, ORPHAN, AttentionLayout, local
from kvtier_client.pages import PageView

LAYOUT = AttentionLayout(layers=2, kv_heads=2, head_dim=64, dtype="float32")


def test_arrays_and_leases_at_their_edges() -> None:
    with local(host="64MiB", ssd="64MiB") as daemon, daemon.client(name="test") as client:
        space = client.namespace(LAYOUT, model="m")
        keys = space.keys(range(600))
        with space.reserve(keys) as reservation:
            assert "34 pages" in repr(reservation)
            for number, page in enumerate(reservation):
                page.numpy()[:] = number
            reservation.commit()
        lease = space.borrow(keys)
        assert lease.found_in == ["host"] * 34 and "34 pages" in repr(lease) and "slab" in repr(lease[0])
        assert lease[33].numpy().shape == (2, *LAYOUT.shape)
        with space.reserve(keys, start=len(lease)) as nothing:  # a full hit leaves nothing to store
            assert len(nothing) == 0 and nothing.commit() == b""
        array = lease[5].numpy()
        lease.release()
        with pytest.raises(StaleHandle):
            lease[5].numpy()
        assert space.migrate(keys, "ssd", move=True) == 34
        with space.borrow(keys) as again:
            assert again.found_in == ["ssd"] * 34 and again[0].tier == "host"
        other = space.keys([9] * 64)
        with space.reserve(other, start=2) as orphans:  # of a prefix that nobody stored
            assert set(orphans.commit()) == {ORPHAN}
        with space.reserve_ahead(0, 1) as ahead:
            assert ahead.commit(keys=keys[:1]) == bytes([EXISTS])
        client.close()
        assert array[0, 0, 0, 0, 0, 0] >= 0, "an array keeps its memory mapped"


@pytest.mark.parametrize("writable", [True, False])
def test_a_mapping_is_not_unmapped_under_an_array(writable: bool) -> None:
    fd = create_memfd("test", LAYOUT.unit_stride)
    mapping = Mapping(fd, LAYOUT.unit_stride, writable=writable)

    class Holder:
        layout = LAYOUT

        class attachment:
            read_only = not writable

            @staticmethod
            def mapping(slab: int) -> Mapping:
                return mapping

        def require(self) -> None:
            pass

    page = PageView(Holder(), Handle(0, 0, 0, LAYOUT.unit_stride))  # type: ignore[arg-type]
    array = page.numpy()
    assert array.flags.writeable is writable
    assert not mapping.close()
    assert array.ctypes.data == mapping.address
    assert ctypes.string_at(mapping.address, 4) == bytes(4) and np.all(array == 0)
    del array
    assert mapping.close()
