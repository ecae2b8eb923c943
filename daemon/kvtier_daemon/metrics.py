"""The daemon's metrics, by Prometheus' rules: one table says what there is, what it means and where it is read.

    python -m kvtier_daemon.metrics --markdown > docs/metrics.md

`Metrics.take` runs in the state thread and copies plain numbers of one moment; `expose` turns them into text, in
whatever thread serves the request. So no number is read while it changes, and the text, which takes far longer than the
numbers, is no work of the state thread. Nothing is counted for metrics alone: what is read here is kept for `stats` too.
Not here: how a scrape reaches the state thread (`kvtier_daemon.web`), the numbers (`kvtier_daemon.counters`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client import ProcessCollector, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from kvtier_daemon import __version__
from kvtier_daemon.counters import BUCKETS, Moves
from kvtier_daemon.reports import Reports
from kvtier_daemon.slabs import State
from kvtier_daemon.store import EVICTION_REASONS
from kvtier_daemon.tiers import Tier

Row = tuple[tuple[str, ...], float]
"""Values of the labels, and the number."""


class Histogram(NamedTuple):
    """How many in each bucket, and the sum."""

    labels: tuple[str, ...]
    buckets: tuple[int, ...]
    total: float


class Family(NamedTuple):
    """One metric: `name` as a query writes it, so that of a counter ends in _total."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[Reports], Iterable[Row | Histogram]]


class Taken(NamedTuple):
    """A metric's numbers of one moment."""

    family: Family
    rows: list[Row | Histogram]


def _tiers(number: Callable[[Tier], float]) -> Callable[[Reports], Iterator[Row]]:
    def read(reports: Reports) -> Iterator[Row]:
        for tier in reports.store.tiers:
            yield (tier.name,), number(tier)

    return read


def _capacity(reports: Reports) -> Iterator[Row]:
    for tier in reports.store.tiers:
        yield (tier.name, str(tier.config.medium)), tier.capacity


def _slabs(reports: Reports) -> Iterator[Row]:
    for tier in reports.store.tiers:
        for tenant in tier.tenants.values():
            yield (tier.name, tenant.name), tier.held(tenant)


def _frames(reports: Reports) -> Iterator[Row]:
    for tier in reports.store.tiers:
        held = {(tenant.name, state): 0 for tenant in tier.tenants.values() for state in State}
        for owner in tier.classes.values():
            for state in State:
                held[owner.tenant.name, state] += owner.counts[state] * owner.frame_bytes
        for (tenant_name, state), nbytes in held.items():
            yield (tier.name, tenant_name, state.name.lower()), nbytes


def _leased(reports: Reports) -> Iterator[Row]:
    for tier in reports.store.tiers:
        held = {tenant.name: 0 for tenant in tier.tenants.values()}
        for owner in tier.classes.values():
            held[owner.tenant.name] += owner.leased * owner.frame_bytes
        for tenant_name, nbytes in held.items():
            yield (tier.name, tenant_name), nbytes


def _utilization(tier: Tier) -> float:
    slabs = sum(slab.nbytes for slab in tier.slabs.values())
    return tier.bytes_in(State.READY) / slabs if slabs else 0.0


def _pages(tier: Tier) -> int:
    return sum(owner.counts[State.READY] for owner in tier.classes.values())


def _hits(reports: Reports) -> Iterator[Row]:
    for tier in reports.store.tiers:
        yield (tier.name,), reports.store.counters.hits[tier.index]


def _misses(reports: Reports) -> Iterator[Row]:
    left = reports.store.counters.requested
    for tier in reports.store.tiers:
        left -= reports.store.counters.hits[tier.index]
        yield (tier.name,), left


def _asked_tokens(reports: Reports) -> Iterator[Row]:
    yield (), sum(reports.store.counters.hit_tokens) + reports.store.counters.missed_tokens


def _hit_tokens(reports: Reports) -> Iterator[Row]:
    for tier in reports.store.tiers:
        yield (tier.name,), reports.store.counters.hit_tokens[tier.index]


