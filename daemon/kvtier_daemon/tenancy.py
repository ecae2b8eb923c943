"""Who a peer is: the tenant of its uid or gid, and whether it may administer."""

from __future__ import annotations

import os

from kvtier.config import Config
from kvtier_daemon.directory import Directory, Tenant
from kvtier_daemon.tiers import Tier


class Tenancy:
    """Configured tenants by uid and gid; anyone else is a tenant of their own, with no guarantee and no limit."""

    def __init__(self, config: Config, directory: Directory, tiers: list[Tier]) -> None:
        self.config = config
        self.directory = directory
        self.tiers = tiers
        for name in config.tenants:
            self.named(name)  # so that its guarantees are kept free from the start

    def named(self, name: str) -> Tenant:
        known = self.directory.tenants.get(name)
        if known is not None:
            return known
        index = {tier.name: tier.index for tier in self.tiers}
        settings = self.config.tenants.get(name)
        guaranteed = {index[tier]: int(size) for tier, size in settings.guaranteed.items()} if settings else {}
        limit = {index[tier]: int(size) for tier, size in settings.limit.items()} if settings else {}
        tenant = self.directory.tenant(name, guaranteed, limit)
        for tier in self.tiers:
            tier.tenants[tenant.id] = tenant
        return tenant

    def of(self, uid: int, gids: list[int]) -> Tenant:
        for name, settings in self.config.tenants.items():
            if uid in settings.uids:
                return self.named(name)
        for name, settings in self.config.tenants.items():
            if set(gids) & set(settings.gids):
                return self.named(name)
        return self.named(f"uid:{uid}")

    def admin(self, uid: int) -> bool:
        return uid in (0, os.geteuid()) or uid in self.config.admins
