"""``simulate``: one policy on one iteration of a workload, on simulated engines, or on paced ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from statistics import fmean
from typing import Protocol, runtime_checkable

import attrs
import msgspec
from seer_cli.garbage_collection import no_collections
from seer_host.config_files import Config
from seer_host.tables import structure
from seer_session.assembly import assemble
from seer_session.environment import Environment
from seer_session.results import Summary, Tally
from seer_session.runtime import Runtime
from seer_sim.account import StepAccount
from seer_sim.engine import SimEngine
from seer_sim.plugin import Settings, make_fleet

from seer_core.model import Completion, PromptGroup
from seer_core.plugins.slots import Assembly
from seer_core.ports.engine import EngineFleet
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import CORE
from seer_lab.lengths import GroupLengths, TrueLengths, last_epoch
from seer_lab.paced import ENGINE, SCHEDULERS, paced, paced_fleet
from seer_lab.policies import PolicySet
from seer_lab.shares import Shares, kv_by_tenths, shares_of
from seer_lab.texts import RecordedText
from seer_lab.timeline import InstanceTimeline, Timeline
from seer_lab.tools import RecordedTools, TurnFigures, turn_figures, turn_lengths
from seer_lab.workloads import Workload

__all__ = ["ENGINES", "SimulatedIteration", "simulate"]

ENGINES = ("sim", *SCHEDULERS)

PROMPT_TOKEN = 5
"""What all prompts consist of: simulated engines count tokens and read none.

