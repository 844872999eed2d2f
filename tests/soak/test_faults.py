"""Faults in rollouts: processes die or hang, and no response is lost, doubled or wrong.

`pytest -m engine tests/soak/test_faults.py --soak-minutes 60 --soak-seed 11 -s` runs a long campaign.
"""

import asyncio

import pytest

from tests.support.installed import skip_without

from .faults import UPDATE, Campaign, Plan, run

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")

KILLED = "instance killed"
SMALL = Plan(
    count=3,
    groups=2,
    n=2,
    pools=("local",),
    kinds=(KILLED, UPDATE),
    silence_s=60,
    bound_s=300,
)


@pytest.mark.long
def test_instances_are_killed_and_no_response_is_lost_doubled_or_wrong(tmp_path, soak):
    plan = Plan(soak.seed, minutes=soak.minutes, overrides=soak.overrides) if soak.full else SMALL
    campaign = Campaign(plan, tmp_path)
    asyncio.run(run(campaign))
    for kind, tally in sorted(campaign.tallies.items()):
        print(f"{kind}: {tally}")
        assert (tally.lost, tally.doubled, tally.wrong, tally.broken) == (0, 0, 0, []), kind
    assert campaign.injected >= 3
    assert soak.full or campaign.injected == 3
    assert soak.full or campaign.tallies[KILLED].responses >= 4
