"""The plot of a run."""

import pytest


@pytest.mark.parametrize("evaluations", [[], [{"weight_version": 0, "reward_mean": 0.25}]])
def test_iterations_are_drawn_with_and_without_evaluations(tmp_path, evaluations):
    pytest.importorskip("matplotlib", reason="the extra 'plot' of seer-rl is not installed")
    from seer_rl.plots import draw

    record = {"iteration": 0, "reward_mean": 0.5, "evaluations": evaluations, "rollout_s": 1.0}
    draw(tmp_path / "training.png", [record, record | {"iteration": 1, "sleep_s": 0.5}])
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
