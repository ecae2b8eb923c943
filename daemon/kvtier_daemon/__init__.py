"""kvtierd: the daemon that owns a host's KV pages. Start it with `kvtierd`; see docs/architecture.md."""

__version__ = "0.1.0"
