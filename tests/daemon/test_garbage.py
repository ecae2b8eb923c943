"""The store leaves nothing behind that only a full garbage collection frees: the daemon next to never does one."""

from __future__ import annotations

import gc

from kvtier.wire import Borrowed
from tests.daemon.world import UNIT, World


def _a_life(world: World) -> None:
    """Pages come, are evicted, saved, borrowed, forgotten; slabs are made, change hands and go back."""
    session = world.session()
    for turn in range(6):
        space = world.namespace(session, model=f"m{turn}", cap_tokens=64)
        keys = world.keys(space, 40)
        world.store_chain(session, space, keys)
        _, answers = world.borrow(session, keys)
        world.settle()
        for lease in (answer.lease for answer in answers if isinstance(answer, Borrowed) and answer.lease):
            world.sessions.release(session, lease)
        first = session.tenant.pages.get(keys[0])
        if first is not None and turn % 2:
            world.store.forget(first, "asked")
        world.store.room.resize(world.tiers[0], (16 if turn % 2 else 64) * UNIT)
        world.settle()
    world.sessions.end(session, clean=True, alive=False)
    world.settle()


def test_nothing_names_itself() -> None:
    world = World(64, 200)
    _a_life(world)
    gc.collect()
    gc.disable()
    try:
        _a_life(world)
        assert gc.collect() == 0
    finally:
        gc.enable()
    world.store.check()
