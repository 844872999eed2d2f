"""The responses of a comparison on emulated accelerators, under its arms: ``[compare.emulated]``.

Instances are simulated, as those of ``seer twin``, with the costs of another model on its GPUs.  The KV that
the comparison's instances hold stands for what those GPUs hold, so that a token of context weighs as many
times more.  Drafts are worth what a replay of the responses' own texts says.  Nothing that was measured on
this machine goes in, so the same responses give the same figures anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from seer_cli.compare_table import compare_table
from seer_cli.comparison import FIGURES, arms_of
from seer_cli.emulation import Emulated, EmulatedArm, Emulator, WrittenResponses
from seer_host.config_files import Config
from seer_host.tables import nearest
from seer_session.assembly import fill_slots
from seer_session.factories import environment_of
from seer_sim.drafts import Drafts
from seer_sim.measured import MEASURED
from seer_sim.pool import Settings as PoolSettings
from seer_sim.presets import PRESETS

from seer_core.errors import ConfigError, quote
from seer_core.model import Completion, InstanceInfo
from seer_core.model.events import Command, Event
from seer_core.ports.policy import Observer
from seer_lab.bound import GROUPED, Bound, bounds_of
from seer_lab.lengths import GroupLengths
from seer_lab.policies import PolicySet
from seer_lab.simulate import simulate
from seer_lab.twin import Twin, drafts_of
from seer_lab.workloads import CLUSTERS, MEASURED_DRAFTING, Cluster, on

__all__ = ["CompletionLog", "dearer", "make_emulator"]


def make_emulator(config: Config) -> Emulator:
    """Return the function that makes the tables which ``[compare.emulated]`` asks for.

    Raises:
        ConfigError: there is no such model, a key does not go there, or the config has an environment.
    """
    wanted = compare_table(config).emulated
    for name in wanted.on:
        if name not in CLUSTERS:
            raise ConfigError(
                f"[compare.emulated].on names {quote(name)}: there is no such model"
                f"{nearest(name, CLUSTERS)}; there are {', '.join(CLUSTERS)}"
            )
    for arm in arms_of(config):
        if environment_of(fill_slots(config.with_plugins(arm.enabled))) is not None:
            raise ConfigError(
                "[compare.emulated] has no turns, which the environment answers; leave its `on` empty"
            )
        for name in wanted.on:
            tables = _tables(config, CLUSTERS[name], [], 1.0)
            fill_slots(Twin("", [[]], tables).config(arm.plugins, wanted.set))
    return partial(_emulate_all, config, wanted.on)


def dearer(tables: Mapping[str, Any], by: float) -> dict[str, Any]:
    """Return tables in which a token of context costs so many times as much, for contexts as much shorter."""
    engine = dict(tables["engine"]["sim"])
    constants = {**msgspec.structs.asdict(PRESETS[engine["preset"]]), **engine.get("cost", {})}
    dearer = ("kv_bytes_per_token", "attention_flops", "prefill_attention_flops")
    engine["cost"] = {**engine.get("cost", {}), **{name: constants[name] * by for name in dearer}}
    engine["report_interval_s"] = 1.0
    pool = dict(tables["kv_pool"]["sim_pool"])
    rates = PoolSettings()
    pool["bandwidth_bytes_per_s"] *= by  # as many bytes in so much less time
    pool["ssd_bytes_per_s"] = pool.get("ssd_bytes_per_s", rates.ssd_bytes_per_s) * by
    pool["latency_s"] = rates.latency_s / by
    return {**tables, "engine": {"sim": engine}, "kv_pool": {"sim_pool": pool}}


class CompletionLog(Observer):
    """An observer that keeps the completions of a run."""

    def __init__(self) -> None:
        self.completions: list[Completion] = []

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Ignore events."""

    def completed(self, now: float, completion: Completion) -> None:
        """Keep a response."""
        self.completions.append(completion)


def _emulate_all(config: Config, names: Sequence[str], written: WrittenResponses) -> list[Emulated]:
    """Roll the responses out under every arm on all of these."""
    return [_emulate(config, name, written) for name in names]


def _emulate(config: Config, on_name: str, written: WrittenResponses) -> Emulated:
    """Roll the responses out under every arm."""
    cluster = CLUSTERS[on_name]
    by = max(1.0, cluster.kv_capacity_tokens / min(each.kv_capacity_tokens for each in written.instances))
    groups = [
        GroupLengths(
            group.id,
            len(group.prompt_token_ids),
            tuple(max(1, len(written.tokens[f"{group.id}/{index}"])) for index in range(group.n)),
            group.max_tokens,
        )
        for group in written.groups
    ]
    tables = _tables(config, cluster, written.instances, by)
    plain = Twin("emulated", [groups], tables, base_dir=config.base_dir)
    drafting = _with_texts(plain, written) if any(GROUPED in arm.plugins for arm in written.arms) else plain
    overrides = compare_table(config).emulated.set
    figures: dict[str, dict[str, float]] = {}
    bounds: dict[tuple[str, int], Bound] = {}
    undrafted = []
    for arm in written.arms:
        policy = PolicySet(arm.name, arm.plugins, has_lengths=arm.has_lengths, shares_kv=arm.shares_kv)
        log = CompletionLog()
        twin = drafting if GROUPED in arm.plugins else plain
        run = simulate(twin, policy, overrides=overrides, observers=[log])
        figures[arm.name] = {name: float(getattr(run.summary, name)) for name in FIGURES}
        drafts = drafts_of(log.completions, 0.0, selective=True) if GROUPED in arm.plugins else None
        if drafts is None:
            undrafted.append(_without_drafts(policy))
        else:
            bounds |= bounds_of(_with_rates(plain, drafts), [policy], [0], overrides)
    bounds |= bounds_of(plain, undrafted, [0], overrides)
    arms = [
        EmulatedArm(name, figures[name], bounds[name, 0].total_time_s if (name, 0) in bounds else None)
        for name in figures
    ]
    title = _title(written, on_name, cluster)
    return Emulated(on_name, title, arms, _about(config, cluster, by))


