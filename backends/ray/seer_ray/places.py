"""Places for instances: groups of one bundle each, or bundles of groups that the program has made.

All functions block; see ``threads``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import attrs
import ray
from ray.exceptions import ActorAlreadyExistsError
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from seer_core.errors import EngineError
from seer_ray import cluster
from seer_ray.settings import TABLE, Settings
from seer_ray.supervisor import Supervisor

__all__ = [
    "GivenBundle",
    "OwnGroup",
    "Place",
    "TakenPlaceError",
    "has_room",
    "lacking",
    "reserve",
    "room",
    "shortage",
]

NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""
SPARE_S = 10.0
"""How much longer than the runtime waits for it a supervisor stays without a worker."""
NAMESPACE = "seer"
"""The namespace of supervisors in given bundles. Each is named after its bundle, which so has one at most."""


class TakenPlaceError(EngineError):
    """Another instance has taken a bundle first.

    Remedy: none is needed; the instance takes another bundle.
    """


class Place(Protocol):
    """Room for one instance on a node."""

    def wait(self, limit_s: float) -> bool:
        """Wait for the room, at most so long; return whether it is there.

        Raises:
            EngineError: there is no placement group of a name in the settings.
        """
        ...

    @property
    def node_id(self) -> str:
        """The id of its node, once the room is there."""
        ...

    def make_supervisor(self) -> Any:
        """Return the handle of a new supervisor in it.

        Raises:
            TakenPlaceError: another instance was faster.
        """
        ...

    def release(self) -> None:
        """Give it back, which ends its supervisor, and with it the worker; one that is gone is no error."""
        ...


def reserve(settings: Settings, name: str, avoided: Collection[str] = ()) -> Place:
    """Ask for a place for an instance, on a node whose id is not among those to be avoided."""
    return GivenBundle(settings, avoided) if settings.placement_groups else OwnGroup(settings, name, avoided)


class OwnGroup:
    """A placement group of one bundle, which is on one node."""

    def __init__(self, settings: Settings, name: str, avoided: Collection[str]) -> None:
        labels = settings.labels
        if avoided:
            labels = {**labels, NODE_ID: f"!in({','.join(avoided)})"}
        self._settings = settings
        self._group = placement_group(
            [settings.bundle],
            strategy="STRICT_PACK",
            name=f"seer-{name}-{secrets.token_hex(4)}",
            bundle_label_selector=[labels] if labels else None,
        )

    def wait(self, limit_s: float) -> bool:
        """Wait until Ray has found a node."""
        return bool(self._group.wait(limit_s))

    @property
    def node_id(self) -> str:
        """The id of its node."""
        table: dict[str, Any] = placement_group_table(self._group)
        return str(table["bundles_to_node_id"][0])

    def make_supervisor(self) -> Any:
        """Return the handle of a supervisor, which is all that runs in the group."""
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
        return _make_supervisor(
            self._settings, num_cpus=0, num_gpus=self._settings.gpus, scheduling_strategy=strategy
        )

    def release(self) -> None:
        """Remove the group."""
        with suppress(Exception):
            remove_placement_group(self._group)


class GivenBundle:
    """A bundle of a placement group that belongs to the program around Seer, and stays."""

    def __init__(self, settings: Settings, avoided: Collection[str]) -> None:
        self._settings, self._avoided = settings, avoided
        self._found: Bundle | None = None
        self._supervisor: Any = None

    def wait(self, limit_s: float) -> bool:
        """Look for a free bundle, and sleep if there is none."""
        free = (each for each in _free_bundles(self._settings) if each.node_id not in self._avoided)
        self._found = next(free, None)
        if self._found is None:
            time.sleep(limit_s)
        return self._found is not None

    @property
    def node_id(self) -> str:
        """The id of its node."""
        assert self._found is not None
        return self._found.node_id

    def make_supervisor(self) -> Any:
        """Return the handle of a supervisor that takes of the bundle what an instance takes."""
        assert self._found is not None
        settings, found = self._settings, self._found
        try:
            self._supervisor = _make_supervisor(
                settings,
                name=found.supervisor,
                namespace=NAMESPACE,
                num_cpus=settings.cpus,
                num_gpus=settings.gpus,
                memory=settings.memory_bytes or None,
                resources=settings.resources,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    PlacementGroup(ray.PlacementGroupID(bytes.fromhex(found.group))),
                    placement_group_bundle_index=found.index,
                ),
            )
        except ActorAlreadyExistsError as error:
            raise TakenPlaceError(
                f"bundle {found.index} of placement group {found.group} has an instance already; take"
                " another one"
            ) from error
        return self._supervisor

    def release(self) -> None:
        """End the supervisor; the bundle is free then."""
        if self._supervisor is not None:
            with suppress(Exception):
                ray.kill(self._supervisor)


@attrs.frozen
class Bundle:
    """A bundle of a placement group; its node is empty while Ray looks for one."""

    group: str
    index: int
    resources: Mapping[str, float]
    node_id: str

    @property
    def supervisor(self) -> str:
        """The name of the supervisor in it."""
        return f"{self.group}-{self.index}"

    def has(self, wanted: Mapping[str, float]) -> bool:
        """Return whether it is large enough for an instance."""
        return _suffices(self.resources, wanted)

    def has_free(self, wanted: Mapping[str, float], free: Mapping[str, float]) -> bool:
        """Return whether so much of it is free, by the cluster's free resources."""
        return all(
            free.get(f"{name}_group_{self.index}_{self.group}", 0.0) >= value
            for name, value in wanted.items()
        )


