"""A client in the process that uses it, and the namespaces that it has opened.

An engine may start without kvtierd: the client attaches when it is first asked for something, and again when it was lost. All
of its calls may wait for the daemon: they belong on threads that the engine does not wait for.
"""

from __future__ import annotations

import threading

import msgspec

from kvtier.errors import DaemonLost
from kvtier.keys import Namespace
from kvtier_client.client import Client
from kvtier_client.namespace import NamespaceClient


class Link:
    """One session with the daemon at `endpoint` ("": wherever it is found)."""

    def __init__(self, endpoint: str, name: str, device: int | None = None) -> None:
        self._endpoint = endpoint or None
        self._name = name
        self._device = device
        self._lock = threading.Lock()
        self._client: Client | None = None
        self._spaces: dict[bytes, NamespaceClient] = {}
        self.closed = False

    def client(self) -> Client:
        """Its calls raise DaemonLost while kvtierd is away. So does this, once the link is closed."""
        with self._lock:
            if self.closed:
                raise DaemonLost("this engine has ended its session with kvtierd")
            if self._client is None:
                self._client = Client(self._endpoint, name=self._name, device=self._device, attach=False)
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
