"""What the daemon tells people: numbers of the tiers, sessions, namespaces. Read-only; built when asked for."""

from __future__ import annotations

import os
import time
from typing import Any

from kvtier_daemon import __version__, store
from kvtier_daemon.directory import OpenNamespace, Tenant
from kvtier_daemon.movers import Movers
from kvtier_daemon.sessions import Session, Sessions
from kvtier_daemon.slabs import State
from kvtier_daemon.tiers import Tier

_PAGES_AT_ONCE = 1000
COMPILED = not str(store.__file__).endswith(".py")
"""Whether the state's modules are C extensions in this process (deploy/extensions.py)."""


class Reports:
    def __init__(self, sessions: Sessions, movers: Movers | None, epoch: int) -> None:
        self.all = sessions
        self.store = sessions.store
        self.movers = movers
        self.epoch = epoch
        self.http_port = 0
        self.started = time.monotonic()

    def stats(self) -> dict[str, Any]:
        """All numbers, exact. Documented in docs/protocol.md."""
        store = self.store
        counters = store.counters
        names = [tier.name for tier in store.tiers]
        return {
            "daemon": {
                "version": __version__,
                "compiled": COMPILED,
                "pid": os.getpid(),
                "epoch": self.epoch,
                "uptime": time.monotonic() - self.started,
                "http_port": self.http_port,
                "sessions": len(self.all.by_id),
                "leases": sum(len(session.leases) for session in self.all.by_id.values()),
                "reservations": sum(len(session.reservations) for session in self.all.by_id.values()),
                "pins": len(self.all.pins),
                "pages": sum(len(tenant.pages) for tenant in store.directory.tenants.values()),
                "namespaces": len(store.directory.namespaces),
                "jobs": store.jobs,
                "restarts": sum(lane.restarts for lane in self._lanes()),
            },
            "tiers": [self._tier(tier) for tier in store.tiers],
            "counters": counters.report(),
            "moves": [
                {
                    "from": names[source],
                    "to": names[target],
                    "pages": moves.pages,
                    "bytes": moves.bytes,
                    "seconds": moves.seconds,
                    "failed": moves.failed,
                }
                for (source, target), moves in counters.paths().items()
            ],
            "latency": {
                verb: {
                    "count": latency.count,
                    "mean": latency.seconds / latency.count,
                    "p50": latency.quantile(0.5),
                    "p99": latency.quantile(0.99),
                }
                for verb, latency in sorted(counters.latency.items())
            },
        }

    def sessions(self, asker: Session | None) -> dict[str, Any]:
        """Of the asker's tenant; an administrator, and the daemon itself (None), see all."""
        seen = [one for one in self.all.by_id.values() if _sees(asker, one.tenant)]
        return {
            "sessions": [
                {
                    "id": one.id,
                    "name": one.name,
                    "pid": one.pid,
                    "uid": one.uid,
                    "tenant": one.tenant.name,
                    "since": one.since,
                    "requests": one.requests,
                    "leases": len(one.leases),
                    "leased_pages": sum(map(len, one.leases.values())),
                    "reserved_pages": sum(
                        slot.frame is not None
                        for reservation in one.reservations.values()
                        for slot in reservation.slots
                    ),
                    "waiting": len(one.operations),
                    "mapped_slabs": len(one.slabs),
                    "read_only": one.read_only,
                }
                for one in seen
            ],
            "quarantined_frames": sum(map(len, self.all.quarantine.values())),
        }

    def inventory(self, asker: Session | None, seed: bytes, skip: int) -> dict[str, Any]:
        """Namespaces and pins; of one namespace also its pages, so many at once."""
        spaces = [
            space
            for space in self.store.directory.namespaces.values()
            if _sees(asker, space.tenant) and (not seed or space.seed == seed)
        ]
        report: dict[str, Any] = {
            "namespaces": [self._namespace(space) for space in spaces],
            "pins": [
                {"pin": pin, "tenant": tenant.name, "pages": len(frames)}
                for pin, (tenant, frames) in self.all.pins.items()
                if _sees(asker, tenant)
            ],
        }
        if seed:
            names = [tier.name for tier in self.store.tiers]
            pages = [page for space in spaces for page in space.tenant.pages.values() if page.namespace is space]
            report["pages"] = [
                {
                    "key": page.key.hex(),
                    "number": page.number,
                    "tokens": page.tokens,
                    "bytes": page.nbytes,
                    "uses": page.uses,
                    "tiers": [
                        name
                        for name, frame in zip(names, page.frames, strict=True)
                        if frame is not None and frame.state is State.READY
                    ],
                    "leased": any(frame is not None and frame.pins for frame in page.frames),
                }
                for page in pages[skip : skip + _PAGES_AT_ONCE]
            ]
            report["more"] = len(pages) > skip + _PAGES_AT_ONCE
        return report

    def _tier(self, tier: Tier) -> dict[str, Any]:
        lane = self.movers.lanes[tier.index] if self.movers is not None else ()
        held = {state.name.lower(): tier.bytes_in(state) for state in State}
        held["free"] += tier.capacity - tier.allocated
        return {
            "name": tier.name,
            "medium": tier.config.medium,
            "capacity": tier.capacity,
            "allocated": tier.allocated,
            "empty": sum(slab.nbytes for slab in tier.slabs.values() if not slab.busy),
            "used": tier.bytes_in(State.READY),
            "leased": tier.leased_bytes(),
            "pages": sum(owner.counts[State.READY] for owner in tier.classes.values()),
            "slabs": len(tier.slabs),
            "classes": len(tier.classes),
            "unsaved": tier.unsaved_bytes,
            "queue": len(lane),
            "closed": tier.closed,
            **{f"{name}_bytes": nbytes for name, nbytes in held.items()},
        }

    def _namespace(self, space: OpenNamespace) -> dict[str, Any]:
        spec = space.spec
        return {
            "digest": space.seed.hex(),
            "tenant": space.tenant.name,
            "model": spec.model,
            "revision": spec.revision,
            "lora": spec.lora,
            "rank": f"tp {spec.tp_rank}/{spec.tp_size} pp {spec.pp_rank}/{spec.pp_size}",
            "dtype": spec.layout.dtype,
            "pages": space.pages,
            "borrowed": space.borrowed,
            "unit_tokens": spec.layout.unit_tokens,
        }

    def _lanes(self) -> list[Any]:
        return [*self.movers.lanes, *self.movers.index_lanes.values()] if self.movers is not None else []


def _sees(asker: Session | None, tenant: Tenant) -> bool:
    return asker is None or asker.admin or tenant is asker.tenant