def _missed_tokens(reports: Reports) -> Iterator[Row]:
    counters = reports.store.counters
    left = sum(counters.hit_tokens) + counters.missed_tokens
    for tier in reports.store.tiers:
        left -= counters.hit_tokens[tier.index]
        yield (tier.name,), left


def _latency(reports: Reports) -> Iterator[Histogram]:
    for verb, latency in sorted(reports.store.counters.latency.items()):
        yield Histogram((verb,), tuple(latency.buckets), latency.seconds)


def _moves(number: Callable[[Moves], float]) -> Callable[[Reports], Iterator[Row]]:
    def read(reports: Reports) -> Iterator[Row]:
        names = [tier.name for tier in reports.store.tiers]
        for (source, target, reason), moves in sorted(reports.store.counters.moves.items()):
            yield (names[source], names[target], reason), number(moves)

    return read


def _queues(reports: Reports) -> Iterator[Row]:
    if reports.movers is None:
        return
    for tier, lane in zip(reports.store.tiers, reports.movers.lanes, strict=True):
        yield (tier.name, "copies"), len(lane)
    for number, index_lane in sorted(reports.movers.index_lanes.items()):
        yield (reports.store.tiers[number].name, "index"), len(index_lane)


def _restarts(reports: Reports) -> Iterator[Row]:
    movers = reports.movers
    lanes = [*movers.lanes, *movers.index_lanes.values()] if movers is not None else []
    yield (), sum(lane.restarts for lane in lanes)


def _evictions(reports: Reports) -> Iterator[Row]:
    counted = reports.store.counters.evictions
    for reason in (*EVICTION_REASONS, *sorted(counted.keys() - set(EVICTION_REASONS))):
        yield (reason,), counted.get(reason, 0)


def _errors(reports: Reports) -> Iterator[Row]:
    for code, number in sorted(reports.store.counters.errors.items()):
        yield (code,), number


def _sessions(reports: Reports) -> Iterator[Row]:
    numbers = dict.fromkeys(reports.store.directory.tenants, 0)
    for session in reports.all.by_id.values():
        numbers[session.tenant.name] += 1
    for tenant, number in numbers.items():
        yield (tenant,), number


def _tenant_pages(reports: Reports) -> Iterator[Row]:
    for tenant in reports.store.directory.tenants.values():
        yield (tenant.name,), len(tenant.pages)


def _one(number: Callable[[Reports], float]) -> Callable[[Reports], Iterator[Row]]:
    def read(reports: Reports) -> Iterator[Row]:
        yield (), number(reports)

    return read


def _counter(name: str) -> Callable[[Reports], Iterator[Row]]:
    return _one(lambda reports: getattr(reports.store.counters, name))


_PATH = ("source", "target", "reason")

