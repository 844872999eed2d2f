"""Rollouts on four simulated instances of which one is slow: responses leave it, and no token changes."""

import random

import pytest

from seer_core.model.events import Dispatch

pytest_plugins = ["seer_testing.simulate"]

LONGEST = 1500
RNG = random.Random(3)
GROUPS = [
    tuple(min(LONGEST, round(RNG.lognormvariate(5.5, 0.9) * RNG.uniform(0.7, 1.4))) for _ in range(6))
    for _ in range(24)
]
ROOMY, TIGHT = 24 * 1536, 4 * 1536


ROLLOUTS = {}
"""What ``roll_out`` has returned, by its arguments: several tests ask for the same."""


@pytest.fixture
def roll_out(simulation):
    """Return a function that rolls out on four instances, with an entry for ``speeds``."""

    def run(speeds, kv_tokens=ROOMY, instances=4):
        asked = (*speeds.items(), kv_tokens, instances)
        if asked not in ROLLOUTS:
            ROLLOUTS[asked] = simulation.run(
                ["divided_rollout", "length_posterior"],
                GROUPS,
                instances=instances,
                settings={"divided_rollout": {"chunk_tokens": 32}},
                speeds=speeds,
                kv_capacity_tokens=kv_tokens,
            )
        return ROLLOUTS[asked]

    return run


def places(rollout, why=None):
    """Return the instance of each chunk, of those that are there for this reason if one is given."""
    sent = [each for record in rollout.trace for each in record.commands if isinstance(each, Dispatch)]
    return [each.instance_id for each in sent if why in (None, each.why)]


@pytest.mark.parametrize("kv_tokens", [ROOMY, TIGHT], ids=["roomy", "tight"])
@pytest.mark.parametrize("speed", [0.5, 0.1])
def test_a_slow_instance_costs_little_more_than_its_loss_would(roll_out, speed, kv_tokens):
    slow, three = roll_out({"sim-1": speed}, kv_tokens), roll_out({}, kv_tokens, instances=3)
    assert slow.tokens == three.tokens
    assert slow.makespan_s < 1.3 * three.makespan_s
    assert places(slow, "slow")
    assert "sim-1" not in places(slow, "slow")


def test_a_slow_instance_works_while_no_other_has_room(roll_out):
    slow, three = roll_out({"sim-1": 0.5}, TIGHT), roll_out({}, TIGHT, instances=3)
    assert slow.makespan_s < three.makespan_s
    assert places(slow).count("sim-1") > len(places(slow)) / 20


def test_the_last_responses_are_on_no_slow_instance(roll_out):
    slow = roll_out({"sim-1": 0.1})
    last = slow.completions[-1]
    assert len(last.instances) > 1 or "sim-1" not in last.instances
    assert last.chunks[-1].instance != "sim-1"


def test_without_chunks_nothing_moves(simulation):
    whole = simulation.run(["length_posterior"], GROUPS, instances=4, speeds={"sim-1": 0.1})
    assert {len(completion.chunks) for completion in whole.completions} == {1}
    assert whole.summary.migrations == 0
