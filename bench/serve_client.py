"""A client of `kvtier serve` that costs little, for `bench/serve.py`: raw sockets, and nothing looked at but the end.

    python bench/serve_client.py PORT STREAMS TOKENS

Asks for all streams at once, reads until each has ended, and prints the seconds from the first token to the last.
"""

from __future__ import annotations

import json
import selectors
import socket
import sys
import time

_END = b"0\r\n\r\n"
"""The chunk that ends a response."""


def main() -> int:
    port, streams, tokens = map(int, sys.argv[1:])
    body = json.dumps({"prompt": [1, 2, 3], "stream": True, "max_tokens": tokens}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    chosen = selectors.DefaultSelector()
    ends: dict[socket.socket, bytes] = {}
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        chosen.register(connection, selectors.EVENT_READ)
        ends[connection] = b""
    started = 0.0
    while ends:
        for key, _ in chosen.select():
            connection = key.fileobj  # type: ignore[assignment]
            data = connection.recv(1 << 16)
            started = started or time.perf_counter()
            ends[connection] = (ends[connection] + data)[-len(_END) :]
            if not data or ends[connection] == _END:
                chosen.unregister(connection)
                del ends[connection]
    print(time.perf_counter() - started)
    return 0


if __name__ == "__main__":
    sys.exit(main())