GROUPS: dict[str, list[Family]] = {
    "Tiers": [
        Family("kvtier_tier_capacity_bytes", "gauge", "What the tier may have.", ("tier", "medium"), _capacity),
        Family(
            *("kvtier_tier_slab_bytes", "gauge", "What of it is in slabs of a tenant, or is being made."),
            *(("tier", "tenant"), _slabs),
        ),
        Family(
            "kvtier_frame_bytes",
            "gauge",
            "Bytes of frames by state: free, reserved (a worker writes), filling (a copy arrives), ready (a page that can "
            "be lent: what is used), draining (leaving the index), quarantined (their writer died, its process may still "
            "write). The states add up to the slabs, less what does not fill a frame at their ends.",
            ("tier", "tenant", "state"),
            _frames,
        ),
        Family(
            *("kvtier_leased_bytes", "gauge", "Bytes of ready frames that are leased, pinned or waited for."),
            *(("tier", "tenant"), _leased),
        ),
        Family("kvtier_tier_pages", "gauge", "Pages that the tier can lend.", ("tier",), _tiers(_pages)),
        Family(
            "kvtier_tier_utilization_ratio",
            "gauge",
            "Page utilisation: ready bytes over the bytes of all slabs. A page fills its frame, so among pages of one "
            "namespace and size this is also tokens held over tokens' room.",
            ("tier",),
            _tiers(_utilization),
        ),
        Family(
            *(
                "kvtier_tier_unsaved_bytes",
                "gauge",
                "Bytes of pages above that still wait for their copy in this tier.",
            ),
            *(("tier",), _tiers(lambda tier: tier.unsaved_bytes)),
        ),
        Family(
            *("kvtier_tier_up", "gauge", "1; 0 where the tier refuses new pages, since its medium failed."),
            *(("tier",), _tiers(lambda tier: not tier.closed)),
        ),
        Family(
            *("kvtier_slabs_reassigned_total", "counter", "Slabs that were given to another class."),
            *((), _counter("reassigned")),
        ),
        Family(
            *("kvtier_slab_failures_total", "counter", "Slabs that a medium refused."),
            *((), _counter("grow_failures")),
        ),
    ],
    "Hits and misses": [
        Family(
            *(
                "kvtier_lookups_total",
                "counter",
                "Lookups that kvtierd was asked for; most, workers make by themselves.",
            ),
            *((), _counter("lookups")),
        ),
        Family(
            *("kvtier_lookup_requested_pages_total", "counter", "Pages that these lookups asked for."),
            *((), _counter("lookup_keys")),
        ),
        Family(
            *("kvtier_lookup_found_pages_total", "counter", "Pages that these lookups found."),
            *((), _counter("lookup_found")),
        ),
        Family("kvtier_borrows_total", "counter", "Borrows.", (), _counter("borrows")),
        Family(
            "kvtier_borrow_requested_pages_total",
            "counter",
            "Pages that borrows asked for, counted with their hits when the borrow is answered.",
            (),
            _counter("requested"),
        ),
        Family(
            "kvtier_borrow_hit_pages_total",
            "counter",
            "Pages lent, by the tier that they were found in. The hit rate is its sum over the pages requested.",
            ("tier",),
            _hits,
        ),
        Family(
            "kvtier_borrow_missed_pages_total",
            "counter",
            "Pages asked for and found neither in this tier nor in one listed before it; of the last tier, pages not lent.",
            ("tier",),
            _misses,
        ),
        Family(
            "kvtier_borrow_requested_tokens_total",
            "counter",
            "Tokens of those pages. Of pages that are not held, tokens follow from the namespace's page sizes; where no "
            "page of a borrow is held, from those of the namespace that its session opened last, from its start.",
            (),
            _asked_tokens,
        ),
        Family(
            *("kvtier_borrow_hit_tokens_total", "counter", "Tokens lent, by the tier that they were found in."),
            *(("tier",), _hit_tokens),
        ),
        Family(
            *("kvtier_borrow_missed_tokens_total", "counter", "As kvtier_borrow_missed_pages_total, in tokens."),
            *(("tier",), _missed_tokens),
        ),
        Family(
            "kvtier_reserved_pages_total", "counter", "Pages that writers got frames for.", (), _counter("reserved")
        ),
        Family(
            *("kvtier_reserve_existing_pages_total", "counter", "Pages that a reserve found published already."),
            *((), _counter("exists")),
        ),
        Family(
            *("kvtier_reserve_busy_pages_total", "counter", "Pages that a reserve found being written by another."),
            *((), _counter("busy")),
        ),
        Family("kvtier_committed_pages_total", "counter", "Pages published.", (), _counter("commits")),
        Family("kvtier_committed_tokens_total", "counter", "Tokens published.", (), _counter("committed_tokens")),
    ],
    "Requests": [
        Family(
            "kvtier_request_duration_seconds",
            "histogram",
            "From a request's arrival to its answer, waiting included. Its _count is the number of requests.",
            ("verb",),
            _latency,
        ),
        Family(
            "kvtier_request_errors_total",
            "counter",
            "Errors answered, by code. A code appears with its first error.",
            ("code",),
            _errors,
        ),
        Family(
            *("kvtier_out_of_pages_total", "counter", "Requests that got no frame before their deadline."),
            *((), _counter("out_of_pages")),
        ),
        Family("kvtier_protocol_errors_total", "counter", "Messages refused.", (), _counter("protocol_errors")),
        Family(
            *("kvtier_events_dropped_total", "counter", "Events not sent, since their subscriber reads too little."),
            *((), _counter("events_dropped")),
        ),
    ],
    "Moves": [
        Family(
            "kvtier_moved_pages_total",
            "counter",
            "Pages copied from tier to tier, by who waited: borrow, prefetch, or nobody (write). A path appears with its "
            "first copy.",
            _PATH,
            _moves(lambda moves: moves.pages),
        ),
        Family("kvtier_moved_bytes_total", "counter", "Their bytes.", _PATH, _moves(lambda moves: moves.bytes)),
        Family(
            "kvtier_move_seconds_total",
            "counter",
            "Movers' time in those copies; several threads may spend it at once.",
            _PATH,
            _moves(lambda moves: moves.seconds),
        ),
        Family(
            "kvtier_move_failures_total", "counter", "Copies that failed.", _PATH, _moves(lambda moves: moves.failed)
        ),
        Family(
            "kvtier_mover_queue_jobs",
            "gauge",
            "Jobs that wait for a thread: copies and slabs of the tier, or its index.",
            ("tier", "lane"),
            _queues,
        ),
        Family("kvtier_jobs", "gauge", "Jobs posted and not finished.", (), _one(lambda reports: reports.store.jobs)),
        Family(
            "kvtier_mover_restarts_total", "counter", "Movers' threads that ended and were replaced.", (), _restarts
        ),
    ],
    "What is lost": [
        Family(
            "kvtier_evictions_total",
            "counter",
            "Replicas dropped, by reason: demoted (a tier below holds the page), evicted (none does), unsaved (lost before "
            "it was saved), vacated (its slab was needed), moved, asked, lost (it could not be read), last (its last replica "
            "went).",
            ("reason",),
            _evictions,
        ),
        Family(
            *("kvtier_lost_pages_total", "counter", "Pages that could not be read, or had the wrong bytes."),
            *((), _counter("lost")),
        ),
        Family(
            *("kvtier_checksum_failures_total", "counter", "Those of them that had the wrong bytes."),
            *((), _counter("checksum_failures")),
        ),
        Family(
            *(
                "kvtier_unsaved_pages_total",
                "counter",
                "Pages not queued for the tier below, since its queue was full.",
            ),
            *((), _counter("unsaved")),
        ),
    ],
    "Sessions": [
        Family("kvtier_sessions", "gauge", "Attached processes.", ("tenant",), _sessions),
        Family(
            "kvtier_sessions_attached_total",
            "counter",
            "Sessions opened. A worker that attaches again, after a restart of either side, is a new session.",
            (),
            _counter("attached"),
        ),
        Family(
            *("kvtier_session_deaths_total", "counter", "Sessions that ended without detaching."),
            *((), _counter("deaths")),
        ),
        Family(
            *("kvtier_leases", "gauge", "Leases held."),
            *((), _one(lambda reports: sum(len(one.leases) for one in reports.all.by_id.values()))),
        ),
        Family(
            *("kvtier_reservations", "gauge", "Reservations not committed or aborted."),
            *((), _one(lambda reports: sum(len(one.reservations) for one in reports.all.by_id.values()))),
        ),
        Family("kvtier_pins", "gauge", "Operators' pins.", (), _one(lambda reports: len(reports.all.pins))),
        Family("kvtier_pages", "gauge", "Pages published.", ("tenant",), _tenant_pages),
        Family(
            *("kvtier_namespaces", "gauge", "Namespaces known."),
            *((), _one(lambda reports: len(reports.store.directory.namespaces))),
        ),
    ],
    "The process": [
        Family(
            "kvtier_build_info",
            "gauge",
            "1, with the release.",
            ("version",),
            lambda reports: [((__version__,), 1.0)],
        ),
    ],
}
FAMILIES = [family for group in GROUPS.values() for family in group]


