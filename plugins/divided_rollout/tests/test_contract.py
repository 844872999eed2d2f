"""The contracts of a splitter and of a placer, and what both are for, on the simulator."""

from seer_divided_rollout import AffordableChunks, Chunks, KvAware
from seer_testing import PlacerContract, SplitterContract

pytest_plugins = ["seer_testing.simulate"]


class TestChunks(SplitterContract):
    def make(self):
        return Chunks(7)


class TestAffordableChunks(SplitterContract):
    def make(self):
        return AffordableChunks()


class TestKvAware(PlacerContract):
    def make(self):
        return KvAware(0.25, 0.75)


class TestKvAwareThatMovesFreely(PlacerContract):
    def make(self):
        return KvAware(0.0)


def test_nothing_is_preempted_where_whole_requests_are(simulation):
    groups = [(400, 380, 390, 410)] * 4
    tight = {"kv_capacity_tokens": 1024}
    plain = simulation.run([], groups, **tight)
    found = simulation.run(
        ["divided_rollout"], groups, settings={"divided_rollout": {"chunk_tokens": 64}}, **tight
    )
    assert plain.preemptions > 0
    assert found.preemptions == 0
    assert found.tokens == plain.tokens


def test_what_is_reserved_changes_times_and_no_token(simulation):
    groups = [(400, 380, 390, 410)] * 4
    tight = {"kv_capacity_tokens": 1024, "instances": 2}

    def run(share):
        chunks = {"chunk_tokens": 256, "reserved_share": share}
        return simulation.run(["divided_rollout"], groups, settings={"divided_rollout": chunks}, **tight)

    whole, quarter = run(1.0), run(0.25)
    assert quarter.preemptions == whole.preemptions == 0
    assert quarter.tokens == whole.tokens
    assert quarter.summary.chunks > whole.summary.chunks, "none ended early"
    assert quarter.summary.total_time_s < whole.summary.total_time_s