For paced ones, whose prefix cache is real, a group's number stands before it.
"""

MARKS = 30_000
"""Numbers of groups whose prompts differ."""

LATE_SHARE = 0.05
"""Part of the requests, last to start, whose start counts as late (arXiv 2511.14617)."""


class SimulatedIteration(msgspec.Struct, frozen=True):
    """The figures of one iteration under one policy; times in virtual seconds since its start.

    ``idle_share`` is the part of all instances' time in which an instance had nothing to do, ``kv_usage``
    the mean part of their KV in use.  ``deferred_requests`` were started and put off, with
    ``deferred_tokens`` generated; the summary does not count them.  ``wall_s`` is real time.
    On the ``engine`` "paced" times are those of vLLM's own scheduler on an emulated accelerator, and on
    "paced-sglang" of SGLang's.  ``shares`` and ``kv_by_tenths``, of ten tenths of the time, are there if they
    were asked for, on simulated engines.  ``turns`` are there where tools answered.
    """

    workload: str
    policy: PolicySet
    seed: int
    summary: Summary
    idle_share: float
    kv_usage: float
    deferred_requests: int
    deferred_tokens: int
    finish_times_s: list[float]
    instances: list[InstanceTimeline]
    late_start_share: float
    draft_acceptance_length: float
    wall_s: float
    engine: str = "sim"
    shares: Shares | None = None
    kv_by_tenths: list[float] = []
    turns: TurnFigures | None = None

    @property
    def throughput_tokens_per_s(self) -> float:
        """Tokens generated per second, those of put off responses included: they go on from there."""
        written = self.summary.tokens - self.summary.environment_tokens
        return (written + self.deferred_tokens) / self.summary.total_time_s

    @property
    def trajectories_per_hour(self) -> float:
        """Responses that were over per hour."""
        return self.summary.requests / self.summary.total_time_s * 3600


@runtime_checkable
class _Timed(Protocol):
    """An engine that says when the first step of each request and of each turn there began."""

    @property
    def first_steps_s(self) -> dict[str, float]: ...

    @property
    def turn_steps_s(self) -> dict[tuple[str, int], float]: ...


def simulate(
    workload: Workload,
    policy: PolicySet,
    seed: int = 0,
    overrides: Sequence[str] = (),
    observers: Sequence[Observer] = (),
    engine: str = "sim",
    *,
    shares: bool = False,
) -> SimulatedIteration:
    """Roll out one iteration of ``workload`` under ``policy``; equal arguments give equal results.

    ``seed`` chooses the lengths, ``overrides`` are KEY=VALUE of a config, ``observers`` see every event,
    ``engine`` is one of ``ENGINES``.  With ``shares`` simulated engines keep account of their time.  Call it
    where no event loop runs.

    Raises:
        ConfigError, PluginError, PromptError, StalledError: as a run with such a config.
    """
    config = workload.config(policy.plugins, (*policy.overrides, *overrides), seed)
    if not policy.shares_kv:
        config = msgspec.structs.replace(config, seer=msgspec.structs.replace(config.seer, kv_pool="none"))
    if engine in SCHEDULERS:
        config = paced(config, SCHEDULERS[engine])
    groups = list(workload.groups(seed))
    wanted = len(groups)
    groups += _later_groups(workload, policy, seed)
    timeline = Timeline()
    assembly = assemble(config).with_observer(timeline, *observers, owner=CORE)
    assembly = attrs.evolve(assembly, fleet=_fleet(config, groups, workload.text))
    prompts = [
        PromptGroup(
            id=group.id,
            prompt_token_ids=_prompt_of(group, number, engine, workload.text),
            n=len(group.output_tokens),
            max_tokens=group.max_tokens,
            seed=number,
            known_lengths=_known_lengths(group, policy, seed),
        )
        for number, group in enumerate(groups)
    ]
    accounts = _keep_accounts(assembly.fleet) if shares else []
    tools = RecordedTools(groups) if workload.has_turns else None
    began_s = time.monotonic()
    with nullcontext() if engine in SCHEDULERS else no_collections():
        kept, put_off, started_s = asyncio.run(_roll_out(config, assembly, prompts, wanted, tools))
    tally = Tally(started_s)
    for completion in kept:
        tally.add(completion)
    summary = tally.summary()
    instances = timeline.instances()
    return SimulatedIteration(
        workload=workload.name,
        policy=policy,
        seed=seed,
        summary=summary,
        idle_share=max(
            0.0, 1 - sum(each.busy_s for each in instances) / (summary.total_time_s * len(instances))
        ),
        kv_usage=fmean(_mean_kv_usage(each, started_s, summary.total_time_s) for each in instances),
        deferred_requests=len(put_off),
        deferred_tokens=sum(map(_written_tokens, put_off)),
        finish_times_s=sorted(completion.finished_s - started_s for completion in kept),
        instances=instances,
        late_start_share=_late_start_s(assembly.fleet, started_s) / summary.total_time_s,
        draft_acceptance_length=_draft_acceptance_length(kept),
        wall_s=time.monotonic() - began_s,
        engine=engine,
        shares=shares_of(accounts, started_s, summary.total_time_s) if accounts else None,
        kv_by_tenths=kv_by_tenths(accounts, started_s, summary.total_time_s) if accounts else [],
        turns=_turn_figures(kept, groups, assembly.fleet) if tools is not None else None,
    )


def _written_tokens(completion: Completion) -> int:
    """Return how many of a response's tokens the model wrote."""
    return len(completion.token_ids) - sum(turn.answer_tokens for turn in completion.turns)


def _turn_figures(
    kept: Sequence[Completion], groups: Sequence[GroupLengths], fleet: EngineFleet
) -> TurnFigures:
    steps = [engine.turn_steps_s for engine in fleet.engines if isinstance(engine, _Timed)]
    return turn_figures(kept, {group.id: group.prompt_tokens for group in groups}, steps)


def _known_lengths(group: GroupLengths, policy: PolicySet, seed: int) -> tuple[int, ...] | None:
    """Return the lengths that a policy gets with a prompt."""
    if policy.has_history:
        return last_epoch(group, seed)
    return group.output_tokens if policy.has_lengths else None


def _keep_accounts(fleet: EngineFleet) -> list[list[StepAccount]]:
    """Have each simulated instance keep account of its steps, and return where."""
    accounts: list[list[StepAccount]] = []
    for engine in fleet.engines:
        if isinstance(engine, SimEngine):
            engine.account = []
            accounts.append(engine.account)
    return accounts


