"""Simulation: a few groups, rolled out under plug-ins on the simulator, in milliseconds.

A test module that says ``pytest_plugins = ["seer_testing.simulate"]`` has the fixture ``simulation``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import msgspec
import pytest
from seer_host.config_files import Config, make_config
from seer_host.installation import how_to_install
from seer_session.assembly import assemble, installed
from seer_session.results import Summary
from seer_session.runtime import Runtime
from seer_trace.records import TraceRecord

from seer_core.errors import PluginError
from seer_core.model import Completion, PromptGroup
from seer_core.model.events import Command, Event, GroupsSubmitted
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import CORE, Scheduler

__all__ = ["SimulatedRollout", "Simulation", "make_simulation"]

SIMULATOR = "sim"
LENGTHS = ((40, 55, 38, 60), (210, 180, 260, 230), (15, 9, 22, 12), (120, 90, 400, 110))
"""Response lengths of the usual workload, in tokens: alike within a group, unlike between groups."""

PROMPT_TOKENS = 24
BLOCK_TOKENS = 16
RESPONSES_PER_INSTANCE = 2
"""So many of the longest responses fit into an instance's KV, so that memory is scarce."""


@attrs.frozen
class SimulatedRollout:
    """The results of a simulated rollout; times are virtual seconds, completions in order of their finish."""

    completions: list[Completion]
    """The responses, in the order of their finish."""
    summary: Summary
    """The rollout's statistics."""
    trace: list[TraceRecord]
    """Every event, with the commands that it led to."""

    @property
    def order(self) -> list[str]:
        """Ids of the requests, in the order of their finish."""
        return [completion.request_id for completion in self.completions]

    @property
    def tokens(self) -> dict[str, list[int]]:
        """Each request's tokens, by its id: what no policy may change."""
        return {completion.request_id: list(completion.token_ids) for completion in self.completions}

    @property
    def preemptions(self) -> int:
        """How often an engine ran out of KV and threw a running request out."""
        return self.summary.preemptions

    @property
    def makespan_s(self) -> float:
        """Time from the first dispatch to the last response."""
        return self.summary.total_time_s

    @property
    def tail_s(self) -> float:
        """Time spent on the last tenth of the responses alone."""
        return self.summary.tail_time_s


class _Recorder(Observer):
    """Observer that keeps the trace."""

    def __init__(self) -> None:
        self.trace: list[TraceRecord] = []

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        self.trace.append(TraceRecord(now, event, list(commands)))


class Simulation:
    """Runs plug-ins, found by their names as ``seer run`` finds them, on simulated engines."""

    def __init__(self, base_dir: Path) -> None:
        self.base_dir = base_dir

    def run(
        self,
        plugins: Sequence[str] = (),
        groups: Sequence[Sequence[int]] | Sequence[PromptGroup] = LENGTHS,
        *,
        instances: int = 2,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        slots: Mapping[str, str] | None = None,
        seed: int = 0,
        oracle: bool = False,
        **engine: Any,
    ) -> SimulatedRollout:
        """Roll out twice; check that nothing is lost and that both runs are equal, and return the first.

        ``groups`` are response lengths in tokens, or whole groups with ``known_lengths``; only an ``oracle``
        is shown them.  ``settings`` maps plug-ins to their tables, ``slots`` a slot to the plug-in that fills
        it; ``engine`` are further keys of ``[engine.sim]``.

        Raises:
            SeerError: what ``seer run --debug`` would end with; also where a plug-in changes what it was
                given, or an observer raises.
            AssertionError: a response is missing, there twice or of another length, or the runs differ.
        """
        if SIMULATOR not in installed():
            raise PluginError(
                f"the fixture 'simulation' needs the engine plug-in {SIMULATOR!r}, which is missing;"
                f" {how_to_install('', '`make setup`')}"
            )
        prompts = _prompt_groups(groups)
        longest = max(len(group.prompt_token_ids) + group.max_tokens for group in prompts)
        longest += -longest % BLOCK_TOKENS
        sizes = {
            "instances": instances,
            "block_tokens": BLOCK_TOKENS,
            "max_model_tokens": longest,
            "kv_capacity_tokens": RESPONSES_PER_INSTANCE * longest,
        }
        tables = {
            "seer": {
                "plugins": list(plugins),
                "engine": SIMULATOR,
                "kv_pool": "none",
                "seed": seed,
                "debug": True,
                "slots": dict(slots or {}),
            },
            "engine": {SIMULATOR: {**sizes, **engine}},
            "plugin": dict(settings or {}),
        }
        config = make_config(tables, base_dir=self.base_dir, origin="the simulation")
        result = asyncio.run(_roll_out(config, prompts, oracle))
        _check_complete(result, prompts)
        again = asyncio.run(_roll_out(config, prompts, oracle))
        for number, (one, other) in enumerate(zip(result.trace, again.trace, strict=False)):
            assert one == other, f"two equal runs differ from event {number} on: {one}, then {other}"
        assert result.tokens == again.tokens, "two equal runs gave different tokens"
        return result


class _Blindfold(Scheduler):
    """A scheduler from which the true lengths are withheld; only the engines get them."""

    def handle(self, event: Event, now: float) -> list[Command]:
        if isinstance(event, GroupsSubmitted):
            specs = (msgspec.structs.replace(spec, known_lengths=None) for spec in event.groups)
            event = GroupsSubmitted(tuple(specs))
        return super().handle(event, now)


async def _roll_out(config: Config, groups: Sequence[PromptGroup], oracle: bool) -> SimulatedRollout:
    assembly = assemble(config)
    recorder = _Recorder()
    runtime = Runtime(assembly.with_observer(recorder, owner=CORE), config.seer, config.rollout)
    if not oracle:
        policies = runtime._controller.strategies.policies
        runtime._controller.scheduler = _Blindfold(policies, config.seer.max_chunk_failures)
    async with runtime:
        result = await runtime.rollout(groups).wait()
    return SimulatedRollout(result.completions, result.summary, recorder.trace)


def _check_complete(result: SimulatedRollout, groups: Sequence[PromptGroup]) -> None:
    wanted = {f"{group.id}/{index}": group for group in groups for index in range(group.n)}
    times = Counter(result.order)
    assert set(times) == set(wanted), f"lost: {sorted(set(wanted) - set(times))}"
    assert max(times.values()) == 1, f"twice: {[request for request, n in times.items() if n > 1]}"
    for completion in result.completions:
        lengths = wanted[completion.request_id].known_lengths
        if lengths is not None and not completion.turns:
            due = min(lengths[completion.index], wanted[completion.request_id].max_tokens)
            assert len(completion.token_ids) == due, (
                f"{completion.request_id} has {len(completion.token_ids)} tokens instead of {due}"
            )


def _prompt_groups(groups: Sequence[Sequence[int]] | Sequence[PromptGroup]) -> list[PromptGroup]:
    whole = [group for group in groups if isinstance(group, PromptGroup)]
    if whole:
        return whole
    lengths = [tuple(group) for group in groups if not isinstance(group, PromptGroup)]
    longest = max(max(each) for each in lengths)
    return [
        PromptGroup(
            id=f"g{number}",
            prompt_token_ids=tuple(range(1, PROMPT_TOKENS + 1)),
            n=len(each),
            max_tokens=longest,
            seed=number,
            known_lengths=each,
        )
        for number, each in enumerate(lengths)
    ]


@pytest.fixture(name="simulation")
def make_simulation(tmp_path: Path) -> Simulation:
    """Return a simulation whose relative paths start in an empty directory."""
    return Simulation(tmp_path)
