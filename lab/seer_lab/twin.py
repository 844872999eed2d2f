"""A twin: simulated instances that cost what measured ones do, and roll out what these did.

What is measured goes in: step times (a profile), lengths and what became of drafts (a recorded run).
What comes out is predicted: when chunks run, wait, move and are preempted, so how long a rollout takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from pathlib import Path
from typing import Any

import msgspec
from seer_cli.output import TRACE
from seer_cli.profiles import Profile
from seer_host.config_files import Config
from seer_host.json_files import JsonFormat
from seer_sim.acceptance import POSITIONS
from seer_sim.drafts import Drafts
from seer_trace.records import read_trace

from seer_core.errors import ConfigError, PromptError, quote
from seer_core.model import ChunkRecord, Completion, InstanceInfo
from seer_core.model.events import GroupsSubmitted, InstanceReported, InstanceStarted
from seer_lab.fit import Fit, fit
from seer_lab.recorded import read_recorded
from seer_lab.texts import RecordedText
from seer_lab.workloads import Workload

__all__ = ["Twin", "make_twin", "recorded_drafts"]

LEAST_VOCABULARY = 511

LEAST_STEPS = 500
"""Steps of requests with like numbers of finished siblings that make a row of their own."""

POOL_BYTES = 10**15
"""Room of the simulated KV pool: more than any."""


_COMPLETIONS = JsonFormat[Completion](
    Completion, "not a completion", "name the directory of a `seer run`", PromptError
)


class Twin(Workload, frozen=True):
    """A workload on simulated instances fitted to measured ones; ``base_dir`` is that of the config."""

    base_dir: Path = Path()

    def config(self, plugins: Sequence[str], overrides: Sequence[str] = (), seed: int = 0) -> Config:
        """Return the configuration of a run with these plug-ins; paths in it are the original's."""
        config = super().config(plugins, overrides, seed)
        return msgspec.structs.replace(config, base_dir=self.base_dir)


def make_twin(config: Config, profile: Profile, run: Path) -> tuple[Twin, Fit]:
    """Return the twin of ``config``'s engines, which ``run``'s lengths keep busy, and the fitted costs.

    Raises:
        ConfigError: the profile is another engine's, or says too little.
        InputError, PromptError: the run cannot be read, or has not finished.
    """
    name = " and ".join(config.seer.engines)
    if profile.engine and profile.engine != name:
        raise ConfigError(
            f"the profile is of engine {quote(profile.engine)}, the config says {quote(name)};"
            " measure again: `seer profile CONFIG`"
        )
    fitted = fit(profile)
    info = profile.info
    assert info is not None, "fit has refused it"
    recorded = read_recorded(run)
    groups = recorded.iterations[0]
    is_run = (run / TRACE).exists()
    if is_run:
        _check_run(info, run)
    engine = config.engine.get(name, {})
    sim: dict[str, Any] = {
        "instances": profile.instances,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "block_tokens": info.block_tokens,
        "max_running": info.max_running,
        "max_model_tokens": info.max_model_tokens,
        "chunk_s": info.chunk_s,
        "chunk_s_per_token": info.chunk_s_per_token,
        "cost": msgspec.structs.asdict(fitted.cost),
    }
    if engine.get("max_batched_tokens"):
        sim["max_batched_tokens"] = engine["max_batched_tokens"]
    drafts = recorded_drafts(run, selective=name != "sim") if is_run else None
    text = _text(run) if is_run else None
    if text is not None:
        sim["vocab_size"] = max(LEAST_VOCABULARY, *map(max, text.responses.values())) + 1
    worth = {} if drafts is None else msgspec.to_builtins(drafts)
    sim["acceptance"] = worth | {"step_s": fitted.drafts_s}
    tables = {
        "seer": {**msgspec.to_builtins(config.seer), "engine": "sim", **_shares_kv(config, info)},
        "plugin": config.plugin,
        "kv_pool": {"sim_pool": _pool(config, info)},
        "engine": {"sim": sim},
    }
    return Twin(run.name, [groups], tables, text, recorded.notes, config.base_dir), fitted


