"""Trajectories of agents, whose turns are requests: where the KV of each is, and how long it is kept."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

import attrs
import msgspec

from seer_core.model import Completion, PromptGroup

__all__ = ["IDLE_S", "LONGEST_ID", "MOST_KEPT", "AgentTurn", "Trajectories"]

IDLE_S = 3600.0
"""Default time without a turn after which a trajectory is forgotten."""

MOST_KEPT = 65_536
"""Trajectories, and groups of them, that are kept; beyond, those without a turn for longest are forgotten."""

LONGEST_ID = 200
"""Characters of an id, as of a group's."""

PROMPT = "prompt:"
"""Stands before the digest of a prompt that is the name of its family."""

PREFIX = "trajectory:"
"""Stands before a trajectory's id where engines keep its KV, beside groups with ids of their own."""


def kv_name(trajectory_id: str) -> str:
    """Return the name by which engines keep a trajectory's KV: one no longer than an id may be."""
    name = PREFIX + trajectory_id
    return name if len(name) <= LONGEST_ID else PREFIX + sha256(trajectory_id.encode()).hexdigest()


class AgentTurn(msgspec.Struct, frozen=True):
    """A request as a turn of a trajectory."""

    trajectory: str
    """The trajectory's id."""
    group: str = ""
    """The group of trajectories that it is of; empty for none."""
    last: bool = False
    """Whether the trajectory ends with it."""


@attrs.define(eq=False)
class _Trajectory:
    """A trajectory that has not been forgotten, by the name of its KV; ``turns`` are under way."""

    name: str
    group: str
    used_s: float = 0.0
    turns: int = 0
    ended: bool = False


@attrs.define(eq=False)
class _TrajectoryGroup:
    """A group of trajectories; ``members`` have not been forgotten."""

    used_s: float = 0.0
    members: set[str] = attrs.Factory(set)


