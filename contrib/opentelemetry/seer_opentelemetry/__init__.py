"""OpenTelemetry spans of any rollout: ``plugins = [..., "opentelemetry"]``."""

from urllib.parse import urlsplit

from msgspec import Struct

from seer_core.errors import ConfigError, quote
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_opentelemetry.request_spans import RequestSpans

__all__ = ["RequestSpans", "Settings"]

TIER = "experimental"


class Settings(Struct, frozen=True):
    """``[plugin.opentelemetry]``: where spans are sent, by OTLP over HTTP."""

    endpoint: str = ""
    """The collector's address for traces, as ``http://localhost:4318/v1/traces``; empty for the one that
    OpenTelemetry's environment variables name.
    """


@hookimpl
def seer_make_observer(settings: Settings, startup: Startup) -> RequestSpans:
    """Send a span for each request that is over.

    Raises:
        ConfigError: the endpoint is no address of HTTP; write it as ``http://HOST:4318/v1/traces``.
    """
    if settings.endpoint and urlsplit(settings.endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"[plugin.opentelemetry].endpoint is {quote(settings.endpoint)}, which is no address of HTTP;"
            " write it as http://HOST:4318/v1/traces"
        )
    return RequestSpans(settings.endpoint)
