"""A run that is watched and commanded while it goes on, from the page of its dashboard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from seer_cli.controls import RunControls
from seer_core.ports.policy import Observer

__all__ = ["watched"]


@contextmanager
def watched(
    port: int | None, name: str, window_s: float | None = None, rollouts: int = 1
) -> Iterator[tuple[Sequence[Observer], RunControls]]:
    """Serve the page of a run on this port, 0 for a free one; nothing on None.

    With ``window_s`` the page has the latest seconds alone, so many at least and twice as many at most; of a
    training it has the latest ``rollouts``.
    Yields the observers that the run needs for it, and what carries its commands out.

    Raises:
        OutputError: the port is taken.
    """
    controls = RunControls()
    if port is None:
        yield (), controls
        return
    from seer_cli.report.dashboard import Dashboard  # it brings numpy and a server

    with Dashboard(f"Seer: {name}", port, controls) as dashboard:
        yield (dashboard.watch(name, rollouts, window_s),), controls