class Trajectories:
    """Keeps what the turns of trajectories share, until they end or nothing comes for ``idle_s`` seconds.

    ``forget`` drops what the engines keep of a trajectory or a group, by its name there.
    """

    by_prompt = False

    def __init__(self, idle_s: float, forget: Callable[[str], None]) -> None:
        self._idle_s = idle_s
        self._forget = forget
        self._trajectories: OrderedDict[str, _Trajectory] = OrderedDict()
        self._groups: OrderedDict[str, _TrajectoryGroup] = OrderedDict()
        self._under_way: dict[str, _Trajectory] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def kept(self) -> int:
        """The trajectories that have not been forgotten."""
        return len(self._trajectories)

    @property
    def kept_groups(self) -> int:
        """The groups of trajectories that have not been forgotten."""
        return len(self._groups)

    def mark(self, groups: Sequence[PromptGroup], turn: AgentTurn | None) -> list[PromptGroup]:
        """Return the groups of a request as those of a turn, their trajectories named as in the engines.

        Where ``by_prompt`` is set, groups of one prompt that name no family are one.
        """
        found = []
        for group in groups:
            names = group.trajectories if turn is None else (turn.trajectory,) * group.n
            family = group.family if turn is None else turn.group
            if self.by_prompt and turn is None and not family:
                family = PROMPT + sha256(array("q", group.prompt_token_ids)).hexdigest()
            found.append(
                msgspec.structs.replace(group, trajectories=tuple(map(kv_name, names)), family=family)
            )
        return found

    def begin(self, groups: Sequence[PromptGroup], turn: AgentTurn | None) -> list[str]:
        """Take note of turns that are under way from now on; return their requests."""
        begun = []
        for group in groups:
            if group.family and not group.trajectories:
                self._use_group(group.family)
            for index, name in enumerate(group.trajectories):
                request_id = f"{group.id}/{index}"
                if request_id not in self._under_way:  # else the rollout refuses the group
                    trajectory = self._begin_turn(name, group.family)
                    trajectory.ended = turn is not None and turn.last
                    self._under_way[request_id] = trajectory
                    begun.append(request_id)
        return begun

    def _begin_turn(self, name: str, family: str) -> _Trajectory:
        now = asyncio.get_running_loop().time()
        trajectory = self._trajectories.pop(name, None) or _Trajectory(name, family)
        self._trajectories[name] = trajectory  # the last one now
        trajectory.used_s = now
        trajectory.turns += 1
        if family != trajectory.group:
            self._leave_group(trajectory)
            trajectory.group = family
        if family:
            self._use_group(family).members.add(trajectory.name)
        self._make_room()
        if self._timer is None:
            self._look_later(self._idle_s)
        return trajectory

    def _use_group(self, family: str) -> _TrajectoryGroup:
        """Return a group, which is used now."""
        group = self._groups.pop(family, None) or _TrajectoryGroup()
        self._groups[family] = group
        group.used_s = asyncio.get_running_loop().time()
        self._make_room()
        if self._timer is None:
            self._look_later(self._idle_s)
        return group

    def completed(self, completion: Completion) -> None:
        """Take note of a response, which may be a turn."""
        self._over(completion.request_id)

    def refused(self, begun: Iterable[str]) -> None:
        """Take note that turns which have begun are not rolled out."""
        for request_id in begun:
            self._over(request_id)

    def _over(self, request_id: str) -> None:
        trajectory = self._under_way.pop(request_id, None)
        if trajectory is None:
            return
        trajectory.turns -= 1
        trajectory.used_s = asyncio.get_running_loop().time()
        if trajectory.name in self._trajectories:
            self._trajectories.move_to_end(trajectory.name)
        if trajectory.ended:
            self._end(trajectory.name)

    def end(self, trajectory_id: str) -> bool:
        """Forget a trajectory, once no turn of it is under way; return whether there is one."""
        return self._end(kv_name(trajectory_id))

    def _end(self, name: str) -> bool:
        trajectory = self._trajectories.get(name)
        if trajectory is None:
            return False
        if trajectory.turns:
            trajectory.ended = True
        else:
            del self._trajectories[name]
            self._leave_group(trajectory)
            self._forget(name)
        return True

    def end_group(self, group_id: str) -> int | None:
        """End a group and its trajectories; return how many they are, or None if there is no such group."""
        group = self._groups.pop(group_id, None)
        if group is None:
            return None
        for each in group.members:
            self._end(each)
        self._forget(group_id)
        return len(group.members)

    def close(self) -> None:
        """Keep no time any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _leave_group(self, trajectory: _Trajectory) -> None:
        if (group := self._groups.get(trajectory.group)) is not None:
            group.members.discard(trajectory.name)

    def _make_room(self) -> None:
        """Forget those that were used longest ago, where there are too many, but none with a turn."""
        if len(self._trajectories) > MOST_KEPT:
            idle = self._idlest()
            if idle is not None:
                self._end(idle.name)
        if len(self._groups) > MOST_KEPT:
            self.end_group(next(iter(self._groups)))

    def _idlest(self) -> _Trajectory | None:
        """Return the trajectory without a turn that was used longest ago."""
        return next((each for each in self._trajectories.values() if not each.turns), None)

    def _unused_group(self) -> str | None:
        """Return the group without a trajectory that was used longest ago."""
        return next((name for name, group in self._groups.items() if not group.members), None)

    def _look_later(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._forget_idle)

    def _forget_idle(self) -> None:
        """Forget what had no turn for too long, and look again when the next one is due."""
        self._timer = None
        now = asyncio.get_running_loop().time()
        wait_s = self._idle_s
        while (trajectory := self._idlest()) is not None:
            left_s = trajectory.used_s + self._idle_s - now
            if left_s > 0:
                wait_s = left_s
                break
            self._end(trajectory.name)
        while (name := self._unused_group()) is not None:
            left_s = self._groups[name].used_s + self._idle_s - now
            if left_s > 0:
                wait_s = min(wait_s, left_s)
                break
            self.end_group(name)
        if self._trajectories or self._groups:
            self._look_later(wait_s)
