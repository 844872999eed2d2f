"""docs/reference/events.md: the scheduler's events and commands, with their fields."""

from __future__ import annotations

from typing import get_args

from reference.frame import Page, markdown
from seer_core.model.events import Command, Event, GroupSpec, ResumedResponse
from seer_core.model.requests import InstanceInfo
from seer_core.model.sampling import Sampling

__all__ = ["page"]

INTRODUCTION = """\
A rollout is a sequence of events. The scheduler answers each event with commands, and the runtime carries
them out. Observers see both (`seer_make_observer` in [hooks](hooks.md)), and `trace.jsonl` has them, one
event in each line ([files](files.md)): there `type` names the event or the command."""


def page() -> Page:
    """Return the page."""
    found = Page("events.md", "Events and commands", INTRODUCTION)
    for title, structs in (
        ("Events", get_args(Event)),
        ("Commands", get_args(Command)),
        ("Parts of events", (GroupSpec, ResumedResponse, Sampling, InstanceInfo)),
    ):
        found.heading(2, title)
        for struct in structs:
            found.heading(3, f"`{struct.__name__}`")
            found.add(markdown(struct.__doc__ or ""))
            found.fields(struct)
    return found
