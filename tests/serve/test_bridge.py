"""Between the worker's thread and the loop: order, and one wake-up for many tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvtier_client.serve.bridge import Mailbox


def test_all_that_is_posted_is_delivered_in_order_by_the_loop() -> None:
    got: list[tuple[int, int]] = []
    threads_seen: set[int] = set()

    async def run() -> None:
        mailbox = Mailbox(asyncio.get_running_loop())

        def take(item: tuple[int, int]) -> None:
            threads_seen.add(threading.get_ident())
            got.append(item)

        def post(number: int) -> None:
            for count in range(2000):
                mailbox.post(take, (number, count))

        posting = [threading.Thread(target=post, args=(number,)) for number in range(3)]
        for thread in posting:
            thread.start()
        async with asyncio.timeout(20):
            while len(got) < 6000:
                await asyncio.sleep(0)
        for thread in posting:
            thread.join()

    asyncio.run(run())
    assert threads_seen == {threading.get_ident()}
    for number in range(3):
        assert [count for which, count in got if which == number] == list(range(2000))


def test_many_tokens_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.new_event_loop()
    rung = loop.call_soon_threadsafe
    calls: list[object] = []

    def ring(call: Callable[[], object]) -> None:
        calls.append(call)
        rung(call)

    monkeypatch.setattr(loop, "call_soon_threadsafe", ring)
    got: list[int] = []
    try:
        mailbox = Mailbox(loop)
        for number in range(100):
            mailbox.post(got.append, number)
        assert len(calls) == 1
        loop.call_soon(loop.stop)
        loop.run_forever()
        assert got == list(range(100))
        mailbox.post(got.append, 100)
        assert len(calls) == 2
    finally:
        loop.close()


def test_a_loop_that_is_closed_is_nobody_to_tell() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    Mailbox(loop).post(lambda _: None, 1)
