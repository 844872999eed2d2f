"""Evaluation on held-out prompts, on simulated engines."""

from training_runs import WAIT_FOR, RecordingListener, reproducible, run

from tests.support.eventually import PATIENCE_S


def test_held_out_prompts_have_the_same_seeds_each_time_and_are_not_trained_on(config, tmp_path):
    path = config()
    plain = run(path, tmp_path / "plain")
    every = ("train.evaluation.prompts=toy_task.py:prompts", "train.evaluation.every=2")
    lines = run(path, tmp_path / "evaluated", *every, "train.evaluation.groups=5")
    versions = [[each["weight_version"] for each in line["evaluations"]] for line in lines]
    assert versions == [[0], [], [2, 3]]
    # Simulated tokens depend on seeds alone, which are the same each time.
    assert len({each["reward_mean"] for line in lines for each in line["evaluations"]}) == 1
    assert lines[0]["evaluation_s"] > 0
    assert "evaluation_s" not in lines[1]
    for line in (*plain, *lines):
        del line["evaluations"]
    assert reproducible(lines) == reproducible(plain)


def test_rewards_of_an_evaluation_are_computed_while_the_next_rollout_goes_on(config, tmp_path):
    path = config(WAIT_FOR.format(held_out=3, file="rolling").strip())
    overrides = (
        "train.iterations=1",
        "train.evaluation.prompts=toy_task.py:prompts",
        "train.evaluation.groups=4",
        "train.rewards.workers=4",
        f"train.rewards.timeout_s={PATIENCE_S}",
    )
    listener = RecordingListener((0, "rewards"), (tmp_path / "rolling").touch)
    # The rewards come when the next rollout is over; they time out if the loop waits for them before it.
    [line] = run(path, tmp_path / "out", *overrides, listener=listener)
    assert [each["failed_rewards"] for each in line["evaluations"]] == [0, 0]
