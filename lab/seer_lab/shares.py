"""Where the time of simulated instances went, and how much of their KV was in use when."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from seer_sim.account import StepAccount

__all__ = ["TENTHS", "Shares", "kv_by_tenths", "shares_of"]

TENTHS = 10


class Shares(msgspec.Struct, frozen=True):
    """Shares of all instances' time, which add up to 1; ``StepAccount`` says what each is spent on."""

    floor: float
    attention: float
    requests: float
    prefill: float
    drafts: float
    idle: float


def shares_of(accounts: Sequence[Sequence[StepAccount]], started_s: float, total_s: float) -> Shares:
    """Return the shares of a run of ``total_s`` seconds from the steps of each of its instances."""
    ended_s = started_s + total_s
    all_s = total_s * len(accounts)
    floor = attention = requests = prefill = drafts = 0.0
    for steps in (each for account in accounts for each in account):
        within_s = min(steps.ended_s, ended_s) - max(steps.began_s, started_s)
        if within_s <= 0:
            continue
        weight = within_s / (steps.ended_s - steps.began_s) / all_s
        floor += weight * steps.floor_s
        attention += weight * steps.attention_s
        requests += weight * steps.requests_s
        prefill += weight * steps.prefill_s
        drafts += weight * steps.drafts_s
    idle = max(0.0, 1 - floor - attention - requests - prefill - drafts)
    return Shares(floor, attention, requests, prefill, drafts, idle)


def kv_by_tenths(accounts: Sequence[Sequence[StepAccount]], started_s: float, total_s: float) -> list[float]:
    """Return the mean part of all instances' KV in use in each tenth of a run.

    Between the first and the last of like steps, KV is taken to grow evenly.
    """
    tenth_s = total_s / TENTHS
    areas = [0.0] * TENTHS
    for steps in (each for account in accounts for each in account):
        began_s, ended_s = steps.began_s - started_s, steps.ended_s - started_s
        growth = (steps.kv_last - steps.kv_first) / (ended_s - began_s)
        for number in range(max(0, int(began_s / tenth_s)), min(TENTHS, int(ended_s / tenth_s) + 1)):
            start_s, end_s = max(began_s, number * tenth_s), min(ended_s, (number + 1) * tenth_s)
            if end_s > start_s:
                middle = steps.kv_first + growth * ((start_s + end_s) / 2 - began_s)
                areas[number] += middle * (end_s - start_s)
    return [area / (tenth_s * len(accounts)) for area in areas]
