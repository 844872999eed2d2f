"""The lives of all requests of a run, followed as it happens."""

import pickle

from seer_trace.request_life import BLOCK, LifeReader

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceStarted,
)

CHANGES = 16 * BLOCK


def group(name, n=1):
    return GroupsSubmitted((GroupSpec(name, prompt_tokens=10, n=n, max_tokens=100),))


def test_memory_grows_neither_with_requests_that_are_over_nor_with_the_length_of_the_run():
    reader, sizes, lives = LifeReader(), [], []
    reader.read(0.0, InstanceStarted(InstanceInfo("x", 1000, 1, 1, 1024)), [])
    first = 1_000_000
    sent = Dispatch(f"g{first}/0", "x", 50, 40, False)
    reader.read(first + 0.0, group(f"g{first}"), [])
    reader.read(first + 0.0, group(f"g{first + 1}"), [sent])
    for number in range(first, first + 12 * CHANGES):  # one runs, and one waits
        over, done = ChunkFinished(f"g{number}/0", "x", 5, True), Complete(f"g{number}/0", "stop")
        lives += reader.read(number + 0.75, over, [done])
        sent = Dispatch(f"g{number + 1}/0", "x", 50, 40, False)
        reader.read(number + 1.0, group(f"g{number + 2}"), [sent])
        sizes += [len(pickle.dumps(reader))] if number % 64 == 0 else []
    assert len(lives) == 12 * CHANGES
    assert all(each.waited_s() == {"slots": 0.75, "turn": 0.25} for each in lives[2:])
    assert max(sizes[len(sizes) // 2 :]) <= 1.01 * max(sizes[: len(sizes) // 2])


def test_a_long_wait_keeps_its_causes_when_older_ones_are_forgotten():
    reader = LifeReader()
    reader.read(0.0, InstanceStarted(InstanceInfo("x", 1000, 1, 2, 1024)), [])
    reader.read(0.0, group("early"), [])
    reader.read(0.5, group("late"), [])
    for number in range(CHANGES):  # either lacks a slot for half of each second
        now = 1.0 + number
        sent = [Dispatch(f"{number}/{index}", "x", 50, 40, False) for index in range(2)]
        reader.read(now, group(f"{number}", 2), sent)
        for index in range(2):
            over = ChunkFinished(f"{number}/{index}", "x", 5, True)
            reader.read(now + 0.5, over, [Complete(f"{number}/{index}", "stop")])
        if number == 1:
            [early] = reader.read(now + 0.5, group("none", 0), [Complete("early/0", "aborted")])
    [late] = reader.rest()
    assert early.waited_s() == {"turn": 1.5, "slots": 1.0}
    assert late.waited_s() == {"turn": 0.5 * CHANGES, "slots": 0.5 * CHANGES}
    assert late.parts[0].end_s - late.parts[0].begin_s == CHANGES


def test_requests_of_a_rollout_that_failed_are_over_where_the_next_begins():
    reader, started = LifeReader(), InstanceStarted(InstanceInfo("x", 1000, 1, 1, 1024))
    reader.read(0.0, started, [])
    reader.read(1.0, group("g", 2), [Dispatch("g/0", "x", 50, 40, False)])
    runs, waits = reader.read(4.0, started, [])
    assert [(each.instance_id, each.end_s, each.end) for each in runs.chunks] == [
        ("x", 4.0, "dropped, as the rollout failed")
    ]
    assert waits.waited_s() == {"slots": 3.0}
    assert (runs.finished_s, waits.finished_s) == (None, None)
    reader.read(5.0, group("g"), [Dispatch("g/0", "x", 50, 40, False)])
    [life] = reader.read(6.0, ChunkFinished("g/0", "x", 5, True), [Complete("g/0", "stop")])
    assert (life.tokens, life.waited_s(), reader.rest()) == (5, {}, [])
