"""`KVTierConnector`: vLLM's interface to the parts that do the work. Thin: it decides nothing that they could.

    scheduler's side   `Scheduler`, and `Asker`, which talks to kvtierd
    worker's side      `Worker`, one session a rank
    between them       `Step` with every step, `Heard` on the way back, and once, as handshake, every rank's namespaces: only a
                       worker sees its tensors, and two sides that each named pages for themselves could differ

Where a model cannot be served, or not with this version of vLLM, the connector says why, once, and vLLM runs as without it.
`KVConnectorBase_V1` and `SupportsHMA` as installed say what each method is for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvtier import device
from kvtier.errors import KvtierError, LayoutError
from kvtier.keys import Namespace
from kvtier_client.vllm import naming, versions
from kvtier_client.vllm.asker import Asker
from kvtier_client.vllm.blocks import block_map
from kvtier_client.vllm.events import Announced, Events
from kvtier_client.vllm.groups import Plan, plan
from kvtier_client.vllm.hashes import BlockHashes, Hashing
from kvtier_client.vllm.link import Link
from kvtier_client.vllm.messages import Heard, Step
from kvtier_client.vllm.options import parse
from kvtier_client.vllm.scheduler import Scheduler
from kvtier_client.vllm.stats import COUNTS, Tally, summary, summed
from kvtier_client.vllm.worker import Cache, Worker

logger = logging.getLogger("vllm.kvtier")  # vLLM's own handlers show it


class KVTierMetadata(KVConnectorMetadata):
    """A `Step` on its way to the workers."""

    def __init__(self, step: Step) -> None:
        self.step = step


class KVTierWorkerMetadata(KVConnectorWorkerMetadata):
    """What a rank heard, on its way to the scheduler."""

    def __init__(self, heard: Heard) -> None:
        self.heard = heard

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return KVTierWorkerMetadata(Heard(self.heard.failed | other.heard.failed))


@dataclass
class KVTierHandshake(KVConnectorHandshakeMetadata):
    """A rank's namespaces, packed, by group number; or why it has none."""

    spaces: dict[int, bytes] = field(default_factory=dict)
    unserved: str = ""