def _suffices(resources: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(resources.get(name, 0.0) >= value for name, value in wanted.items())


def _make_supervisor(settings: Settings, **options: Any) -> Any:
    """Return the handle of a supervisor, whose start may take as long as the launch waits for it."""
    unused_s = settings.launch_timeout_s + SPARE_S
    return ray.remote(Supervisor).options(max_restarts=0, **options).remote(unused_s)


def _bundles(settings: Settings) -> list[Bundle]:
    """Return the bundles of the placement groups that the settings name.

    Raises:
        EngineError: there is no such group.
    """
    table = placement_group_table()
    found = []
    for name in settings.placement_groups:
        try:
            key = get_placement_group(name).id.hex()
        except ValueError:
            key = name
        group = table.get(key)
        if group is None or group["state"] == "REMOVED":
            namespace = ray.get_runtime_context().namespace
            raise EngineError(
                f"the Ray cluster has no placement group {name!r} in namespace {namespace!r}, and none with"
                f" that id; correct [{TABLE}].placement_groups, and leave the group as it is until Seer ends"
            )
        nodes = group["bundles_to_node_id"]
        found += [Bundle(key, index, has, nodes[index]) for index, has in group["bundles"].items()]
    return found


def _free_bundles(settings: Settings) -> list[Bundle]:
    """Return the bundles that have room and no instance, on nodes that are not being drained."""
    bundles, wanted, free = _bundles(settings), settings.bundle, ray.available_resources()
    without = {*cluster.draining(), ""}
    supervisors = {
        each["name"]
        for each in ray.util.list_named_actors(all_namespaces=True)
        if each["namespace"] == NAMESPACE
    }
    return [
        bundle
        for bundle in bundles
        if bundle.node_id not in without
        and bundle.supervisor not in supervisors
        and bundle.has_free(wanted, free)
    ]


def room(settings: Settings) -> list[tuple[str, int]]:
    """Return the name of each node that may have an instance, and how many it has room for now."""
    return [(node["NodeManagerHostname"], count) for node, count in _rooms(settings)]


def has_room(settings: Settings, avoided: Collection[str]) -> bool:
    """Return whether a node that is not to be avoided has room for an instance now."""
    if settings.placement_groups:
        return any(bundle.node_id not in avoided for bundle in _free_bundles(settings))
    return any(count for node, count in _rooms(settings) if node["NodeID"] not in avoided)


def _rooms(settings: Settings) -> Iterator[tuple[Mapping[str, Any], int]]:
    drained, free = set(cluster.draining()), cluster.free_resources()
    for node in cluster.living_nodes():
        if node["NodeID"] not in drained and _has_labels(node, settings.labels):
            yield node, _count(settings.bundle, free.get(node["NodeID"], {}))


def _count(wanted: Mapping[str, float], free: Mapping[str, float]) -> int:
    return min(int(free.get(name, 0.0) // value) for name, value in wanted.items())


def shortage(settings: Settings) -> str:
    """Return what is missing for one instance: in the whole cluster, or in the given placement groups."""
    wanted = settings.bundle
    if settings.placement_groups:
        bundles = _bundles(settings)
        fitting = sum(bundle.has(wanted) for bundle in bundles)
        return (
            f"{fitting} of the {len(bundles)} bundles of {_names(settings)} have {_listed(wanted)}, and all"
            " of these are in use or without a node"
        )
    free, there = ray.available_resources(), ray.cluster_resources()
    missing = [
        f"{value:g} {name} wanted, {free.get(name, 0.0):g} of {there.get(name, 0.0):g} free"
        for name, value in wanted.items()
        if free.get(name, 0.0) < value
    ]
    which = f" with the labels {_labels(settings)}" if settings.labels else ""
    return "; ".join(missing) or f"no single node{which} has {_listed(wanted)} free"


def lacking(settings: Settings, avoided: Collection[str] = ()) -> str | None:
    """Return why no node but those to be avoided could ever have an instance, or None if one could."""
    if settings.placement_groups:
        bundles = [bundle for bundle in _bundles(settings) if bundle.node_id not in avoided]
        what = f"{len(bundles)} bundles of {_names(settings)}"
        return _too_small([bundle.resources for bundle in bundles], settings.bundle, what)
    nodes = [node for node in cluster.living_nodes() if node["NodeID"] not in avoided]
    labelled = [node for node in nodes if _has_labels(node, settings.labels)]
    if not labelled:
        return f"none of the {len(nodes)} nodes has the labels {_labels(settings)}"
    return _too_small([node["Resources"] for node in labelled], settings.bundle, f"{len(labelled)} nodes")


def _too_small(totals: Sequence[Mapping[str, float]], wanted: Mapping[str, float], what: str) -> str | None:
    if any(_suffices(total, wanted) for total in totals):
        return None
    most = {name: max((total.get(name, 0.0) for total in totals), default=0.0) for name in wanted}
    return f"none of the {what} has {_listed(wanted)}; the most that one has is {_listed(most)}"


def _has_labels(node: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a node has these labels; selectors with operators are left to Ray."""
    own = node.get("Labels", {})
    return all(own.get(name) == value for name, value in labels.items() if not value.startswith(("!", "in(")))


def _names(settings: Settings) -> str:
    names = settings.placement_groups
    return ("placement group " if len(names) == 1 else "placement groups ") + ", ".join(map(repr, names))


def _labels(settings: Settings) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.labels.items())


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{value:g} {name}" for name, value in resources.items())
