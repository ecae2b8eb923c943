"""An attachment that may not be there: made when it is first wanted, and again when it was lost, ever less often.

`Client` does that for itself once it exists; this is for the time before, when an engine starts without kvtierd. All of its
calls may wait for the daemon: they belong on threads that the engine does not wait for.
"""

from __future__ import annotations

import random
import threading
import time

import msgspec

from kvtier.errors import DaemonLost, KvtierError
from kvtier.keys import Namespace
from kvtier_client.client import Client
from kvtier_client.namespace import NamespaceClient

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 5.0


class Link:
    """One session with the daemon at `endpoint` ("": wherever it is found)."""

    def __init__(self, endpoint: str, name: str, device: int | None = None) -> None:
        self._endpoint = endpoint or None
        self._name = name
        self._device = device
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._spaces: dict[bytes, NamespaceClient] = {}
        self._failures = 0
        self._next_try = 0.0
        self.closed = False

    def client(self) -> Client:
        """Raises DaemonLost, at once while it is not yet time to try again."""
        with self._lock:
            if self._client is not None:
                return self._client
            now = time.monotonic()
            if self.closed or now < self._next_try:
                raise DaemonLost("kvtierd is away")
            try:
                self._client = Client(self._endpoint, name=self._name, device=self._device)
            except KvtierError:
                pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**self._failures)
                self._failures += 1
                self._next_try = now + pause * random.uniform(0.5, 1.0)
                raise
            return self._client

    def space(self, spec: Namespace) -> NamespaceClient:
        """The pages of a namespace, opened once. Raises DaemonLost."""
        client = self.client()
        named = msgspec.msgpack.encode(spec)
        found = self._spaces.get(named)
        if found is None:
            found = NamespaceClient(client, spec)
            with self._lock:
                if len(self._spaces) >= 256:  # adapters come and go
                    self._spaces.clear()
                self._spaces[named] = found
        return found

    def close(self) -> None:
        """End the session, and with it all it holds."""
        with self._lock:
            self.closed = True
            client, self._client = self._client, None
        if client is not None:
            client.close()