class Metrics:
    """All of `FAMILIES`, and what the kernel says of the process."""

    def __init__(self, reports: Reports) -> None:
        self.reports = reports
        self.process = ProcessCollector(registry=None)

    def take(self) -> list[Taken]:
        """The numbers of this moment. For the state thread; what it returns is nobody's but the caller's."""
        return [Taken(family, list(family.read(self.reports))) for family in FAMILIES]

    def expose(self, taken: Sequence[Taken], accept: str) -> tuple[str, bytes]:
        """Content type and text in the format that a scraper which accepts `accept` wants. For any thread."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(taken))
        registry.register(self.process)
        encode, kind = exposition.choose_encoder(accept)
        return kind, encode(registry)


class _Collected(Collector):
    def __init__(self, taken: Sequence[Taken]) -> None:
        self.taken = taken

    def collect(self) -> Iterator[Metric]:
        for family, rows in self.taken:
            yield _metric(family, rows)


def _metric(family: Family, rows: Iterable[Row | Histogram]) -> Metric:
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(family.name, family.help, labels=family.labels)
        for row in rows:
            assert isinstance(row, Histogram)
            bounds = [*map(str, BUCKETS), "+Inf"]
            running = itertools.accumulate(row.buckets)
            histogram.add_metric(row.labels, list(zip(bounds, running, strict=True)), row.total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for row in rows:
        assert not isinstance(row, Histogram)
        metric.add_metric(row[0], row[1])
    return metric


def markdown() -> str:
    """docs/metrics.md."""
    parts = [_INTRODUCTION]
    for title, families in GROUPS.items():
        parts.append(f"## {title}\n\n| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n")
        for family in families:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            parts.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} |\n")
        parts.append("\n")
    return "".join(parts).rstrip("\n") + _CONCLUSION


_INTRODUCTION = """\
# Metrics

