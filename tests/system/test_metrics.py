"""Metrics of a real daemon, as Prometheus reads them: true, complete, and never an impossible number."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse

from kvtier.errors import KvtierError, OutOfPages
from kvtier_client import Client
from kvtier_client.sglang.identity import Options
from kvtier_daemon import metrics
from tests.system.conftest import ROOT, Daemon, MakeDaemon, eventually
from tests.system.pages import UNIT, chain, open_space, put, read, wrong

Sample = tuple[str, tuple[tuple[str, str], ...]]


class Scrape:
    """The samples of one scrape."""

    def __init__(self, text: str) -> None:
        self.kinds: dict[str, str] = {}
        self.samples: dict[Sample, float] = {}
        for family in parse(text):
            for sample in family.samples:
                self.kinds[sample.name] = family.type
                self.samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of what has these labels."""
        base = name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
        assert name in self.kinds or any(family.name == base for family in metrics.FAMILIES), name
        return sum(
            value
            for (other, has), value in self.samples.items()
            if other == name and labels.items() <= dict(has).items()
        )

    def growing(self) -> Iterator[tuple[Sample, float]]:
        for sample, value in self.samples.items():
            if self.kinds[sample[0]] in ("counter", "histogram"):
                yield sample, value


def port(daemon: Daemon) -> int:
    told: int = daemon.client().stats()["daemon"]["http_port"]
    return told


