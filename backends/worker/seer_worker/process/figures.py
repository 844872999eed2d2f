"""The figures that an engine keeps of itself, served for Prometheus by its worker's process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client import CollectorRegistry

__all__ = ["serve_figures"]


def serve_figures(host: str, registry: CollectorRegistry) -> str:
    """Serve a registry at a free port of ``host`` as long as this process lives; return the address."""
    from prometheus_client import make_wsgi_app, start_http_server  # engines with such figures bring it

    server, _ = start_http_server(0, host, registry)
    figures = make_wsgi_app(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        # In OpenMetrics' format prometheus_client 0.26 replaces the colons of names.
        text: Iterable[bytes] = figures({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)
        return text

    server.set_app(answer)
    named = f"[{host}]" if ":" in host else host
    return f"http://{named}:{server.server_port}/metrics"
