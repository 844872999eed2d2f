"""Rollouts with drafts, predicted without any figure of theirs, on five halves of the bundled text."""

from statistics import median

import pytest
from msgspec.structs import replace
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate

from bench.draft_prediction import DRAFTING, OTHER, OWN, half_of, predicted, split_of
from bench.frame import DATA
from bench.paced import LOADS, figures

pytestmark = pytest.mark.engine

GROUPS, GROUP_SIZE, SPLITS = 16, 8, 5

BOUNDS = {
    OWN: {"total_time_s": (0.05, 0.08), "tail_time_s": (0.10, 0.15)},
    OTHER: {"total_time_s": (0.08, 0.13), "tail_time_s": (0.25, 0.35)},
}
"""Errors in the median and at worst.  In so small a rollout the last two responses decide the tail."""


@pytest.mark.long
def test_drafts_of_five_halves_are_predicted_without_any_figure_of_their_rollouts():
    pytest.importorskip("vllm")
    load = LOADS["tiny-reasoner"](DATA.parent)
    groups = [replace(each, output_tokens=each.output_tokens[:GROUP_SIZE]) for each in load.groups(0)]
    load = replace(load, lengths=[groups[:GROUPS]])
    found = {had: {name: [] for name in bounds} for had, bounds in BOUNDS.items()}
    for split in range(SPLITS):
        one, two = (half_of(load, ids, instances=1, by=10) for ids in split_of(load, split))
        paced = figures(simulate(two, POLICIES[DRAFTING], engine="paced"))
        for had, draws in predicted(two, one, DRAFTING).items():
            assert all(draw["tokens"] == paced["tokens"] for draw in draws)
            for name, errors in found[had].items():
                errors.append(abs(median(draw[name] for draw in draws) / paced[name] - 1))
    for had, bounds in BOUNDS.items():
        for name, (usual, worst) in bounds.items():
            errors = found[had][name]
            assert median(errors) < usual, (had, name, errors)
            assert max(errors) < worst, (had, name, errors)
