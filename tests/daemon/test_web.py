"""What the daemon serves on loopback, with no daemon: questions to the state thread, and an hour of samples."""

from __future__ import annotations

import threading

import pytest

from kvtier_daemon.reports import Reports
from kvtier_daemon.web import PERIOD, Desk, NoAnswer, Web
from tests.daemon.world import World


def served(desk: Desk, stop: threading.Event) -> threading.Thread:
    def loop() -> None:
        while not stop.wait(0.001):
            desk.serve()

    thread = threading.Thread(target=loop)
    thread.start()
    return thread


def test_questions_are_answered_by_the_thread_that_serves() -> None:
    desk, stop = Desk(), threading.Event()
    thread = served(desk, stop)
    assert desk.ask(threading.get_ident) == thread.ident
    stop.set()
    thread.join()


def test_many_who_ask_the_same_cost_one_reading() -> None:
    desk = Desk()
    read: list[int] = []
    answers: list[int] = []

    def reading() -> int:
        read.append(1)
        return len(read)

    askers = [threading.Thread(target=lambda: answers.append(desk.ask(reading))) for _ in range(20)]
    for asker in askers:
        asker.start()
    while len(desk._asked) < 20:
        pass
    desk.serve()
    for asker in askers:
        asker.join()
    assert read == [1] and answers == [1] * 20


def test_a_reading_that_fails_is_the_askers_alone(caplog: pytest.LogCaptureFixture) -> None:
    desk, stop = Desk(), threading.Event()
    thread = served(desk, stop)
    with pytest.raises(NoAnswer, match="failed"):
        desk.ask(lambda: 1 // 0)
    assert "ZeroDivisionError" in caplog.text
    assert desk.ask(lambda: 1) == 1
    stop.set()
    thread.join()


def test_nobody_waits_for_a_loop_that_does_not_turn() -> None:
    with pytest.raises(NoAnswer, match="did not turn"):
        Desk().ask(lambda: 1, patience=0.05)


def test_the_history_is_an_hour_of_samples() -> None:
    world = World()
    web = Web(0, Reports(world.sessions, None, 1), lambda: "")
    try:
        now = 5000.0
        for _ in range(10_000):
            now += PERIOD / 4
            web.beat(now)
        assert len(web.history) == 3600 / PERIOD + 1
        web.beat(now + 10 * PERIOD)  # a loop that was busy takes one sample, not ten
        before = list(web.history)
        web.beat(now + 10 * PERIOD)
        assert list(web.history) == before
    finally:
        web.close()


def test_off_serves_nothing_and_samples_nothing() -> None:
    web = Web("off", Reports(World().sessions, None, 1), lambda: "")
    web.beat(1e9)
    assert web.port == 0 and not web.history
