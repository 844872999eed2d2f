"""Scheduling is not slower than veRL's policy where chunks are coarse: ``python -m bench floor`` in small."""

from statistics import median

from seer_lab.policies import POLICIES

from bench.floor import BASELINE, FLOOR, LOADS, POLICY_SETS, SHARES, measured
from bench.frame import DATA

SEEDS = range(3)


def test_half_of_each_chunk_reserved_keeps_the_floor_without_a_preemption():
    load = LOADS["kimi-k2"](DATA.parent)
    ratios = []
    for seed in SEEDS:
        base = measured(load, POLICIES[BASELINE], seed, [])
        mine = measured(load, POLICY_SETS["divided"], seed, [], SHARES[-1])
        assert (mine["preemptions"], mine["tokens"]) == (0, base["tokens"])
        ratios.append(base["total_time_s"] / mine["total_time_s"])
    assert median(ratios) >= FLOOR
