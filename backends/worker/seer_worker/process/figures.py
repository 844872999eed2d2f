"""The figures that an engine keeps of itself, served for Prometheus by its worker's process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seer_host.viewer_port import ViewerHandler, ViewerPort

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["serve_figures"]


def serve_figures(host: str, registry: CollectorRegistry) -> str:
    """Serve a registry at a free port of ``host`` as long as this process lives; return the address."""
    from prometheus_client.exposition import choose_encoder  # engines with such figures bring it

    write, content_type = choose_encoder("text/plain")

    class EngineFiguresHandler(ViewerHandler):
        def do_GET(self) -> None:
            # In OpenMetrics' format prometheus_client 0.26 replaces the colons of names.
            self.reply(200, write(registry), {"Content-Type": content_type})

    port = ViewerPort(host, 0, EngineFiguresHandler, "seer-figures").start().port
    named = f"[{host}]" if ":" in host else host
    return f"http://{named}:{port}/metrics"
