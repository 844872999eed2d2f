"""Machines, their parts and their network, the head and the driver are struck: nothing is lost or wrong.

`pytest tests/soak/test_cluster_campaign.py --soak-minutes 30 --soak-seed 11 -s` runs a long campaign;
`python -m bench faults cluster --json FILE` stores the table of one.
"""

import pytest

from tests.support.installed import skip_without

from .cluster_campaign import ClusterCampaign, ClusterPlan, allowed  # before Ray, which reads variables once

skip_without("ray")

SHORT = ("worker killed", "actor killed", "machine killed", "driver killed")


def test_a_cluster_is_struck_and_no_response_is_lost_doubled_or_wrong(tmp_path, soak):
    if not allowed():
        pytest.skip("machines are made of namespaces, for which root and iproute2 are needed")
    if soak.full:
        plan = ClusterPlan(soak.seed, faults=100_000, minutes=soak.minutes)
    else:
        plan = ClusterPlan(seed=1, faults=4, groups=6, each=SHORT)
    campaign = ClusterCampaign(plan, tmp_path)
    campaign.run()
    assert campaign.complaints == []
    assert (campaign.lost, campaign.doubled, campaign.wrong) == (0, 0, 0)
    assert campaign.responses >= 8 * plan.groups
    assert soak.full or [each.kind for each in campaign.faults] == list(SHORT)
    assert any(each.noticed_s for each in campaign.faults)
