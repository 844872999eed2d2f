"""Servers die, lie and are changed by their owners: nothing is lost, and no token is of other weights.

`python -m bench faults servers --json FILE` carries a long campaign out and stores what came of it.
"""

import asyncio

from .remote_campaign import RemoteCampaign


def test_servers_are_struck_and_no_response_is_lost_doubled_or_wrong(tmp_path, soak):
    faults, minutes = (100_000, soak.minutes) if soak.full else (6, 10.0)
    campaign = RemoteCampaign(tmp_path, faults, soak.seed, minutes=minutes)
    asyncio.run(campaign.run())
    assert campaign.complaints == []
    assert (campaign.lost, campaign.doubled, campaign.wrong) == (0, 0, 0)
    assert soak.full or sum(campaign.done.values()) == faults