def _without_drafts(policy: PolicySet) -> PolicySet:
    """Return the policy without drafts from siblings, as where a text has none that are worth something."""
    return msgspec.structs.replace(policy, plugins=tuple(name for name in policy.plugins if name != GROUPED))


def _with_rates(twin: Twin, drafts: Drafts) -> Twin:
    """Return the twin with drafts that are verified and accepted as often as these."""
    rows = ("siblings",) if drafts.tokens is None else ("siblings", "tokens")
    worth = {name: getattr(drafts, name) for name in (*rows, "rates", "verified")}
    engine = twin.tables["engine"]["sim"]
    engine = {**engine, "acceptance": {**engine["acceptance"], **worth}}
    return msgspec.structs.replace(twin, tables={**twin.tables, "engine": {"sim": engine}})


def _tables(config: Config, cluster: Cluster, instances: Sequence[InstanceInfo], by: float) -> dict[str, Any]:
    """Return the tables of a config with emulated instances in place of these."""
    longest = min((each.max_model_tokens for each in instances), default=1 << 12)
    tables = on(msgspec.structs.replace(cluster, instances=len(instances) or cluster.instances), longest)
    if instances:
        running = min(each.max_running for each in instances)
        tables["engine"]["sim"] |= {
            "kv_capacity_tokens": min(_whole_blocks(each) for each in instances),
            "block_tokens": instances[0].block_tokens,
            "max_running": running,
            "max_batched_tokens": max(running, cluster.max_batched_tokens),
        }
    tables["engine"]["sim"]["acceptance"] = dict(MEASURED_DRAFTING)
    pool = "none" if config.seer.kv_pool == "none" else "sim_pool"
    plugins = {name: {**tables["plugin"].get(name, {}), **table} for name, table in config.plugin.items()}
    return {
        **dearer(tables, by),
        "seer": {**msgspec.to_builtins(config.seer), "engine": "sim", "kv_pool": pool, "launcher": "local"},
        "plugin": {**tables["plugin"], **plugins},
    }


def _whole_blocks(info: InstanceInfo) -> int:
    """Return the tokens of KV that an instance holds in whole blocks."""
    return info.kv_capacity_tokens // info.block_tokens * info.block_tokens


def _with_texts(twin: Twin, written: WrittenResponses) -> Twin:
    """Return the twin with drafts that are worth what a replay of the texts says."""
    from seer_grouped_spec.replay import Recording

    from seer_lab.replayed import replayed_drafts, with_replayed

    recordings = [
        Recording(
            group.id,
            np.array(group.prompt_token_ids, np.int32),
            tuple(np.array(written.tokens[f"{group.id}/{index}"], np.int32) for index in range(group.n)),
        )
        for group in written.groups
    ]
    return with_replayed(twin, replayed_drafts(recordings))


def _title(written: WrittenResponses, name: str, cluster: Cluster) -> str:
    responses = sum(group.n for group in written.groups)
    return (
        f"The same {responses:,} responses on {len(written.instances)} emulated instances of {name}, each on"
        f" {cluster.gpus_per_instance} {cluster.gpu}: virtual time, which no load of this machine changes"
    )


def _about(config: Config, cluster: Cluster, by: float) -> list[str]:
    """Return sentences on the constants, and where they come from."""
    measured = MEASURED.get(cluster.preset)
    source = "the paper (docs/results/reproduction.md)"
    if measured is not None:
        source = f"published measurements of {measured.engine} (docs/results/predictions.md)"
    about = [
        f"Costs: {cluster.preset} of seer_sim, sizes and peaks published, what is reached of the peaks fitted"
        f" to {source}.",
        f"An instance's KV stands for the {cluster.kv_capacity_tokens:,} tokens of that hardware, so a token"
        f" of context weighs {by:,.0f} times as much.",
    ]
    if any(GROUPED in arm.plugins for arm in arms_of(config)):
        about.append(
            f"A step that drafts takes {MEASURED_DRAFTING['step_s'] * 1e3:g} ms more, and"
            f" {MEASURED_DRAFTING['request_s'] * 1e3:g} ms for each request, as on an H100"
            " (docs/results/gpu.md); drafts are accepted as in a replay of these texts."
        )
    about.append("Its bound is the least time that any schedule takes (docs/explain/bound.md).")
    return about
