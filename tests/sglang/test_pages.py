"""Pages by an engine's own keys and addresses, against a real kvtierd: which runs are found, whose bytes they are, and what
an engine sees of trouble."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time

import pytest

from kvtier_client import Client
from kvtier_client.sglang import pages
from kvtier_client.sglang.pages import PageStore, Pieces
from tests.sglang.conftest import MakeStore
from tests.sglang.memory import PAGE_BYTES, Memory, names
from tests.system.conftest import Daemon, MakeDaemon, eventually


def loaded(store: PageStore, keys: list[str]) -> int:
    """How many leading pages come; each must have its own bytes, and no slot beyond may be touched."""
    memory = Memory()
    got = store.get(keys, memory.pieces(range(len(keys))))
    count = sum(got)
    assert got == [True] * count + [False] * (len(keys) - count)
    assert all(memory.holds(slot, key) for slot, key in enumerate(keys[:count]))
    assert not memory.bytes[:, count:].any()
    return count


def stored(store: PageStore, keys: list[str], after: str = "") -> list[bool]:
    memory = Memory()
    return store.put(keys, memory.filled(keys), after=after)


def test_what_one_server_stores_another_loads(store: MakeStore) -> None:
    keys = names("a", 12)
    assert stored(store(), keys) == [True] * 12
    other = store()
    assert other.held(keys) == 12
    assert loaded(other, keys) == 12
    assert loaded(other, keys[5:]) == 7, "an engine that holds the first pages itself asks for the rest"
    assert other.held(names("b", 3) + keys) == 0


def test_the_pages_between_lie_anywhere_in_the_engines_memory(store: MakeStore) -> None:
    keys, memory, slots = names("a", 5), Memory(), [40, 3, 17, 63, 0]
    for slot, key in zip(slots, keys, strict=True):
        memory.fill(slot, key)
    assert store().put(keys, memory.pieces(slots)) == [True] * 5
    target = Memory()
    assert store().get(keys, target.pieces([9, 62, 1, 30, 31])) == [True] * 5
    assert all(target.holds(slot, key) for slot, key in zip([9, 62, 1, 30, 31], keys, strict=True))
    untouched = [slot for slot in range(64) if slot not in (9, 62, 1, 30, 31)]
    assert not target.bytes[:, untouched].any()


def test_many_threads_copy_a_large_batch(store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SMALL", 1)
    keys = names("a", 61)
    assert all(stored(store(threads=4), keys))
    assert loaded(store(threads=3), keys) == 61


@pytest.mark.parametrize("told", [True, False], ids=["prefix told", "prefix not told"])
def test_a_prompt_that_goes_on_is_stored_from_where_it_went_on(store: MakeStore, told: bool) -> None:
    one, keys = store(), names("a", 30)
    assert all(stored(one, keys[:10]))
    assert all(stored(one, keys[10:25], keys[9] if told else ""))
    assert all(stored(one, keys[25:], keys[24] if told else ""))
    assert loaded(store(), keys) == 30


def test_a_run_whose_prefix_is_gone_is_stored_all_the_same(daemon: Daemon, store: MakeStore) -> None:
    one, keys = store(), names("a", 9)
    assert all(stored(one, keys[3:], keys[2])), "the engine holds pages 0 to 2 itself, and kvtierd has forgotten them"
    assert one.held(keys) == 0 and loaded(store(), keys[3:]) == 6
    assert all(stored(one, keys[:3])), "and when they come back, all of it is found"
    assert loaded(store(), keys) == 9


def test_of_a_run_that_is_there_in_part_the_rest_is_stored(daemon: Daemon, store: MakeStore) -> None:
    one, keys = store(), names("a", 20)
    stored(one, keys[4:8])
    stored(one, keys[12:13])
    before = daemon.client().stats()["counters"]["commits"]
    assert stored(one, keys) == [True] * 20
    assert daemon.client().stats()["counters"]["commits"] - before == 15
    assert loaded(store(), keys) == 20


def test_tails_leave_before_what_they_follow(make: MakeDaemon, store: MakeStore) -> None:
    """With the prefix told, pages of one prompt stay findable for as long as any of them is held."""
    daemon = make(host="512KiB", slab="64KiB").start()
    one = store(timeout=5.0)
    one.endpoint = daemon.endpoint
    keys = names("a", 20)
    for at in range(0, 20, 5):
        assert all(stored(one, keys[at : at + 5], keys[at - 1] if at else ""))
    for turn in range(5):
        stored(one, names(f"b{turn}", 11))
    held = one.held(keys)
    assert 0 < held < 20
    assert not any(one.held([key]) for key in keys[held:])


def test_a_page_that_another_server_is_storing_counts_as_stored(daemon: Daemon, store: MakeStore) -> None:
    keys, one, other = names("a", 6), store(), store()
    held = daemon.client()
    space = held.namespace(one.spec.layout, model="model", cap_tokens=16)
    assert space.seed == one.seed
    with space.reserve([one.key(key) for key in keys[:3]]):
        assert stored(other, keys) == [True] * 6
        assert other.held(keys) == 0 and loaded(store(), keys[3:]) == 3
    assert other.held(keys) == 0, "it gave up: nobody has those"
    assert all(stored(other, keys[:3])) and loaded(one, keys) == 6


def test_frames_that_run_out_leave_the_rest_unstored(make: MakeDaemon, store: MakeStore) -> None:
    daemon = make(host="128KiB", slab="64KiB").start()
    one, keys = store(timeout=0.3), names("a", 30)
    one.endpoint = daemon.endpoint
    assert all(stored(one, keys[:8]))
    space = daemon.client().namespace(one.spec.layout, model="model", cap_tokens=16)
    with space.borrow([one.key(key) for key in keys[:8]]) as lease:
        assert len(lease) == 8
        got = stored(one, keys[8:], keys[7])
    count = sum(got)
    assert 0 < count < 22 and got == [True] * count + [False] * (22 - count)
    assert one.held(keys) == 8 + count


def test_a_page_that_goes_between_the_question_and_the_load_is_a_miss_with_all_behind_it(
    daemon: Daemon, store: MakeStore
) -> None:
    one, keys = store(), names("a", 10)
    stored(one, keys)
    assert one.held(keys) == 10
    space = daemon.client().namespace(one.spec.layout, model="model", cap_tokens=16)
    assert space.evict([one.key(keys[6])]) == 4
    assert loaded(one, keys) == 6


def test_pages_are_held_while_they_are_copied(
    make: MakeDaemon, store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 7: they are evicted and their tier is filled over and over before the copy starts."""
    daemon = make(host="256KiB", slab="64KiB").start()
    one, other = store(), store(model="other", timeout=0.5)
    one.endpoint = other.endpoint = daemon.endpoint
    keys, move = names("a", 10), pages._move
    assert all(stored(one, keys))

    def slowly(jobs: list[tuple[int, list[tuple[int, int]]]], load: bool) -> None:
        monkeypatch.setattr(pages, "_move", move)
        space = daemon.client().namespace(one.spec.layout, model="model", cap_tokens=16)
        assert space.evict() == 10
        for turn in range(6):
            assert any(stored(other, names(f"flood {turn}", 22)))
        move(jobs, load)

    monkeypatch.setattr(pages, "_move", slowly)
    assert loaded(one, keys) == 10
    assert one.held(keys) == 0