def get(number: int, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    request = urllib.request.Request(f"http://127.0.0.1:{number}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def scrape(number: int) -> Scrape:
    status, _, text = get(number, "/metrics")
    assert status == 200, text
    return Scrape(text)


def settled(number: int, name: str, value: float, **labels: str) -> Scrape:
    """The first scrape in which that metric has that value: an answer may be a moment old."""
    now = scrape(number)

    def there() -> bool:
        nonlocal now
        now = scrape(number)
        return now(name, **labels) == value

    eventually(there, f"{name} {labels} is {value}")
    return now


def test_what_was_done_is_what_is_told(make: MakeDaemon) -> None:
    daemon = make(ssd="64MiB", http_port=0).start()
    number = port(daemon)
    assert f"http://127.0.0.1:{number}/" in daemon.log
    space = daemon.space()
    keys, absent = chain(space, 1, 40), chain(space, 2, 40)
    span = space.schedule.span
    put(space, keys)
    assert space.lookup(keys) == 40
    with space.borrow(keys) as lease:
        assert len(lease) == 40
        now = settled(number, "kvtier_leased_bytes", sum(len(page.view) for page in lease))
        assert now("kvtier_leases") == 1
    longer = [*keys, *chain(space, 1, 48)[40:]]
    with space.borrow(longer) as lease:
        assert len(lease) == 40
    assert read(space, absent) == 0
    now = settled(number, "kvtier_moved_pages_total", 40, source="host", target="ssd", reason="write")
    asked = 40 + 40 + 48 + 40  # `put` borrows what is there first
    assert now("kvtier_borrow_requested_pages_total") == asked
    assert now("kvtier_borrow_hit_pages_total", tier="host") == 80 and now("kvtier_borrow_hit_pages_total") == 80
    assert now("kvtier_borrow_missed_pages_total", tier="ssd") == asked - 80
    whole, more = span(39).stop, span(47).stop
    assert now("kvtier_borrow_hit_tokens_total") == 2 * whole
    assert now("kvtier_borrow_requested_tokens_total") == whole + whole + more + whole
    assert now("kvtier_borrow_missed_tokens_total", tier="host") == more - whole + 2 * whole
    assert now("kvtier_committed_tokens_total") == whole
    assert now("kvtier_lookups_total") == 1 and now("kvtier_lookup_found_pages_total") == 40
    held = whole // 16 * UNIT
    assert now("kvtier_frame_bytes", tier="host", state="ready") == held
    assert now("kvtier_moved_bytes_total", reason="write") == held
    assert now("kvtier_tier_pages", tier="host") == 40
    assert now("kvtier_tier_capacity_bytes", tier="host", medium="host") == 16 << 20
    assert now("kvtier_request_duration_seconds_count", verb="borrow") == 4
    assert now("kvtier_request_duration_seconds_bucket", verb="borrow", le="+Inf") == 4
    assert now("kvtier_sessions") == len(daemon.clients)
    assert 0 < now("kvtier_tier_utilization_ratio", tier="host") <= 1
    assert now("process_resident_memory_bytes") > 0


def test_deaths_quarantine_and_starvation_are_told(make: MakeDaemon) -> None:
    daemon = make(host="1MiB", http_port=0).start()
    number = port(daemon)
    worker = daemon.worker()
    worker.do("held = space.reserve(chain(space, 5, 8), timeout=5); result = len(held.pages)")
    settled(number, "kvtier_frame_bytes", 8 * UNIT, state="reserved")
    worker.kill()
    now = settled(number, "kvtier_session_deaths_total", 1)
    space = open_space(daemon.client(), big=True)
    with contextlib.ExitStack() as held, pytest.raises(OutOfPages):
        for seed in range(9):
            held.enter_context(space.reserve(chain(space, seed, 4), timeout=0.5))
    now = settled(number, "kvtier_out_of_pages_total", 1)
    assert now("kvtier_request_errors_total", code="out_of_pages") == 1


def test_a_page_with_wrong_bytes_is_a_checksum_failure(make: MakeDaemon) -> None:
    daemon = make(ssd="64MiB", http_port=0).start()
    space = daemon.space()
    keys = chain(space, 3, 4)
    put(space, keys)
    daemon.stop()
    for file in daemon.ssd.glob("slab-*.kv"):
        data = bytearray(file.read_bytes())
        data[: UNIT // 2] = bytes(UNIT // 2)
        file.write_bytes(data)
    daemon.start()
    space = daemon.space()
    assert read(space, keys) < 4
    now = settled(port(daemon), "kvtier_checksum_failures_total", 1)
    assert now("kvtier_lost_pages_total") == 1


@pytest.mark.parametrize("accept", ["", "text/plain;version=0.0.4", "application/openmetrics-text;version=1.0.0"])
def test_each_format_that_a_scraper_may_ask_for(make: MakeDaemon, accept: str) -> None:
    daemon = make(http_port=0).start()
    daemon.space().lookup([bytes(16)])
    status, kind, text = get(port(daemon), "/metrics", Accept=accept)
    assert status == 200
    assert kind.startswith("application/openmetrics-text" if "openmetrics" in accept else "text/plain")
    families = list(parse_openmetrics(text) if "openmetrics" in accept else parse(text))  # type: ignore[no-untyped-call]
    assert {"kvtier_tier_capacity_bytes", "kvtier_lookups"} <= {family.name for family in families}


def test_soak(make: MakeDaemon) -> None:
    """Tiers too small for what five clients want, deadlines too short, workers that die: while it goes on, no counter
    falls, in no window is more lent than was asked for, and the bytes of a tier are never more than it has."""
    daemon = make(host="2MiB", ssd="4MiB", http_port=0).start()
    number = port(daemon)
    until = time.monotonic() + 8
    problems: list[AssertionError] = []

    def work(client: Client, own: int) -> None:
        space = open_space(client, f"model-{own % 2}")
        for turn in range(1_000_000):
            if time.monotonic() > until:
                return
            keys = chain(space, (turn * 7 + own) % 40, 8 + turn % 40)
            with contextlib.suppress(KvtierError):
                put(space, keys, timeout=0.5)
            with (
                contextlib.suppress(KvtierError),
                space.borrow(keys, tier=("any", "host")[turn % 2], timeout=(0, 0.002, 0.5)[turn % 3]) as lease,
            ):
                assert not wrong(lease, keys)

    def watched(client: Client, own: int) -> None:
        try:
            work(client, own)
        except AssertionError as error:
            problems.append(error)

    threads = [threading.Thread(target=watched, args=(daemon.client(), own)) for own in range(4)]
    for thread in threads:
        thread.start()
    before = scrape(number)
    scrapes = 0
    while time.monotonic() < until:
        if scrapes % 20 == 10:
            worker = daemon.worker()
            worker.do("held = space.reserve(chain(space, 9000, 8), timeout=0.5); result = 0")
            worker.kill()
        now = scrape(number)
        scrapes += 1
        for sample, value in before.growing():
            assert now.samples[sample] >= value, f"{sample} fell from {value} to {now.samples[sample]}"
        for what in ("pages", "tokens"):
            asked = now(f"kvtier_borrow_requested_{what}_total") - before(f"kvtier_borrow_requested_{what}_total")
            lent = now(f"kvtier_borrow_hit_{what}_total") - before(f"kvtier_borrow_hit_{what}_total")
            assert 0 <= lent <= asked
            missed = now(f"kvtier_borrow_missed_{what}_total", tier="ssd")
            assert missed == now(f"kvtier_borrow_requested_{what}_total") - now(f"kvtier_borrow_hit_{what}_total")
        for tier in ("host", "ssd"):
            slabs = now("kvtier_tier_slab_bytes", tier=tier)
            assert now("kvtier_frame_bytes", tier=tier) <= slabs <= now("kvtier_tier_capacity_bytes", tier=tier)
            assert now("kvtier_leased_bytes", tier=tier) <= now("kvtier_frame_bytes", tier=tier, state="ready")
            assert 0 <= now("kvtier_tier_utilization_ratio", tier=tier) <= 1
        assert all(value >= 0 for value in now.samples.values())
        before = now
        time.sleep(0.02)
    for thread in threads:
        thread.join()
    assert not problems, problems
    assert scrapes > 50
    assert before("kvtier_evictions_total") > 0 and before("kvtier_session_deaths_total") > 0
    assert before("kvtier_borrow_hit_pages_total", tier="ssd") > 0
    moved = {dict(labels)["reason"] for (name, labels) in before.samples if name == "kvtier_moved_pages_total"}
    assert {"write", "borrow"} <= moved


def test_health(make: MakeDaemon) -> None:
    daemon = make(http_port=0).start()
    number = port(daemon)
    assert get(number, "/healthz")[0] == 200 and get(number, "/readyz") == (200, "text/plain", "ready\n")
    assert daemon.process is not None
    daemon.client().drain()
    eventually(lambda: get(number, "/readyz")[0] == 503, "a draining daemon is not ready")
    assert "draining" in get(number, "/readyz")[2]
    assert get(number, "/healthz")[0] == 200, "it is as healthy as before"
    assert get(number, "/nothing")[0] == 404


def test_another_name_than_loopbacks_is_refused(make: MakeDaemon) -> None:
    number = port(make(http_port=0).start())
    for path in ("/", "/metrics", "/status.json"):
        assert get(number, path, Host="rebound.example")[0] == 403
        assert get(number, path, Host="localhost:80")[0] == 200


def test_garbage_is_refused_and_forgotten(make: MakeDaemon) -> None:
    daemon = make(http_port=0).start()
    number = port(daemon)
    requests = [b"\0\1\2\r\n\r\n", b"GET / HTTP/1.1\r\nHost: [::\r\n\r\n", b"GET //[ HTTP/1.0\r\n\r\n", b"A" * 70_000]
    requests += [b"POST / HTTP/1.0\r\n\r\n", b"GET / HTTP/1.0\r\n" + b"X: y\r\n" * 500 + b"\r\n"]
    for request in requests:
        with socket.create_connection(("127.0.0.1", number), timeout=5) as client, contextlib.suppress(OSError):
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
            answer = client.recv(4096)
            assert not answer or b" 4" in answer.partition(b"\r\n")[0] or b" 501 " in answer, (request[:40], answer)
    eventually(lambda: _answers(number), "it serves on")
    assert get(number, "/metrics?name=x")[0] == 200


def test_only_loopback_is_listened_at(make: MakeDaemon) -> None:
    daemon = make(http_port=0).start()
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert [fields[1].split(":")[0] for fields in listening if int(fields[1].split(":")[1], 16) == port(daemon)][
        :1
    ] == ["0100007F"]


def test_a_port_that_is_taken_costs_the_page_and_nothing_else(make: MakeDaemon) -> None:
    first = make(http_port=0).start()
    taken = port(first)
    second = make(http_port=taken).start()
    assert f"port {taken} of 127.0.0.1" in second.log and port(second) == 0
    put(second.space(), chain(second.space(), 1, 4))


def test_clients_that_say_nothing_cost_nobody_anything(make: MakeDaemon) -> None:
    daemon = make(http_port=0).start()
    number = port(daemon)
    space = daemon.space()
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            silent = stack.enter_context(socket.create_connection(("127.0.0.1", number), timeout=5))
            silent.sendall(b"GET /metr")
        put(space, chain(space, 1, 8))
        assert read(space, chain(space, 1, 8)) == 8
    eventually(lambda: _answers(number), "the page is back when they are gone")


def _answers(number: int) -> bool:
    with contextlib.suppress(OSError):
        return get(number, "/healthz")[0] == 200
    return False


def test_a_loop_that_does_not_turn_is_not_healthy(make: MakeDaemon) -> None:
    daemon = make(http_port=0).start()
    number = port(daemon)
    assert daemon.process is not None
    daemon.process.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{number}/healthz", timeout=1)
    finally:
        daemon.process.process.send_signal(signal.SIGCONT)
    eventually(lambda: _answers(number), "it goes on")


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == metrics.markdown(), (
        "run: PYTHONPATH=.:daemon python -m kvtier_daemon.metrics --markdown > docs/metrics.md"
    )


def test_names_follow_prometheus_rules() -> None:
    assert len({family.name for family in metrics.FAMILIES}) == len(metrics.FAMILIES)
    for family in metrics.FAMILIES:
        assert re.fullmatch(r"kvtier_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.help.endswith("."), family.name


def test_documents_and_rules_name_what_there_is() -> None:
    suffixes = {"histogram": ("_bucket", "_count", "_sum"), "counter": ("",), "gauge": ("",)}
    there = {family.name + suffix for family in metrics.FAMILIES for suffix in suffixes[family.kind]}
    there |= {family.name for family in metrics.FAMILIES} | {"kvtier_client", "kvtier_daemon", "kvtier_kernels"}
    there |= set(Options.__struct_encode_fields__)  # settings of SGLang's, whose names must begin so
    for file in [*(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.yml"), ROOT / "README.md"]:
        named = set(re.findall(r"(?<!vllm:)\bkvtier_[a-z_]+\b(?![/.:])", file.read_text()))
        assert named <= there, f"{file.name} names {named - there}"


def test_the_dashboard_asks_for_what_the_daemon_exports(make: MakeDaemon) -> None:
    daemon = make(ssd="64MiB", http_port=0).start()
    space = daemon.space()
    put(space, chain(space, 1, 8))
    number = port(daemon)
    now = settled(number, "kvtier_frame_bytes", 8 * UNIT, tier="ssd", state="ready")
    exported = set(now.kinds) | {family.name for family in metrics.FAMILIES}
    labels = {family.name: {*family.labels, "le"} for family in metrics.FAMILIES}
    text = (ROOT / "deploy" / "grafana" / "kvtier.json").read_text()
    board = json.loads(text)
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries += [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(queries) > 15
    for query in queries:
        names = re.findall(r"\b(?:kvtier|process)_[a-z_]+", query)
        assert names, query
        for name in names:
            assert name in exported, f"{name} is not exported, and asked for in {query}"
        for clause in re.findall(r"\bby \(([a-z_, ]+)\)", query):
            base = re.sub(r"_(bucket|sum|count)$", "", names[0])
            assert {label.strip() for label in clause.split(",")} - {"instance"} <= labels[base], query
