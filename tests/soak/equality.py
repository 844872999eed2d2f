"""Equality: whole = divided = migrated = killed = drafted, token for token.

Rolls the tiny reasoner's prompts out on two real instances in these ways:

  whole     each response in one piece
  divided   in chunks of ``CHUNK_TOKENS``, placed by free KV
  migrated  divided, every chunk on another instance than the one before
  killed    divided, and an instance gets SIGKILL in mid-rollout, with a chunk on its way there
  drafted   divided, with grouped speculative decoding
  ngram     divided, with vLLM's n-gram drafts
  suffix    divided, with vLLM's suffix drafts

and compares every response with the first way's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import msgspec
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime

from bench.harness import EXAMPLE, prompts
from bench.placers import AlwaysMigrate
from seer_core.model import Completion, PromptGroup, Sampling
from seer_core.model.events import ChunkFinished
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import Slot
from tests.support.killer import Killer, kill_worker_of

CHUNK_TOKENS = 64
WAYS = ("whole", "divided", "migrated", "killed", "drafted", "ngram", "suffix")
DRAFTERS = {"drafted": "grouped_spec", "ngram": "vllm_ngram", "suffix": "vllm_suffix"}
GREEDY, PLAIN = "greedy", "temperature 1"
CONTROLS = {
    "min_p": Sampling(min_p=0.3),
    "repetition_penalty": Sampling(repetition_penalty=1.3),
    "presence_penalty": Sampling(presence_penalty=1.5),
    "frequency_penalty": Sampling(frequency_penalty=0.5),
    "logit_bias": Sampling(logit_bias=dict.fromkeys(range(20, 30), 4.0)),
    "allowed_token_ids": Sampling(allowed_token_ids=tuple(range(48))),
    "bad_words": Sampling(bad_words=tuple((token,) for token in range(30, 40))),
    "min_tokens": Sampling(min_tokens=200),
    "stop": Sampling(stop=(" be", "so the", " careful"), min_tokens=280),
    "stop_token_ids": Sampling(stop_token_ids=tuple(range(20, 30)), min_tokens=280),
    "ignore_eos": Sampling(ignore_eos=True),
}
"""A sampling with each control, strong enough to change what the example's model writes."""
ALL_CONTROLS = Sampling(
    0.9,
    top_p=0.98,
    top_k=100,
    min_p=0.005,
    repetition_penalty=1.01,
    presence_penalty=0.05,
    frequency_penalty=0.005,
    logit_bias={20: 0.5},
    bad_words=((20, 21), (40, 3, 5)),
    min_tokens=100,
    stop=("9 9", " be careful"),
    stop_token_ids=(90,),
)
SAMPLINGS = {GREEDY: Sampling(0.0), PLAIN: Sampling(), "all controls": ALL_CONTROLS}
KILL_AFTER = 0.4
"""So many chunks for each response have finished when the kill comes."""


async def roll_out_all_ways(
    ways: Sequence[str],
    groups: int | None,
    greedy_n: int,
    overrides: Sequence[str] = (),
    samplings: Mapping[str, Sampling] = SAMPLINGS,
    most_tokens: int = 1 << 30,
) -> list[dict[str, object]]:
    """Roll out in all ways with each sampling; return a row for each, compared with the first way's."""
    chunk = f"plugin.divided_rollout.chunk_tokens={CHUNK_TOKENS}"
    config = load_config(EXAMPLE / "demo.toml", [chunk, *overrides])
    rows = []
    expected: dict[str, dict[str, Completion]] = {}
    async with Runtime.from_config(config.with_plugins(())) as runtime:
        chosen = {
            name: [
                msgspec.structs.replace(
                    group,
                    n=greedy_n if name == GREEDY else group.n,
                    max_tokens=min(group.max_tokens, most_tokens),
                    sampling=sampling,
                )
                for group in runtime.groups(prompts(groups), iteration=0)
            ]
            for name, sampling in samplings.items()
        }
        for way in ways:
            divided = () if way == "whole" else ("divided_rollout", "context_sched")
            drafter = (DRAFTERS[way],) if way in DRAFTERS else ()
            used = None
            for name in samplings:
                strategies = fill_slots(config.with_plugins((*divided, *drafter)))
                if used is not None:  # engines would start anew for another one
                    strategies = attrs.evolve(strategies, drafter=used)
                used = strategies.drafter
                if way == "migrated":
                    placer = Slot("placer", "always_migrate", AlwaysMigrate())
                    policies = attrs.evolve(strategies.policies, placer=placer)
                    strategies = attrs.evolve(strategies, policies=policies)
                found, lost = await roll_out(runtime, strategies, chosen[name], kill=way == "killed")
                row = compare(way, name, expected.setdefault(name, found), found)
                rows.append(row | {"instances_lost": lost})
    return rows


async def roll_out(
    runtime: Runtime, strategies: Strategies, groups: list[PromptGroup], *, kill: bool
) -> tuple[dict[str, Completion], int]:
    """Return the completions by request, and how many instances were lost."""
    if kill:
        total = sum(group.n for group in groups)
        killer = Killer(kill_worker_of(runtime), after=int(total * KILL_AFTER), of=ChunkFinished)
        strategies = strategies.with_observer(killer)
    await runtime.use(strategies)
    await runtime.reset_caches()
    result = await runtime.rollout(groups).wait()
    return {each.request_id: each for each in result.completions}, result.summary.instances_lost


def compare(
    way: str, sampling: str, expected: dict[str, Completion], found: dict[str, Completion]
) -> dict[str, object]:
    """Compare two rollouts token by token."""
    pairs = [(expected[name], found[name]) for name in expected]
    differing = [(a, b) for a, b in pairs if a.token_ids != b.token_ids]
    same = [(a, b) for a, b in pairs if a.token_ids == b.token_ids]
    return {
        "way": way,
        "sampling": sampling,
        "responses": len(found),
        "tokens": sum(len(completion.token_ids) for completion in found.values()),
        "chunks": sum(len(completion.chunks) for completion in found.values()),
        "migrations": sum(
            here.instance != there.instance
            for completion in found.values()
            for here, there in zip(completion.chunks, completion.chunks[1:], strict=False)
        ),
        "pool_tokens": sum(each.pool_tokens for one in found.values() for each in one.chunks),
        "drafted_tokens": sum(sum(each.drafted_at) for one in found.values() for each in one.chunks),
        "accepted_tokens": sum(sum(each.accepted_at) for one in found.values() for each in one.chunks),
        "differing_responses": len(differing),
        "first_differences": [
            next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y)
            for a, b in differing
        ],
        "largest_logprob_difference": max(
            (abs(x - y) for a, b in same for x, y in zip(a.logprobs, b.logprobs, strict=True)), default=0.0
        ),
    }
