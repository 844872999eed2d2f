"""Figures of any rollout for Prometheus: ``plugins = [..., "prometheus"]``."""

from typing import Annotated

from msgspec import Meta, Struct

from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_prometheus.exposition import Exposition
from seer_prometheus.metrics import Metrics

__all__ = ["Metrics", "Settings"]

TIER = "supported"


class Settings(Struct, frozen=True):
    """``[plugin.prometheus]``: where Prometheus finds the figures of this process."""

    host: str = "127.0.0.1"
    """The address at which figures are served, without encryption or a password: keep it in your network."""
    port: Annotated[int, Meta(ge=1, le=65535)] = 9464
    """Its port; the path is ``/metrics``."""


@hookimpl
def seer_make_observer(settings: Settings, startup: Startup) -> Metrics:
    """Count events, and serve the figures of the rollout that began last."""
    return Exposition.at(settings.host, settings.port).add(Metrics())