def _later_groups(workload: Workload, policy: PolicySet, seed: int) -> list[GroupLengths]:
    """Return the groups of following iterations that a policy starts with this one's."""
    return [
        msgspec.structs.replace(group, id=f"{group.id}+{later}")
        for later in range(1, policy.over_issue)
        for group in workload.groups(seed, later)
    ]


def _fleet(config: Config, groups: Sequence[GroupLengths], text: RecordedText | None) -> EngineFleet:
    """Return engines that have each response's length; simulated ones write no text."""
    lengths = {
        f"{group.id}/{index}": tokens for group in groups for index, tokens in enumerate(group.output_tokens)
    }
    true = TrueLengths(by_request=lengths, by_turn=turn_lengths(groups))
    if config.seer.engine == ENGINE:
        return paced_fleet(config, true, text)
    settings = structure(config.engine.get("sim", {}), Settings, "engine.sim")
    settings = msgspec.structs.replace(settings, lengths=true)
    return attrs.evolve(make_fleet(settings), tokenizer=None)


@cache
def _prompt_token_ids(tokens: int) -> tuple[int, ...]:
    """Return a prompt that all groups with so long a one share."""
    return (PROMPT_TOKEN,) * tokens


def _prompt_of(group: GroupLengths, number: int, engine: str, text: RecordedText | None) -> tuple[int, ...]:
    """Return a group's prompt; on a paced engine it is its own, up to some ten thousand groups."""
    if text is not None and group.id in text.prompts:
        return text.prompts[group.id]
    prompt = _prompt_token_ids(group.prompt_tokens)
    return (PROMPT_TOKEN + number % MARKS, *prompt[1:]) if engine in SCHEDULERS else prompt


async def _roll_out(
    config: Config,
    assembly: Assembly,
    groups: Sequence[PromptGroup],
    wanted: int,
    environment: Environment | None,
) -> tuple[list[Completion], list[Completion], float]:
    """Return the completions of the first ``wanted`` groups to end, those put off, and when it began."""
    left = {group.id: group.n for group in groups}
    whole: set[str] = set()
    completions: list[Completion] = []
    async with Runtime(assembly, config.seer, config.rollout) as runtime:
        rollout = runtime.rollout(groups, environment=environment)
        async for completion in rollout:
            completions.append(completion)
            left[completion.group_id] -= 1
            if not left[completion.group_id]:
                whole.add(completion.group_id)
            if len(whole) == wanted:
                break
        if len(whole) < len(groups):
            completions = (await rollout.abort()).completions
    kept = [completion for completion in completions if completion.group_id in whole]
    put_off = [completion for completion in completions if completion.group_id not in whole]
    return kept, put_off, rollout.started_s


def _late_start_s(fleet: EngineFleet, started_s: float) -> float:
    """Return when the requests that started last did, on average, after the rollout began."""
    first: dict[str, float] = {}
    for engine in fleet.engines:
        assert isinstance(engine, _Timed)
        for request_id, at_s in engine.first_steps_s.items():
            first[request_id] = min(at_s, first.get(request_id, at_s))
    starts = sorted(first.values())
    return fmean(starts[-max(1, round(len(starts) * LATE_SHARE)) :]) - started_s


def _draft_acceptance_length(completions: Sequence[Completion]) -> float:
    chunks = [chunk for completion in completions for chunk in completion.chunks if chunk.drafted_at]
    drafts = sum(chunk.drafted_at[0] for chunk in chunks)
    return 1 + sum(sum(chunk.accepted_at) for chunk in chunks) / drafts if drafts else 0.0


def _mean_kv_usage(instance: InstanceTimeline, started_s: float, total_s: float) -> float:
    end_s = started_s + total_s
    ends = [*(sample.at_s for sample in instance.samples[1:]), end_s]
    area = sum(
        sample.kv_usage * (min(until_s, end_s) - sample.at_s)
        for sample, until_s in zip(instance.samples, ends, strict=True)
        if sample.at_s < end_s
    )
    return area / total_s