def test_bytes_that_are_changed_in_kvtierd_are_seen(daemon: Daemon, store: MakeStore) -> None:
    """The control: if a wrong byte did not show, none of these tests would say anything."""
    one, keys, memory = store(), names("a", 4), Memory()
    stored(one, keys)
    space = daemon.client().namespace(one.spec.layout, model="model", cap_tokens=16)
    with space.borrow([one.key(key) for key in keys]) as lease:
        lease[2].view[PAGE_BYTES - 1] ^= 1
    assert one.get(keys, memory.pieces(range(4))) == [True] * 4
    assert [memory.holds(slot, key) for slot, key in enumerate(keys)] == [True, True, False, True]


def test_pages_of_the_wrong_size_are_neither_stored_nor_loaded(
    store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    one, keys, memory = store(), names("a", 2), Memory()
    for wrong in (
        memory.pieces([0]),
        Pieces([*memory.pieces([0, 1]).addresses], [1500] * 7 + [1499]),
        Pieces([*memory.pieces([0, 1]).addresses][:-1], [1500] * 7),
    ):
        assert one.put(keys, wrong) == [False, False]
        assert one.get(keys, wrong) == [False, False]
    assert "not stored, not loaded" in caplog.text
    assert one.put([], Pieces((), ())) == [] == one.get([], Pieces((), ()))


def test_what_another_model_stores_is_not_found(store: MakeStore) -> None:
    keys = names("a", 3)
    assert all(stored(store(), keys))
    for fields in (
        {"model": "other"},
        {"revision": "2"},
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"salt": "tenant"},
        {"extra": {"kv_cache_dtype": "fp8_e5m2"}},
    ):
        assert store(**fields).held(keys) == 0, fields


def test_clear_forgets_this_namespace_alone(store: MakeStore) -> None:
    keys = names("a", 3)
    one, other = store(), store(model="other")
    stored(one, keys), stored(other, keys)
    assert one.clear() and one.held(keys) == 0
    assert loaded(other, keys) == 3


