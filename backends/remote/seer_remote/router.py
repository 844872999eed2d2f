"""A router's list of its servers: those of SGLang's and vLLM's routers, which have the same calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct

from seer_core.errors import EngineError
from seer_remote.connection import Connection, Malformed, RefusedCall, Unreachable
from seer_remote.dialect import read

__all__ = ["list_servers"]


class RoutedServer(Struct):
    """A server of the router's."""

    url: str


class Workers(Struct):
    """Answer of ``/workers``."""

    workers: list[RoutedServer]


class Urls(Struct):
    """Answer of ``/list_workers``, which older routers have."""

    urls: list[str]


def list_servers(connect: Callable[[], Connection]) -> list[str]:
    """Return the addresses of a router's servers; call it where no loop runs.

    Raises:
        EngineError: the router does not say them.
    """
    return asyncio.run(_list(connect()))


async def _list(connection: Connection) -> list[str]:
    connection.open()
    try:
        with suppress(RefusedCall):
            found = read(Workers, await connection.get("/workers"), "/workers").workers
            return [each.url for each in found]
        return read(Urls, await connection.get("/list_workers"), "/list_workers").urls
    except (Unreachable, RefusedCall, Malformed) as error:
        raise EngineError(
            f"the router at {connection.url} does not list its servers: {error}; name them in urls or"
            " urls_file of [engine.remote]"
        ) from error
    finally:
        await connection.close()
