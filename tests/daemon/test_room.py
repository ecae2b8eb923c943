"""What becomes of slabs that are emptied."""

from __future__ import annotations

from kvtier.config import Size
from tests.daemon.world import UNIT, World


def _drained(world: World, holders: set[int]) -> None:
    """A tier of four slabs, all full, mapped by `holders`; then every page leaves it."""
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 16)
    world.store_chain(session, space, keys)
    tier = world.tiers[0]
    for slab in list(tier.slabs.values()):
        slab.holders |= holders
        world.store.room.vacate(slab)
    world.store.run()
    world.settle()
    assert world.store.directory.tenants["a"].count(keys) == 16
    assert not any(page.frames[0] for page in session.tenant.run(keys))
    world.store.check()


def test_a_drained_tier_that_workers_map_takes_pages_again() -> None:
    """A worker that is idle does not hear that a slab is to go: its memory would be nobody's for as long as it sleeps."""
    world = World(16, 64)
    _drained(world, {1})
    (owner,) = world.tiers[0].classes.values()
    assert len(owner.free) == 16 and len(world.tiers[0].slabs) == 4


def test_what_nobody_maps_goes_back_to_the_medium() -> None:
    world = World(16, 64)
    _drained(world, set())
    assert not world.tiers[0].slabs and world.tiers[0].allocated == 0


def test_a_smaller_tier_gives_back_what_is_mapped_too() -> None:
    world = World(16, 64)
    session = world.session()
    world.store_chain(session, world.namespace(session), world.keys(world.namespace(session), 16))
    slabs = list(world.tiers[0].slabs.values())
    for slab in slabs:
        slab.holders.add(1)
    told: list[int] = []
    world.store.room.retire = lambda slab: told.append(slab.id)
    world.store.room.resize(world.tiers[0], 8 * UNIT)
    world.settle()
    assert len(told) == 2 and world.tiers[0].allocated == 16 * UNIT, "until the worker has unmapped them"
    for slab in slabs:
        slab.holders.clear()
        world.store.room.unheld(slab)
    world.store.run()
    world.settle()
    assert world.tiers[0].allocated == 8 * UNIT


def test_two_tenants_and_one_slab_below_them() -> None:
    """Both have pages to save in a tier of one slab. Whose turn it is keeps the slab until what it copies there has come."""
    world = World(32, 4, 64)
    sessions = [world.session(name) for name in ("a", "b")]
    chains = []
    for session in sessions:
        space = world.namespace(session)
        keys = world.keys(space, 8)
        operation, _ = world.reserve(session, space, keys)
        while not operation.done:
            world.do(world.ready_jobs()[0])
        chains.append((session, keys, operation))
    for session, _, operation in chains:
        world.commit(session, operation)
    for slab in list(world.tiers[0].slabs.values()):
        world.store.room.vacate(slab)
    world.store.run()
    done = 0
    while world.jobs:
        world.do(world.ready_jobs()[0])
        done += 1
        assert done < 1000, "slabs go to and fro, and nothing comes of it"
    for session, keys, _ in chains:
        assert session.tenant.count(keys) == 8
        assert not any(page.frames[0] for page in session.tenant.run(keys))
    world.store.check()


def test_a_slab_that_another_class_waits_for_does_not_outgrow_the_write_queue() -> None:
    """What a slow disk could not take is lost, as it is when a page is evicted: the class that waits must not wait for it."""
    world = World(8, 64, admission="second-use", write_queue=Size(3 * UNIT))
    session = world.session()
    space = world.namespace(session)
    keys = world.keys(space, 8)
    world.store_chain(session, space, keys)
    tier, below = world.tiers
    heir = tier.slab_class(session.tenant, 2 * UNIT)
    slab = tier.coldest_slab(heir)
    assert slab is not None and slab.busy == 4 and not below.unsaved
    world.store.room.vacate(slab, heir)
    assert below.unsaved_bytes == 3 * UNIT
    world.settle()
    assert len(heir.free) == 2
    assert set(world.index) == set(keys[:3]) and session.tenant.count(keys) == 3, "the head is kept, not the tail"
    assert world.store.counters.evictions["unsaved"] == 5
    world.store.check()
