"""A request as its caller holds it."""

from __future__ import annotations

import threading

import pytest

from kvtier_client.transformers.requests import Request, RequestFailed, Token
from kvtier_client.transformers.sampling import Sampling


def made(samples: int = 1) -> Request:
    return Request([1, 2], Sampling(n=samples), "")


def test_a_listener_gets_what_there_is_and_what_comes() -> None:
    request = made(2)
    heard: list[object] = []
    request.put(Token(0, 5))
    request.listen(heard.append)
    request.put(Token(1, 6))
    request.end(0, "stop")
    assert heard == [Token(0, 5), Token(1, 6)]
    request.end(1, "length")
    assert heard[2:] == [None] and request.finish == ["stop", "length"]


def test_a_listener_hears_what_went_wrong() -> None:
    request, error = made(), RequestFailed("no memory")
    heard: list[object] = []
    request.fail(error)
    request.listen(heard.append)
    assert heard == [error]


def test_nothing_is_lost_or_disordered_while_a_listener_comes() -> None:
    for _ in range(50):
        request = made()
        heard: list[object] = []

        def feed(request: Request = request) -> None:
            for token in range(200):
                request.put(Token(0, token))
            request.end(0, "length")

        feeding = threading.Thread(target=feed)
        feeding.start()
        request.listen(heard.append)
        feeding.join()
        assert heard == [*(Token(0, token) for token in range(200)), None]


def test_the_iteration_ends_again_as_it_ended() -> None:
    request = made()
    request.put(Token(0, 5))
    request.fail(RequestFailed("no memory"))
    tokens = iter(request)
    assert next(tokens) == Token(0, 5)
    for _ in range(2):
        with pytest.raises(RequestFailed, match="no memory"):
            list(request)