def test_without_a_daemon_everything_is_a_miss_and_costs_nothing(
    make: MakeDaemon, store: MakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    daemon = make()
    one, keys = store(), names("a", 3)
    one.endpoint = daemon.endpoint
    with caplog.at_level(logging.INFO, "kvtier_client.sglang.pages"):
        assert one.held(keys) == 0
        started = time.perf_counter()
        for _ in range(100):
            assert one.held(keys) == 0 and not any(stored(one, keys)) and loaded(one, keys) == 0
        assert time.perf_counter() - started < 0.5
        assert caplog.text.count("pages are missed") == 1
        daemon.start()
        eventually(lambda: all(stored(one, keys)), "it attaches by itself")
        assert "serves again" in caplog.text
    assert loaded(one, keys) == 3


def test_a_daemon_that_is_killed_and_started_again(store: MakeStore, daemon: Daemon) -> None:
    one, keys = store(), names("a", 8)
    assert all(stored(one, keys))
    eventually(
        lambda: (
            not daemon.client().stats()["tiers"][1]["unsaved"] and daemon.client().stats()["tiers"][1]["pages"] == 8
        ),
        "saved",
    )
    for client in daemon.clients:
        client.close()
    daemon.kill()
    assert one.held(keys) == 0 and loaded(one, keys) == 0 and not any(stored(one, names("b", 2)))
    daemon.start()
    eventually(lambda: one.held(keys) == 8, "what was saved is found again")
    assert loaded(one, keys) == 8
    assert all(stored(one, names("b", 2), keys[7]))


def test_a_daemon_that_dies_while_many_threads_copy(store: MakeStore, daemon: Daemon) -> None:
    """Copies under way go on in memory that stays mapped until they are done; nothing wrong is ever loaded."""
    one = store(timeout=2.0)
    keys = [names(f"k{number}", 30) for number in range(4)]
    for run in keys:
        assert all(stored(one, run))
    ended = threading.Event()
    wrong: list[str] = []

    def work(run: list[str]) -> None:
        memory = Memory()
        while not ended.is_set():
            got = one.get(run, memory.pieces(range(len(run))))
            wrong.extend(key for slot, key in enumerate(run[: sum(got)]) if not memory.holds(slot, key))
            stored(one, run)

    workers = [threading.Thread(target=work, args=(run,)) for run in keys]
    for worker in workers:
        worker.start()
    for _ in range(3):
        time.sleep(0.2)
        daemon.kill()
        time.sleep(0.05)
        daemon.start()
    eventually(lambda: one.held(keys[0]) == 30, "stored again")
    ended.set()
    for worker in workers:
        worker.join(30)
    assert not wrong


def test_a_daemon_that_hangs_costs_a_deadline_and_then_rests(
    daemon: Daemon, store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_REST", 0.5)
    one, keys = store(timeout=0.3), names("a", 2)
    assert all(stored(one, keys))
    assert daemon.process is not None
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        memory = Memory()
        assert not any(one.get(keys, memory.pieces([0, 1])))
        started = time.perf_counter()
        assert one.held(keys) == 0 and not any(one.get(keys, memory.pieces([0, 1])))
        assert time.perf_counter() - started < 0.1
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    eventually(lambda: loaded(one, keys) == 2, "it comes back")


def test_pages_that_do_not_fit_in_memory_come_back_right_from_the_disk(make: MakeDaemon, store: MakeStore) -> None:
    """Case 5: many more pages than host memory, several readers, each page's bytes follow from its key."""
    # Memory holds what four readers have at a time, and little more.
    daemon = make(host="1536KiB", ssd="16MiB", slab="64KiB").start()
    runs = [names(f"r{number}", 40) for number in range(25)]
    writer = store()
    writer.endpoint = daemon.endpoint
    for run in runs:
        for at in range(0, 40, 20):
            assert all(stored(writer, run[at : at + 20], run[at - 1] if at else ""))
    found: list[int] = []

    def read(part: int) -> None:
        reader = store()
        reader.endpoint = daemon.endpoint
        found.extend(loaded(reader, run) for run in runs[part::4])

    readers = [threading.Thread(target=read, args=(part,)) for part in range(4)]
    for one in readers:
        one.start()
    for one in readers:
        one.join(60)
    assert found == [40] * 25


def test_to_ask_for_pages_on_the_disk_brings_them_up(daemon: Daemon, store: MakeStore) -> None:
    one, keys = store(), names("a", 20)
    assert all(stored(one, keys))
    daemon.stop()
    daemon.start()
    eventually(lambda: one.held(names("b", 1)) == 0 and one.held(keys[:1]) == 1, "it is back")
    client = daemon.client()
    eventually(lambda: client.stats()["tiers"][0]["pages"] == 1, "the page that was asked for is in memory")
    assert one.held(keys) == 20
    eventually(lambda: client.stats()["tiers"][0]["pages"] == 20, "and all of them now")
    assert loaded(one, keys) == 20


def test_nothing_is_left_leased_or_reserved(daemon: Daemon, store: MakeStore) -> None:
    one, keys = store(), names("a", 6)
    stored(one, keys), loaded(one, keys), stored(one, keys), one.held(keys)
    with Client(daemon.endpoint) as client:
        stats = client.stats()["daemon"]
        assert (stats["leases"], stats["reservations"]) == (0, 0)
