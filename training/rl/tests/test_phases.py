"""Phases of an iteration are reported, and their seconds kept apart by iteration."""

from seer_rl.phases import Phases
from training_runs import RecordingListener


def test_a_phase_is_reported_and_what_is_only_measured_is_not():
    listener = RecordingListener()
    phases = Phases(listener)
    phases.start(4)
    with phases.phase("rollout"), phases.measure("checkpoint"):
        pass
    phases.announce("checkpoint")
    assert listener.phases == [(4, "rollout"), (4, "checkpoint")]
    assert phases.seconds().keys() == {"rollout_s", "checkpoint_s"}


def test_seconds_of_a_phase_add_up_until_the_next_iteration():
    phases = Phases(RecordingListener())
    phases.start(0)
    for _ in range(2):
        with phases.phase("sleep"):
            pass
    assert phases.seconds().keys() == {"sleep_s"}
    phases.start(1)
    assert phases.seconds() == {}
