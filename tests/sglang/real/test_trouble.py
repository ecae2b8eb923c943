"""SGLang's controller, with its own threads, while things go wrong: it goes on, and nothing wrong is ever loaded."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tests.sglang.real.conftest import MakeServer
from tests.sglang.real.server import PAGE, Server, fields, hashes, prompt
from tests.system.conftest import Daemon, MakeDaemon, eventually


def saved(daemon: Daemon, pages: int) -> None:
    """Wait until that many are on the disk."""
    client = daemon.client()
    eventually(lambda: client.stats()["tiers"][1]["pages"] == pages, f"{pages} pages saved")
    client.close()


@pytest.mark.parametrize("told", [True, False], ids=["prefix told", "prefix not told"])
def test_a_conversation_goes_on_in_a_restarted_server(server: MakeServer, told: bool) -> None:
    tokens = prompt(1, 40)
    before = server()
    for start, end in ((0, 10), (10, 11), (11, 40)):
        assert before.store(tokens[: end * PAGE], start=start, told=told) == (end - start) * PAGE
    before.close()
    after = server()
    assert after.load(tokens, told=told) == 40
    assert after.load(tokens, start=25, told=told) == 15, "with the first pages in the tree already"
    assert after.load(tokens[: 33 * PAGE + 5] + [1] * 5 * PAGE, told=told) == 33, "and a turn that ends elsewhere"


def test_more_pages_than_one_batch(server: MakeServer) -> None:
    tokens = prompt(1, 300)
    assert server(tokens=300 * PAGE, layout="page_first_direct").store(tokens) == 300 * PAGE
    assert server(tokens=300 * PAGE, layout="page_first_direct").load(tokens) == 300


def test_two_servers_store_and_load_the_same_prompts_at_once(server: MakeServer) -> None:
    servers = [server(tokens=4096) for _ in range(2)]
    prompts = [prompt(seed, 20) for seed in range(6)]
    problems: list[str] = []

    def work(one: int) -> None:
        for tokens in prompts if one else reversed(prompts):
            if servers[one].store(tokens) != 20 * PAGE:
                problems.append("not stored")
            servers[one].load(tokens)

    threads = [threading.Thread(target=work, args=(one,)) for one in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems
    assert [server().load(tokens) for tokens in prompts] == [20] * 6


def test_kvtierd_killed_and_started_again_in_the_middle(server: MakeServer, daemon: Daemon) -> None:
    one, tokens = server(), prompt(1, 12)
    assert one.store(tokens) == 12 * PAGE
    saved(daemon, 12)
    found = one.ask(tokens)
    assert found.storage_hit_count == 12 * PAGE
    daemon.kill()
    assert one.fetch(found) == (0, []), "found, and gone before it was loaded"
    assert one.load(tokens) == 0 and one.store(prompt(2, 3)) == 0
    daemon.start()
    eventually(lambda: one.load(tokens) == 12, "from the disk")
    assert one.store(prompt(2, 3)) == 3 * PAGE


def test_a_page_gone_between_the_question_and_the_load_ends_the_run(server: MakeServer, daemon: Daemon) -> None:
    one, tokens = server(), prompt(1, 10)
    one.store(tokens)
    found = one.ask(tokens)
    assert found.storage_hit_count == 10 * PAGE
    store = one.backend._stores[False]
    assert daemon.client().namespace(store.spec.layout, **fields(store.spec)).evict([store.key(hashes(tokens)[7])]) == 3
    assert one.fetch(found) == (7, [True] * 7)


def test_a_corrupted_page_is_a_visible_difference(server: MakeServer, daemon: Daemon) -> None:
    """The control: these tests see one wrong bit."""
    one, tokens = server(layout="layer_first"), prompt(1, 5)
    one.store(tokens)
    store = one.backend._stores[False]
    space = daemon.client().namespace(store.spec.layout, **fields(store.spec))
    with space.borrow([store.key(key) for key in hashes(tokens)]) as lease:
        lease[3].view[store.page_bytes - 1] ^= 1
    assert one.fetch(one.ask(tokens)) == (5, [True, True, True, False, True])


def test_sglangs_own_injected_failures(server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.3")
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY", "0.01")
    one = server()
    assert type(one.backend).__name__ == "HiCacheStorageFailureInjector"
    written = [one.store(prompt(seed, 6)) for seed in range(40)]
    read = [one.load(prompt(seed, 6)) for seed in range(40)]  # each page that comes is right, or this raises
    assert 0 in written and 6 * PAGE in written and 0 in read and 6 in read
    monkeypatch.delenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE")
    monkeypatch.delenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY")
    calm = server()
    assert [calm.load(prompt(seed, 6)) * PAGE for seed in range(40)] == written


def test_without_kvtierd_a_request_waits_for_nothing(make: MakeDaemon) -> None:
    one = Server(make().endpoint)
    try:
        tokens = prompt(1, 128)
        assert one.load(tokens) == 0
        started = time.perf_counter()
        for _ in range(20):
            assert one.ask(tokens).storage_hit_count == 0
        assert (time.perf_counter() - started) / 20 < 0.02
        assert one.store(prompt(1, 8)) == 0
    finally:
        one.close()


def test_clear_forgets_what_old_weights_left(server: MakeServer) -> None:
    one, tokens = server(), prompt(1, 4)
    one.store(tokens)
    one.backend.clear()
    assert one.load(tokens) == 0
    assert one.store(tokens) == 4 * PAGE and one.load(tokens) == 4


def test_a_detached_backend_holds_nothing(server: MakeServer, daemon: Daemon) -> None:
    one, tokens = server(), prompt(1, 4)
    one.store(tokens), one.load(tokens)
    client = daemon.client()
    mine = [each for each in client.sessions()["sessions"] if each["name"] == "sglang"]
    assert [(each["leases"], each["reserved_pages"], each["pid"]) for each in mine] == [(0, 0, os.getpid())]
    one.close()
    eventually(lambda: not [each for each in client.sessions()["sessions"] if each["name"] == "sglang"], "detached")