class KVTierStats(KVConnectorStats):
    """Counts by name (`stats.COUNTS`)."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return KVTierStats(data=summed(self.data, other.data))

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KVTierPromMetrics(KVConnectorPromMetrics):
    """A Prometheus counter for each count, by engine."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, dict[int, Any]] = {}
        for key, count in COUNTS.items():
            made = self._counter_cls(name=f"vllm:kvtier_{count.name}", documentation=count.help, labelnames=labelnames)
            self._counters[key] = {engine: made.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            if key in self._counters:
                self._counters[key][engine_idx].inc(value)


class KVTierConnector(KVConnectorBase_V1, SupportsHMA):
    """kvtier as vLLM's KV cache beyond the GPU."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config = vllm_config
        self._options = parse(transfer.kv_connector_extra_config)
        self._saves, self._loads = bool(transfer.is_kv_producer), bool(transfer.is_kv_consumer)
        self._plan = plan(vllm_config, kv_cache_config)
        self._unserved = self._plan.unserved
        if len(self._plan.groups) > 1 and not versions.tells_failed_requests():
            self._unserved = self._unserved or (
                f"a model with {len(self._plan.groups)} KV cache groups, and vLLM {versions.version()} cannot be told of a "
                "failed load of one: use 0.32 or newer"
            )
        self._tally = Tally()
        self._link: Link | None = None
        self._scheduler: Scheduler | None = None
        self._asker: Asker | None = None
        self._events: Events | None = None
        self._worker: Worker | None = None
        self._model: naming.Model | None = None
        self._spaces: dict[int, Namespace] = {}
        self._missing: set[int] = set()
        self._heard = Heard()
        if role == KVConnectorRole.SCHEDULER:
            if versions.take_over_failures(transfer):
                logger.info("kvtier: kv_load_failure_policy is recompute: what cannot be loaded is computed")
            if self._unserved:
                self._say_unserved()
        else:
            # Also where weights cannot be named: better now than after the first hour.
            self._model = (
                naming.model_of(vllm_config, self._options, versions.version()) if not self._unserved else None
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """A page that is not saved is a miss later, and no more."""
        return False

    # Worker's side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """The tensors are there: find out where blocks lie, and what their pages are called."""
        if self._unserved or self._model is None:
            return
        caches: dict[int, Cache] = {}
        try:
            for group in self._plan.groups:
                if group.layers:
                    blocks = block_map(kv_caches, group.layers, self._kv_cache_config.num_blocks)
                    backends = sorted({versions.backend_of(self._config, layer) for layer in group.layers})
                    arrangement = f"{'+'.join(backends)} on {_processor(blocks.device)}: {blocks.arrangement}"
                    space = naming.namespace_of(
                        self._model, self._rank(), group, blocks.unit_bytes, arrangement, self._options
                    )
                    caches[group.number] = Cache(blocks, space)
            if not caches:
                raise LayoutError("a rank has no layer that keeps KV")
            where = next(iter(caches.values())).blocks.device
            if where.type == "cuda":
                device.runtime()  # better said now than at each copy
        except KvtierError as error:
            self._unserved = str(error)
            return
        self._spaces = {number: cache.space for number, cache in caches.items()}
        rank = self._rank()
        name = f"vllm {self._model.name} tp{rank.tp_rank} pp{rank.pp_rank}"
        self._link = Link(self._options.endpoint, name, where.index if where.type == "cuda" else None)
        self._worker = Worker(
            caches, self._options, self._link, self._tally, saves=self._saves and rank.writer, loads=self._loads
        )

    def get_handshake_metadata(self) -> KVTierHandshake:
        packed = {number: msgspec.msgpack.encode(space) for number, space in self._spaces.items()}
        return KVTierHandshake(packed, self._unserved)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if isinstance(kv_connector_metadata, KVTierMetadata) and self._worker is not None:
            self._worker.begin(kv_connector_metadata.step)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.handle_preemptions(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: what is loaded was there before its request ran."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole blocks are saved when their step is done."""

    def wait_for_save(self) -> None:
        if self._worker is not None and self.has_connector_metadata():
            self._worker.start_saves(self._get_connector_metadata().step)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._results()[0] or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        finished, failed = self._results()
        # With one group its blocks are named, so that those before the first missing one are kept.
        return versions.transfer_results(finished, failed if len(self._plan.groups) > 1 else set())

    def get_block_ids_with_load_errors(self) -> set[int]:
        missing, self._missing = self._missing, set()
        return missing if len(self._plan.groups) == 1 else set()

    def get_kv_connector_stats(self) -> KVTierStats | None:
        counts = self._tally.take()
        return KVTierStats(data=counts) if counts else None

    def build_connector_worker_meta(self) -> KVTierWorkerMetadata | None:
        heard, self._heard = self._heard, Heard()
        return KVTierWorkerMetadata(heard) if heard.failed else None

    # Scheduler's side

    def set_xfer_handshake_metadata(self, metadata: dict[Any, Any]) -> None:
        """All ranks' namespaces are there: pages can be looked up."""
        parallel = self._config.parallel_config
        ranks = int(parallel.tensor_parallel_size) * int(parallel.pipeline_parallel_size)
        told = [one for one in metadata.values() if isinstance(one, KVTierHandshake)]
        if not self._unserved:
            self._unserved = next((one.unserved for one in told if one.unserved), "")
            if not self._unserved and len(told) < ranks:
                self._unserved = (
                    f"{len(told)} of {ranks} ranks told their namespaces, and a hit must be one on all of them"
                )
            if self._unserved:
                self._say_unserved()
        if self._unserved or self._scheduler is not None:
            return
        spaces: list[list[Namespace]] = []
        for group in self._plan.groups:
            packed = {one.spaces[group.number] for one in told if group.number in one.spaces}
            spaces.append([msgspec.msgpack.decode(one, type=Namespace) for one in sorted(packed)])
        self._link = Link(self._options.endpoint, f"vllm {spaces[0][0].model} scheduler")
        self._asker = Asker(self._link, spaces, self._tally)
        if versions.wants_events(self._config):
            self._events = Events(self._link, versions.stored_event, versions.removed_event)
        self._scheduler = Scheduler(
            self._plan,
            [group[0].schedule for group in spaces],
            self._asker,
            _Hashes(self._config, self._plan),
            saves=self._saves,
            loads=self._loads,
        )

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[Any, Any]) -> None:
        self.set_xfer_handshake_metadata(metadata)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._scheduler.queued(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        tokens = self._scheduler.matched(request, num_computed_tokens) if self._scheduler is not None else 0
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVTierMetadata:
        if self._scheduler is None:
            return KVTierMetadata(Step())
        step = self._scheduler.step(scheduler_output)
        if self._events is not None:
            self._announce(step)
        return KVTierMetadata(step)

    def update_connector_output(self, connector_output: Any) -> None:
        heard = getattr(connector_output, "kv_connector_worker_meta", None)
        if self._scheduler is not None and isinstance(heard, KVTierWorkerMetadata):
            self._scheduler.heard(heard.heard)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The blocks may go at once: what still reads them is waited for before they are written (`Worker.begin`)."""
        if self._scheduler is not None:
            self._scheduler.finished(request)
        return False, None

    def take_events(self) -> Iterable[Any]:
        return self._events.take() if self._events is not None else ()

    def reset_cache(self) -> bool | None:
        """From now on nothing of before is found by this engine: its weights may have changed in place."""
        if self._scheduler is not None:
            self._scheduler.reset()
        return True

    # Either side

    def shutdown(self) -> None:
        for part in (self._events, self._asker, self._worker):
            if part is not None:
                part.close()
        if self._link is not None:
            with contextlib.suppress(KvtierError):
                self._link.close()
        self._worker = self._scheduler = None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return KVTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KVTierPromMetrics:
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _results(self) -> tuple[set[str], set[str]]:
        """Requests whose loads are over, and those of them that failed; the rest is kept for who asks next."""
        if self._worker is None:
            return set(), set()
        results = self._worker.results()
        self._missing |= results.missing
        self._heard.failed |= results.failed
        return results.finished, results.failed

    def _rank(self) -> naming.Rank:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        rank, size = get_tp_group().rank_in_group, get_tp_group().world_size
        same = versions.replicas(self._config, self._kv_cache_config)
        pipeline = get_pp_group()
        return naming.Rank(
            rank // same, size // same, pipeline.rank_in_group, pipeline.world_size, writer=rank % same == 0
        )

    def _announce(self, step: Step) -> None:
        assert self._events is not None and self._scheduler is not None and self._asker is not None
        for save in step.saves:
            request = self._scheduler.request(save.request)
            adapter = request.lora_request
            for run in save.pages:
                size = self._plan.groups[run.group].block_tokens
                for span, key in self._scheduler.keys(save, run):
                    per = size // self._plan.hash_tokens
                    ends = range(span.start // size, span.stop // size)
                    own = [bytes(request.block_hashes[(at + 1) * per - 1]) for at in ends]
                    parent = (
                        bytes(request.block_hashes[span.start // self._plan.hash_tokens - 1]) if span.start else None
                    )
                    page = Announced(
                        own,
                        parent,
                        list(request.all_token_ids[span.start : span.stop]),
                        size,
                        run.group,
                        adapter.lora_int_id if adapter is not None else None,
                        adapter.lora_name if adapter is not None else None,
                    )
                    self._events.plan(key, page)

    def _say_unserved(self) -> None:
        logger.warning("kvtier: nothing is kept for this engine: %s", self._unserved)


class _Hashes:
    """Makes the `BlockHashes` of a request; how this process hashes is known only when the first one comes."""

    def __init__(self, vllm_config: Any, of: Plan) -> None:
        self._config = vllm_config
        self._plan = of
        self._hashing: Hashing | None = None

    def __call__(self) -> BlockHashes:
        if self._hashing is None:
            self._hashing = versions.hashing(self._config)
        return BlockHashes(self._hashing, self._plan.hash_tokens)


def _processor(where: Any) -> str:
    """What may decide on an order within a block: a GPU's kind, or what the CPU can do."""
    import torch

    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    return f"{where.type} {torch.backends.cpu.get_cpu_capability()}"