def _text(run: Path) -> RecordedText:
    """Return what a run's responses say."""
    completions = _completions(run)
    return RecordedText(
        {},
        {each.request_id: tuple(each.token_ids) for each in completions},
        frozenset(each.request_id for each in completions if each.finish_reason != "stop"),
    )


def _check_run(info: InstanceInfo, run: Path) -> None:
    """Refuse a run on instances that hold more or less than those of the profile, or that was resumed."""
    for record in read_trace(run / TRACE):
        if isinstance(record.event, GroupsSubmitted) and any(
            each.tokens for group in record.event.groups for each in group.resumed
        ):
            raise PromptError(
                f"{run} was resumed, so its times are those of its last process alone; name a run that one"
                " process made"
            )
        if isinstance(record.event, InstanceStarted):
            for limit in ("kv_capacity_tokens", "block_tokens", "max_running", "max_model_tokens"):
                mine, theirs = getattr(info, limit), getattr(record.event.info, limit)
                if mine != theirs:
                    raise ConfigError(
                        f"the profile is of an instance with {limit} = {mine}, {run} ran on one with"
                        f" {theirs}; measure both with one config"
                    )


def _shares_kv(config: Config, info: InstanceInfo) -> dict[str, str]:
    """Return the pool of the twin: a simulated one if profile and config have one."""
    if config.seer.engines == ("sim",) or config.seer.kv_pool == "none":
        return {"kv_pool": config.seer.kv_pool}
    return {"kv_pool": "none" if info.fetch_s_per_token is None else "sim_pool"}


def _pool(config: Config, info: InstanceInfo) -> dict[str, Any]:
    """Return the settings of a simulated pool that is as quick as the measured one."""
    if info.fetch_s_per_token is None or config.seer.engines == ("sim",):
        return dict(config.kv_pool.get("sim_pool", {}))
    rate = max(1, info.kv_bytes_per_token) / max(info.fetch_s_per_token, 1e-12)
    return {"dram_bytes": POOL_BYTES, "bandwidth_bytes_per_s": rate, "latency_s": 0.0}


def recorded_drafts(run: Path, *, selective: bool) -> Drafts | None:
    """Return what drafting was worth in a run, by position in the draft; None if none drafted.

    ``selective``: the drafter chose among the drafts.  Then rates are shares of all steps, and so is what
    was verified; a row speaks for so many finished siblings, or for responses of which so much is written,
    whichever separates the rates of acceptance better.  Otherwise, as on simulated engines, all requests
    of a class had drafts of one length; rates are shares of drafts, the policy sets their lengths, and a row
    speaks for so many finished siblings.  ``request_s`` is the time spent on drafts, per request and step.

    Raises:
        PromptError: the directory holds no completions.
    """
    return drafts_of(_completions(run), _drafting_s(run), selective=selective)


def drafts_of(completions: Sequence[Completion], drafting_s: float, *, selective: bool) -> Drafts | None:
    """Return the same of responses for which ``drafting_s`` were spent on drafts."""
    found = list(_rows(completions))
    if not any(row.drafted for _, _, row in found):
        return None
    siblings, rows = _merged((finished, row) for finished, _, row in found)
    request_s = drafting_s / max(1, sum(row.steps for row in rows))
    if not selective:
        return Drafts(siblings=siblings, rates=tuple(row.rates() for row in rows), request_s=request_s)
    tokens = None
    of_tokens, by_tokens = _merged((1 << written.bit_length() >> 1, row) for _, written, row in found)
    if _variance_between(by_tokens) > _variance_between(rows):
        tokens, rows = of_tokens, by_tokens
    return Drafts(
        siblings=siblings,
        tokens=tokens,
        rates=tuple(row.shares(row.accepted) for row in rows),
        verified=tuple(row.shares(row.drafted) for row in rows),
        request_s=request_s,
    )


