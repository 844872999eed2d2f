"""The address at which a process shows its figures, one for each port."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app, start_http_server
from prometheus_client.registry import Collector

from seer_core.errors import ConfigError
from seer_prometheus.metrics import Metrics

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["Exposition"]


class Exposition(Collector):
    """Serves the figures of the observer that has seen an event last, as long as the process lives.

    A comparison makes an observer for each arm, so a port outlives them.
    """

    _served: ClassVar[dict[tuple[str, int], Exposition]] = {}

    def __init__(self) -> None:
        self._latest: Metrics | None = None

    @classmethod
    def at(cls, host: str, port: int) -> Exposition:
        """Return what is served there, and begin to serve it if nothing is.

        Raises:
            ConfigError: the port is taken, or is no port of this machine.
        """
        if (host, port) not in cls._served:
            found, registry = cls(), CollectorRegistry()
            try:
                server, _ = start_http_server(port, host, registry)
            except OSError as error:
                raise ConfigError(
                    f"[plugin.prometheus]: cannot serve figures at {host}:{port}: {error.strerror}; choose"
                    " another port"
                ) from error
            server.set_app(found.beside(make_wsgi_app(registry)))
            registry.register(found)
            cls._served[host, port] = found
        return cls._served[host, port]

    def add(self, metrics: Metrics) -> Metrics:
        """Serve these figures once they have seen an event; return them."""
        metrics.on_first_event = lambda: setattr(self, "_latest", metrics)
        return metrics

    def beside(self, figures: WSGIApplication) -> WSGIApplication:
        """Return what answers ``/targets``, and everything else by ``figures``."""

        def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if environ["PATH_INFO"] != "/targets":
                return figures(environ, start_response)
            start_response("200 OK", [("Content-Type", "application/json")])
            return [b"[]" if self._latest is None else self._latest.targets()]

        return answer

    def collect(self) -> Iterable[Metric]:
        """Return the figures at present."""
        return [] if self._latest is None else self._latest.registry.collect()
