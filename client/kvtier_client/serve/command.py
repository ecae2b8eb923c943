"""`kvtier serve MODEL`: its options, and the process from start to stop.

The port is taken first, then the daemon attached to, then the model loaded: what can fail early does. SIGTERM and
SIGINT close the port, give what is being answered `--stop-timeout` seconds, and end.
Importing this module is cheap; torch, transformers and the web framework are imported when a server starts.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import ipaddress
import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtier.errors import ConfigError
from kvtier_client.client import Client

if TYPE_CHECKING:
    from kvtier_client.serve.app import Service

log = logging.getLogger(__name__)

API_KEY = "KVTIER_API_KEY"
_NEEDED = ("torch", "transformers", "starlette", "uvicorn")
_WAITING = 64
_STOP = 30
_BACKLOG = 1024
_KEEP_ALIVE = 75
"""Seconds that an idle connection is kept: longer than clients and proxies keep theirs, so that they close first."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="a directory, a .gguf file, or a name on the Hugging Face hub")
    add("--served-model-name", metavar="NAME", help="what clients call it (default: MODEL, of a path its last part)")
    add("--revision", metavar="REV", help="of the model on the hub")
    add("--host", metavar="ADDRESS", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this host only)")
    add("--port", metavar="PORT", type=_port, default=8000, help="0: any that is free (default: 8000)")
    add("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... (default: cuda where there is one, else cpu)")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of weights and KV")
    add("--max-batch", metavar="N", type=_count, help="samples computed at a time (default: the worker's)")
    add("--max-waiting", metavar="N", type=_whole, default=_WAITING, help="samples that wait beyond these; then 429")
    add("--max-model-len", metavar="TOKENS", type=_count, help="of a prompt and its answer (default: the model's)")
    add("--api-key-file", metavar="FILE", help=f"holds the key that clients must send (default: {API_KEY}, else none)")
    add("--seed", metavar="N", type=int, help="makes a run repeatable: requests without a seed get N, N + 1, ...")
    add("--stop-timeout", metavar="SECONDS", type=_count, default=_STOP, help="for what is being answered at a stop")


def run(given: argparse.Namespace) -> int:
    """Serve until a signal; exit status 0. Raises ConfigError, DaemonLost, and LayoutError for a model that cannot run on
    pages."""
    _check_installed()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    key = api_key(given.api_key_file)
    name = given.served_model_name or served_name(given.model)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(given.host, given.port))
        Client(given.endpoint, name="serve").close()  # where there is no daemon, that is known before torch is imported
        from kvtier_client.serve import models

        device = models.find_device(given.device)
        client = Client(given.endpoint, name=f"serve {name}", device=str(device) if device.type == "cuda" else None)
        stack.enter_context(client)
        model, tokenizer = models.load(given.model, device=device, dtype=given.dtype, revision=given.revision)
        worker = stack.enter_context(
            models.worker(model, client, max_batch=given.max_batch, max_length=given.max_model_len)
        )
        service = _service(worker, tokenizer, name, key, given)
        stack.callback(service.bridge.close)
        _serve(service, listener, given.stop_timeout, as_json=given.json)
    return 0


def api_key(file: str | None) -> str:
    """Of the file, else of the environment, else none: never of the command line, which all users can read."""
    if file is None:
        return os.environ.get(API_KEY, "").strip()
    try:
        key = Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from None
    if not key:
        raise ConfigError(f"--api-key-file {file} is empty: write the key into it, or leave the option out")
    return key


def served_name(model: str) -> str:
    """What clients call a model that was given no other name: `smol` for /models/smol and smol.gguf, a hub's as it is."""
    path = Path(model)
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.exists() else model


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound and does not listen yet. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; choose others with --host and --port"
        ) from None
    return bound


def server(app: Any, stop_timeout: int) -> Any:
    """The web server, as it is always configured. Its log goes where all goes, and the access log is our own."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=stop_timeout,
        )
    )


def _service(worker: Any, tokenizer: Any, name: str, key: str, given: argparse.Namespace) -> Service:
    from kvtier_client.serve.app import Service
    from kvtier_client.serve.bridge import Bridge
    from kvtier_client.serve.prompts import Prompter
    from kvtier_client.transformers import Sampling

    return Service(
        bridge=Bridge(worker, worker.max_batch + given.max_waiting),
        prompter=Prompter(tokenizer, worker.max_length, worker.description.vocabulary),
        name=name,
        sampling=Sampling,
        ends=worker.description.stops,
        api_key=key,
        seed=given.seed,
    )


def _serve(service: Service, listener: socket.socket, stop_timeout: int, *, as_json: bool) -> None:
    """Until SIGTERM or SIGINT."""
    from kvtier_client.serve.app import application

    host, port = listener.getsockname()[:2]
    if not service.api_key and not ipaddress.ip_address(host).is_loopback:
        log.warning("whoever reaches %s may ask: no key is asked for; set %s, or --api-key-file", host, API_KEY)
    url = f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
    ready = json.dumps({"model": service.name, "url": url}) if as_json else f"{service.name} is served at {url}"
    listener.listen(_BACKLOG)
    print(ready, flush=True)
    web = server(application(service), stop_timeout)
    # uvicorn raises the signal that stopped it once more, for whoever had the handler before: it has been dealt with.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    web.run(sockets=[listener])


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"kvtier serve needs {', '.join(missing)}: pip install 'kvtier[serve]'")


def _whole(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _count(text: str) -> int:
    if not _whole(text):
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return int(text)


def _port(text: str) -> int:
    if _whole(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: they end at 65535")
    return int(text)
