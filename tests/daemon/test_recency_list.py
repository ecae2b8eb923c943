"""The recency order, beside a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtier_daemon.recency import Recency
from kvtier_daemon.slabs import Slab, SlabClass
from tests.daemon.world import UNIT, World

FRAMES = 6
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "add_coldest", "renew", "discard"]), st.integers(0, FRAMES - 1)), max_size=60
)


def _class() -> SlabClass:
    """One of so many free frames."""
    world = World(FRAMES)
    owner = SlabClass(world.tiers[0], world.session().tenant, UNIT)
    owner.adopt(Slab(1, owner, FRAMES * UNIT, None))
    return owner


@given(STEPS)
def test_frames_stand_in_the_order_that_a_list_would_have(steps: list[tuple[str, int]]) -> None:
    frames, order, plain = _class().slabs[0].frames, Recency(), []
    for step, number in steps:
        getattr(order, step)(frames[number])
        listed = number in plain
        if step == "add" and not listed:
            plain.append(number)
        elif step == "add_coldest" and not listed:
            plain.insert(0, number)
        elif step == "renew" and listed:
            plain.append(plain.pop(plain.index(number)))
        elif step == "discard" and listed:
            plain.remove(number)
        assert [frame.index for frame in order] == plain
        assert [frame.listed for frame in frames] == [number in plain for number in range(FRAMES)]
        ends = [frame and frame.index for frame in (order.coldest, order.warmest)]
        assert ends == ([plain[0], plain[-1]] if plain else [None, None])


def test_what_is_met_on_the_way_may_be_taken_out() -> None:
    owner = _class()
    for frame in owner.slabs[0].frames:
        owner.lru.add(frame)
    met = []
    for frame in owner.lru:
        met.append(frame.index)
        owner.lru.discard(frame)
    assert met == list(range(FRAMES)) and owner.lru.coldest is None
