"""The address at which a process shows its figures, one for each port."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.registry import Collector
from seer_host.viewer_port import ViewerHandler, ViewerPort

from seer_core.errors import ConfigError
from seer_prometheus.metrics import Metrics

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

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
            handler = _handler(make_wsgi_app(registry), found.targets)
            try:
                server = ViewerPort(host, port, handler, "seer-prometheus")
            except OSError as error:
                raise ConfigError(
                    f"[plugin.prometheus]: cannot serve figures at {host}:{port}: {error.strerror}; choose"
                    " another port"
                ) from error
            registry.register(found)
            server.start()
            cls._served[host, port] = found
        return cls._served[host, port]

    def add(self, metrics: Metrics) -> Metrics:
        """Serve these figures once they have seen an event; return them."""
        metrics.on_first_event = lambda: setattr(self, "_latest", metrics)
        return metrics

    def targets(self) -> bytes:
        """Return what ``Metrics.targets`` returns, of none before the first event."""
        return b"[]" if self._latest is None else self._latest.targets()

    def collect(self) -> Iterable[Metric]:
        """Return the figures at present."""
        return [] if self._latest is None else self._latest.registry.collect()


def _handler(figures: WSGIApplication, targets: Callable[[], bytes]) -> type[ViewerHandler]:
    """Return the class that answers ``/targets``, and everything else by ``figures``."""

    class FiguresHandler(ViewerHandler):
        """Answers Prometheus."""

        def do_GET(self) -> None:
            """Answer with figures."""
            path, _, query = self.path.partition("?")
            if path == "/targets":
                return self.reply(200, targets(), {"Content-Type": "application/json"})
            environment = {
                "REQUEST_METHOD": self.command,
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "HTTP_ACCEPT": self.headers.get("Accept", ""),
                "HTTP_ACCEPT_ENCODING": self.headers.get("Accept-Encoding", ""),
            }
            status, headers = "", dict[str, str]()

            def begin(answer: str, found: list[tuple[str, str]], /, *_: object) -> Callable[[bytes], object]:
                nonlocal status, headers
                status, headers = answer, dict(found)
                return lambda data: None

            body = b"".join(figures(environment, begin))
            self.reply(int(status[:3]), body, headers)

    return FiguresHandler
