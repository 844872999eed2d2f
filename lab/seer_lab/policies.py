"""Policies to compare: named stacks of plug-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from seer_host.tables import nearest

from seer_core.errors import ConfigError, quote
from seer_core.scheduling.scheduler import CORE

__all__ = ["POLICIES", "RECOMMENDED", "PolicySet", "parse_policy"]

RECOMMENDED = "posterior"
"""The policy whose order of requests we recommend; ``posterior+sd`` has it with drafts."""


class PolicySet(msgspec.Struct, frozen=True):
    """A name, the plug-ins enabled, and what else sets it apart.

    ``has_lengths``: it receives each response's true length, which no real run has.  ``has_history``: it
    receives lengths of earlier responses to the same prompts (``last_epoch``).  ``shares_kv``:
    instances share a KV pool.  ``over_issue``: so many times the iteration's groups are started, and the
    rest is put off once as many as the iteration has are over; then the rollout is not strictly
    synchronous.  ``overrides`` are KEY=VALUE of a config that count for this policy alone.
    """

    name: str
    plugins: tuple[str, ...]
    about: str = ""
    has_lengths: bool = False
    has_history: bool = False
    shares_kv: bool = True
    over_issue: int = 1
    overrides: tuple[str, ...] = ()


POLICIES: Mapping[str, PolicySet] = {
    policy.name: policy
    for policy in (
        PolicySet("verl", ("group_round_robin",), "whole groups in turn, as veRL", shares_kv=False),
        PolicySet(
            "sticky",
            ("sticky_sessions",),
            "whole turns, each trajectory on one instance, as agents in verl and SkyRL",
            shares_kv=False,
        ),
        PolicySet("divided", ("divided_rollout",), "chunks, first come first served"),
        PolicySet("no-context", ("divided_rollout",), "the same as divided: it learns nothing"),
        PolicySet(
            "context", ("divided_rollout", "context_sched"), "chunks, probes first, then the longest groups"
        ),
        PolicySet(
            "seer",
            ("divided_rollout", "context_sched", "grouped_spec"),
            "the same as context, and drafts from the group",
        ),
        PolicySet(
            "oracle",
            ("divided_rollout", "oracle_longest_first"),
            "chunks, longest first by true lengths",
            has_lengths=True,
        ),
        PolicySet(
            "streamrl-oracle",
            ("streamrl_oracle",),
            "whole groups in buckets by true length",
            has_lengths=True,
            shares_kv=False,
        ),
        PolicySet(
            "streamrl-oracle+sd",
            ("streamrl_oracle", "vanilla_sd"),
            "whole groups in buckets by true length, and drafts without group context",
            has_lengths=True,
            shares_kv=False,
        ),
        PolicySet(
            "partial",
            ("group_round_robin",),
            "veRL with twice the groups, the rest put off (not strictly synchronous)",
            shares_kv=False,
            over_issue=2,
        ),
        PolicySet(
            "verl+sd",
            ("group_round_robin", "vanilla_sd"),
            "veRL with drafts, without group context",
            shares_kv=False,
        ),
        PolicySet(
            "grouped-sd-on-verl",
            ("group_round_robin", "grouped_spec"),
            "veRL with drafts from the group",
            shares_kv=False,
        ),
        PolicySet(
            "kv-aware-sticky",
            ("kv_aware_sticky",),
            "whole responses where their prompt is, else least KV",
            shares_kv=False,
        ),
        PolicySet(
            "cache-ttl",
            ("cache_ttl",),
            "agents' KV kept while tools work, for a time, after CacheTTL",
            shares_kv=False,
        ),
        PolicySet(
            "program-pause",
            ("program_pause",),
            "agents paused as a whole while KV is short, after ThunderAgent",
            shares_kv=False,
        ),
        PolicySet(
            "migrate-in-tools",
            ("migrate_in_tools", "context_sched"),
            "agents move between turns alone, after Heddle",
        ),
        PolicySet("posterior", ("divided_rollout", "length_posterior"), "chunks, longest plausible first"),
        PolicySet(
            "posterior+sd",
            ("divided_rollout", "length_posterior", "grouped_spec"),
            "the same as posterior, and drafts from the group",
        ),
        PolicySet(
            "history",
            ("divided_rollout", "history"),
            "chunks, longest first by the last epoch's lengths",
            has_history=True,
        ),
        PolicySet(
            "tail-isolation",
            ("divided_rollout", "tail_isolation"),
            "chunks, the tail apart by true lengths",
            has_lengths=True,
            overrides=("seer.slots.placer=tail_isolation",),
        ),
        PolicySet(
            "tail-isolation-history",
            ("divided_rollout", "tail_isolation"),
            "chunks, the tail apart by the last epoch's lengths",
            has_history=True,
            overrides=("seer.slots.placer=tail_isolation", "plugin.tail_isolation.known=groups"),
        ),
    )
}
"""By name."""


def parse_policy(text: str, *, has_lengths: bool = False) -> PolicySet:
    """Return the policy of that name, or the one that ``NAME=PLUGIN,SLOT:PLUGIN`` describes.

    A plug-in fills several slots where each names it: ``mine=divided_rollout,placer:two,splitter:two``.
    What a user's plug-ins change of their arguments is an error, as with ``--debug``.

    Raises:
        ConfigError: no policy has that name, or no plug-in is named.
    """
    name, equals, plugins = text.partition("=")
    if not equals:
        if name not in POLICIES:
            raise ConfigError(
                f"--policy {quote(text)}: no policy is called {quote(name)}{nearest(name, POLICIES)};"
                " for one of your own give its plug-ins, such as mine=divided_rollout,my_plugin"
            )
        return POLICIES[name]
    words = [word.strip() for word in plugins.split(",") if word.strip()]
    slots = _slots_of(text, name, words)
    named = dict.fromkeys(word.rpartition(":")[2] for word in words)
    overrides = ("seer.debug=true", *(f"seer.slots.{slot}={plugin}" for slot, plugin in slots.items()))
    enabled = tuple(plugin for plugin in named if plugin != CORE)
    return PolicySet(name, enabled, has_lengths=has_lengths, overrides=overrides)


def _slots_of(text: str, name: str, words: Sequence[str]) -> dict[str, str]:
    """Return the plug-in of each slot that a policy's words fill; refuse words that say a thing twice."""
    slots: dict[str, str] = {}
    alone: list[str] = []
    for word in words:
        slot, colon, plugin = word.rpartition(":")
        if not name or not plugin or (colon and not slot):
            raise ConfigError(
                f"--policy {quote(text)}: give a name and plug-ins, each once: NAME=PLUGIN,SLOT:PLUGIN"
            )
        if slot in slots or (not colon and plugin in alone):
            raise ConfigError(f"--policy {quote(text)}: name {quote(slot or plugin)} once")
        if colon:
            slots[slot] = plugin
        else:
            alone.append(plugin)
    for slot, plugin in slots.items():
        if plugin in alone:
            raise ConfigError(
                f"--policy {quote(text)}: name plug-ins each once; {quote(f'{slot}:{plugin}')} already names"
                f" {quote(plugin)}, so leave the other out"
            )
    return slots
