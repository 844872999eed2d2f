"""The machine's speed between the arms of a comparison, and what is said of their times."""

import asyncio

import pytest
from seer_cli.comparison import compare
from seer_cli.finished_arms import FinishedArms
from seer_cli.machine import FIXED_WORK, drift_in_words, probe_machine
from seer_host.config_files import load_config
from seer_host.machine_probe import MachineProbe
from seer_session.runtime import Runtime

from seer_core.errors import EngineError

SIM = "[compare]\noracle = []\n[engine.sim]\nkv_capacity_tokens = 1024\nmax_model_tokens = 512\n"
SPEEDS_S = (0.4, 0.5, 0.3, 0.3)


class Worker:
    """A worker whose machine has a given speed, or one that is down."""

    def __init__(self, wall_s=None):
        self.wall_s = wall_s

    async def probe_machine(self):
        if self.wall_s is None:
            raise EngineError("it is not running")
        return MachineProbe(self.wall_s, 0.2)


def measured(workers):
    return asyncio.run(probe_machine(workers))


def test_all_workers_measure_at_once_and_their_mean_counts():
    assert measured([Worker(0.25), Worker(0.75)]) == MachineProbe(0.5, 0.2)


def test_there_is_no_probe_where_a_worker_cannot_or_is_down():
    assert measured([]) is None
    assert measured([Worker(0.5), object()]) is None
    assert measured([Worker(0.5), Worker()]) is None


def test_what_is_said_of_times_follows_from_the_drift():
    steady = drift_in_words([MachineProbe(0.5, 0.5), MachineProbe(0.505, 0.505)])
    assert "took 0.50 s before the first arm and 0.51 to 0.51 s later, with a core for 100% of" in steady
    assert steady.endswith("Its speed changed by 1.0%, so times can be compared.")
    busy = drift_in_words([MachineProbe(0.5, 0.5), MachineProbe(1.0, 0.4), MachineProbe(0.4, 0.4)])
    assert "0.40 to 1.00 s later, with a core for 68% of that time" in busy
    assert busy.endswith("Times of two arms may differ by 150% because of the machine alone.")


@pytest.fixture
def compared(write_config, some_groups, tmp_path):
    """Return a function that compares on the simulator, and keeps the arms; the machine has these speeds."""

    def run(speeds_s, resume=False):
        config = load_config(write_config(("divided_rollout", "context_sched"), SIM))
        left = iter(speeds_s)

        async def probe():
            wall_s = next(left)
            return None if wall_s is None else MachineProbe(wall_s, wall_s)

        async def main():
            arms = FinishedArms(tmp_path / "arms", "this one")
            with arms.open(resume=resume) as finished:
                async with Runtime.from_config(config.with_plugins(())) as runtime:
                    return await compare(
                        runtime, config, some_groups(2, 2, 64), finished=finished, probe=probe
                    )

        return asyncio.run(main())

    return run


def test_each_arm_stands_between_two_probes_and_their_mean_is_its_figure(compared):
    results = compared(SPEEDS_S)
    walls = [[(before.wall_s, after.wall_s) for before, after in result.probes] for result in results]
    assert walls == [[(0.4, 0.5)], [(0.5, 0.3)], [(0.3, 0.3)]]
    documents = [result.to_json(results[0]) for result in results]
    assert [document[FIXED_WORK] for document in documents] == pytest.approx([0.45, 0.4, 0.3])
    assert documents[2]["ratio_to_baseline"][FIXED_WORK] == pytest.approx(0.3 / 0.45)
    assert documents[1]["probes"][0][1] == {"wall_s": 0.3, "cpu_s": 0.3}


def test_a_finished_arm_keeps_its_probes(compared, tmp_path):
    before = compared(SPEEDS_S)
    after = compared([9.0], resume=True)
    assert [result.probes for result in after] == [result.probes for result in before]


def test_an_arm_beside_a_worker_that_was_down_has_no_figure_of_the_machine(compared):
    baseline, divided, context = compared((0.4, 0.4, None, 0.4))
    assert [len(result.probes) for result in (baseline, divided, context)] == [1, 0, 0]
    assert FIXED_WORK not in divided.to_json(baseline)["ratio_to_baseline"]