Written by `python -m kvtier_daemon.metrics --markdown`; change `daemon/kvtier_daemon/metrics.py`.

`kvtierd` serves these at `http://127.0.0.1:9464/metrics`, for Prometheus and whatever reads its format:

| path | for |
| --- | --- |
| `/` | people: tiers, rates of the last hour, sessions and namespaces in a browser |
| `/metrics` | Prometheus |
| `/healthz` | 200 while the daemon's one loop answers, within 2 s; else 503: restart it |
| `/readyz` | 200 while workers can attach and store pages; else 503 and why: send them elsewhere |
| `/status.json` | what the page shows |

The setting `http_port` names another port; 0 takes a free one, which the log names; `off` serves nothing. The port is
of the loopback interface alone. If another process has it, as where two users of a host each run a daemon, the daemon
says so in its log and serves workers without it.

**Who may read them.** Whoever can open a connection on this host's loopback sees names of tenants, processes and
models, and sizes: never keys, tokens or pages. Where users of one host must not see that of each other, set
`http_port` to `off`. Requests under another name than `localhost` or a loopback address are refused, so that a web
page elsewhere cannot read this one through the browser of someone who works here; a proxy must set that `Host`.

Every number of one scrape is of the same moment. Counters start from 0 with the daemon and only grow. The share of
pages that was lent in the last five minutes, and the pages that a tier below the first had to give:

    sum(rate(kvtier_borrow_hit_pages_total[5m])) / sum(rate(kvtier_borrow_requested_pages_total[5m]))
    rate(kvtier_borrow_missed_pages_total{tier="host"}[5m]) - ignoring(tier) rate(kvtier_borrow_missed_pages_total{tier="ssd"}[5m])

`deploy/grafana/kvtier.json` is a dashboard of them, for Grafana's import.

"""

_CONCLUSION = """

Beside these there are `process_cpu_seconds_total`, `process_resident_memory_bytes`, `process_virtual_memory_bytes`,
`process_open_fds`, `process_max_fds` and `process_start_time_seconds`, as every Prometheus client has them.
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvtier_daemon.metrics", description="The reference of metrics.")
    parser.add_argument("--markdown", action="store_true", required=True, help="print docs/metrics.md")
    parser.parse_args()
    sys.stdout.write(markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
