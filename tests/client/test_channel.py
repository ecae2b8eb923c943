"""The client's channels against a daemon that is scripted: answers that are late, of another life, or none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvtier import wire
from kvtier.errors import DaemonLost, DeadlineExceeded, OutOfPages, ProtocolError
from kvtier_client import channel as channel_module
from kvtier_client.channel import Channel

TOKEN = b"\1" * wire.TOKEN_BYTES
EPOCH = 77
Script = Callable[[wire.Request], list[bytes]]


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[[Script], Channel]]:
    """A channel to a daemon that says what `script` makes of each request."""
    context: zmq.Context[Any] = zmq.Context()
    path = str(tmp_path / "s")
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    stop = threading.Event()
    made: list[Channel] = []
    threads: list[threading.Thread] = []

    def make(script: Script) -> Channel:
        def serve() -> None:
            while not stop.is_set():
                if router.poll(20):
                    identity, data = router.recv_multipart()
                    for answer in script(wire.decode_request(data)):
                        router.send_multipart([identity, answer])

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        made.append(Channel(context, path, TOKEN, 1, EPOCH))
        return made[-1]

    yield make
    stop.set()
    for thread in threads:
        thread.join()
    for channel in made:
        channel.close()
    router.close(0)
    context.term()


def reply(number: int, *, epoch: int = EPOCH, code: str = "", body: Any = ()) -> bytes:
    return wire.encode_reply(number, epoch, 0, code, body)


def ask(channel: Channel, *, timeout: float = 5.0, alive: bool = True) -> wire.Reply:
    channel.send("ping", timeout, wire.Ping())
    return channel.receive(timeout, lambda: alive)


def test_an_answer(scripted: Any) -> None:
    channel = scripted(lambda request: [reply(request.id, body=(5,))])
    assert ask(channel).body == [5]
    assert ask(channel).id == 2


def test_an_answer_of_another_life_of_the_daemon(scripted: Any) -> None:
    with pytest.raises(DaemonLost, match="restarted"):
        ask(scripted(lambda request: [reply(request.id, epoch=EPOCH + 1)]))


def test_answers_to_other_questions_and_events_are_passed_over(scripted: Any) -> None:
    channel = scripted(
        lambda request: [
            reply(request.id + 100),
            reply(0, code="event", body=("stored", b"", 0, b"")),
            reply(request.id, body=(9,)),
        ]
    )
    assert ask(channel).body == [9]


def test_an_error_is_raised_as_what_it_is(scripted: Any) -> None:
    with pytest.raises(OutOfPages, match="none of 3"):
        ask(scripted(lambda request: [reply(request.id, code="out_of_pages", body="none of 3")]))


def test_an_answer_that_cannot_be_read(scripted: Any) -> None:
    with pytest.raises(ProtocolError):
        ask(scripted(lambda request: [b"\xc1"]))


def test_silence(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "_GRACE", 0.1)
    channel = scripted(lambda request: [])
    with pytest.raises(DeadlineExceeded, match="lives but did not answer"):
        ask(channel, timeout=0.1)
    with pytest.raises(DaemonLost, match="hung up"):
        ask(channel, timeout=60, alive=False)
