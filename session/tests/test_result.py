import pytest
from seer_session.results import Tally, tail_time_s

from seer_core.model import ChunkRecord, Completion
from seer_core.model.events import InstanceLost, InstanceReported


def chunk(instance="a", tokens=10, **costs):
    costs = {"cached_tokens": 0, "prefilled_tokens": 0, "recomputed_tokens": 0, "preemptions": 0} | costs
    return ChunkRecord(instance, tokens, 0.0, 1.0, weight_version=0, **costs)


def completion(request_id, finished_s, chunks=(), reason="stop"):
    group, _, index = request_id.rpartition("/")
    tokens = sum(chunk.tokens for chunk in chunks)
    return Completion(
        request_id=request_id,
        group_id=group,
        index=int(index),
        seed=0,
        token_ids=[0] * tokens,
        logprobs=[0.0] * tokens,
        text=None,
        finish_reason=reason,
        weight_version=0,
        chunks=list(chunks),
        instances=[],
        finished_s=finished_s,
        metadata={},
    )


def summarize(completions, started_s, weight_version=0):
    tally = Tally(started_s)
    tally.see(InstanceLost("a", "a test took it"))
    for each in completions:
        tally.add(each)
    return tally.summary(weight_version)


@pytest.mark.parametrize(
    ("times", "tail"),
    [
        ([], 0.0),
        ([3.0], 0.0),
        ([1.0] * 9 + [5.0], 4.0),
        ([float(t) for t in range(1, 101)], 10.0),
        ([float(t) for t in range(100, 0, -1)], 10.0),
        ([1.0] * 18 + [2.0, 7.0], 6.0),
        ([1.0] * 8 + [9.0], 0.0),
        ([2.0] * 50, 0.0),
    ],
)
def test_tail_time_is_what_the_last_tenth_takes_alone(times, tail):
    assert tail_time_s(times) == tail


@pytest.mark.parametrize("requests", [10, 30, 70, 100, 1000, 3200, 9600])
def test_the_tail_is_exactly_a_tenth(requests):
    times = [0.0] * (requests - requests // 10) + [1.0] * (requests // 10)
    assert tail_time_s(times) == 1.0


def test_a_summary_adds_up_chunks_and_requests():
    summary = summarize(
        [
            completion(
                "g/0",
                12.0,
                [
                    chunk("a", 10, prefilled_tokens=5, preemptions=1),
                    chunk("b", 20, cached_tokens=4, recomputed_tokens=11),
                    chunk("b", 5, recomputed_tokens=2),
                ],
            ),
            completion("g/1", 14.0, [chunk("a", 15)], reason="length"),
            completion("h/0", 20.0, [], reason="aborted"),
        ],
        started_s=10.0,
        weight_version=3,
    )
    assert (summary.requests, summary.groups, summary.chunks) == (3, 2, 4)
    assert (summary.tokens, summary.max_tokens) == (50, 35)
    assert summary.mean_tokens == pytest.approx(50 / 3)
    assert (summary.total_time_s, summary.throughput_tokens_per_s) == (10.0, 5.0)
    assert (summary.migrations, summary.preemptions) == (1, 1)
    assert (summary.cached_tokens, summary.prefilled_tokens, summary.recomputed_tokens) == (4, 5, 13)
    assert summary.finish_reasons == {"stop": 1, "length": 1, "aborted": 1}
    assert (summary.instances_lost, summary.weight_version) == (1, 3)


def test_a_rollout_of_nothing_has_a_summary_of_zeros():
    summary = summarize([], started_s=10.0)
    assert (summary.requests, summary.total_time_s, summary.tail_time_s) == (0, 0.0, 0.0)
    assert (summary.throughput_tokens_per_s, summary.mean_tokens, summary.max_tokens) == (0.0, 0.0, 0)


def test_a_rollout_that_took_no_time_has_no_throughput():
    summary = summarize([completion("g/0", 10.0, [chunk()])], 10.0)
    assert (summary.total_time_s, summary.throughput_tokens_per_s) == (0.0, 0.0)


def test_coming_back_to_an_earlier_instance_is_a_migration_too():
    chunks = [chunk("a"), chunk("b"), chunk("a")]
    assert summarize([completion("g/0", 1.0, chunks)], 0.0).migrations == 2


def test_the_overrun_is_that_of_this_rollout_on_the_instance_that_fell_behind_furthest():
    def report(name, emulated_s, overrun_s):
        return InstanceReported(name, 1, 0, 0.1, emulated_s=emulated_s, overrun_s=overrun_s)

    tally = Tally(0.0, {"a": report("a", 10.0, 5.0), "b": report("b", 10.0, 0.0)})
    assert tally.summary().overrun_share == 0.0
    tally.see(report("a", 20.0, 5.5))
    tally.see(report("b", 14.0, 1.0))
    assert tally.summary().overrun_share == 0.25
    tally.see(report("b", 14.0, 0.0))
    assert tally.summary().overrun_share == pytest.approx(0.05)
