"""Scheduling is not slower than veRL's policy where chunks are coarse."""

from statistics import median

from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate

from bench.harness import DATA
from bench.paced import LOADS

FLOOR = 0.99


def test_half_of_each_chunk_reserved_keeps_the_floor_without_a_preemption():
    load = LOADS["kimi-k2"](DATA.parent)
    ratios = []
    for seed in range(3):
        base, mine = (simulate(load, POLICIES[name], seed).summary for name in ("verl", "divided"))
        assert (mine.preemptions, mine.tokens) == (0, base.tokens)
        ratios.append(base.total_time_s / mine.total_time_s)
    assert median(ratios) >= FLOOR