def _merged(found: Iterable[tuple[int, _Row]]) -> tuple[tuple[int, ...], list[_Row]]:
    """Add up the steps of equal numbers, and of further ones while they are few; return the first of each."""
    rows: dict[int, _Row] = {}
    for number, row in found:
        rows.setdefault(number, _Row()).add(row)
    firsts, merged = [0], [_Row()]
    for number, row in sorted(rows.items()):
        if merged[-1].steps >= LEAST_STEPS:
            firsts.append(number)
            merged.append(_Row())
        merged[-1].add(row)
    if len(merged) > 1 and merged[-1].steps < LEAST_STEPS:
        rest = merged.pop()
        firsts.pop()
        merged[-1].add(rest)
    return tuple(firsts), merged


def _variance_between(rows: Sequence[_Row]) -> float:
    """Return how much rows differ: the variance of their steps' accepted drafts that is between them."""
    steps = sum(row.steps for row in rows)
    mean = sum(sum(row.accepted) for row in rows) / max(1, steps)
    return sum(row.steps * (sum(row.accepted) / max(1, row.steps) - mean) ** 2 for row in rows)


class _Row:
    """Steps that decoded, and how many of them verified and accepted position 1, 2, ..."""

    def __init__(self, steps: int = 0, drafted: Sequence[int] = (), accepted: Sequence[int] = ()) -> None:
        self.steps = steps
        self.drafted = list(drafted)
        self.accepted = list(accepted)

    def add(self, other: _Row) -> None:
        self.steps += other.steps
        self.drafted = [a + b for a, b in zip_longest(self.drafted, other.drafted, fillvalue=0)]
        self.accepted = [a + b for a, b in zip_longest(self.accepted, other.accepted, fillvalue=0)]

    def shares(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return counts as shares of all steps."""
        return tuple(min(1.0, count / max(1, self.steps)) for count in counts[:POSITIONS])

    def rates(self) -> tuple[float, ...]:
        """Return the shares of drafts that were accepted; where by chance one rises, the one before it."""
        pairs = zip(self.accepted[:POSITIONS], self.drafted, strict=False)
        return tuple(accumulate((accepted / drafted for accepted, drafted in pairs), min))


def _completions(run: Path) -> list[Completion]:
    path = run / "completions.jsonl"
    completions = []
    for number, completion in _COMPLETIONS.lines(path):
        if not all(map(_counts, completion.chunks)):
            raise PromptError(
                f"{path}:{number}: a chunk accepted more drafts than it made, or more at a later position;"
                " name the directory of a `seer run`"
            )
        completions.append(completion)
    return completions


def _counts(chunk: ChunkRecord) -> bool:
    """Say whether a chunk's drafts can be: fewer at each position, accepted as many as made at most."""
    made, taken = chunk.drafted_at, chunk.accepted_at
    falls = all(a >= b for counts in (made, taken) for a, b in pairwise([*counts, 0]))
    return falls and all(a >= b for a, b in zip_longest(made, taken, fillvalue=0))


def _rows(completions: Sequence[Completion]) -> Iterator[tuple[int, int, _Row]]:
    """Yield each chunk's steps, after two things about it.

    They are how many of its group's responses were over when it was sent, and how many tokens of its own were
    written in its middle.
    """
    finishes: dict[str, list[float]] = {}
    for completion in sorted(completions, key=lambda each: each.finished_s):
        finishes.setdefault(completion.group_id, []).append(completion.finished_s)
    for completion in completions:
        written = 0
        for chunk in completion.chunks:
            siblings = bisect_left(finishes[completion.group_id], chunk.dispatched_s)
            # The first token of a chunk comes of computing its context, without drafts.
            steps = max(0, chunk.steps - 1)
            rejected = [0] * (len(chunk.drafted_at) - len(chunk.accepted_at))  # at positions never accepted
            middle = written + chunk.tokens - chunk.tokens // 2
            yield siblings, middle, _Row(steps, chunk.drafted_at, [*chunk.accepted_at, *rejected])
            written += chunk.tokens


def _drafting_s(run: Path) -> float:
    """Return the seconds that all instances spent on drafts."""
    spent: dict[str, float] = {}
    for record in read_trace(run / TRACE):
        if isinstance(record.event, InstanceReported):
            spent[record.event.instance_id] = record.event.drafting_s
    return sum(spent.values())
