"""Responses whose reward or engine has failed, on simulated engines."""

import structlog
from seer_sim.engine import SimEngine
from training_runs import BASELINE, limit_only, reproducible, run, seer_train


def test_a_reward_that_raises_or_hangs_costs_its_response_and_nothing_else(config, tmp_path, monkeypatch):
    limit_only(monkeypatch, lambda each: each.metadata["index"] == 2 and each.token_ids[0] % 3 == 0)
    reward = """
    if response.metadata["index"] == 1 and response.token_ids[0] % 2:
        raise ValueError("no")
    if response.metadata["index"] == 2 and response.token_ids[0] % 3 == 0:
        time.sleep(60)
    return float(len(response.token_ids) % 2)"""
    path, small = config(reward.strip()), ("train.iterations=2", "train.rewards.timeout_s=0.3")
    with structlog.testing.capture_logs() as logs:
        lines = run(path, tmp_path / "out", *small)
    logged = [(log["reason"], log["responses"]) for log in logs if log["event"] == "reward_failed"]
    assert {reason.partition(" at ")[0] for reason, _ in logged} == {
        "ValueError: no",
        "it took longer than 0.3 s",
    }
    assert len(logged) <= 4
    assert sum(line["failed_rewards"] for line in lines) == sum(responses for _, responses in logged)
    again = run(path, tmp_path / "again", *small, *BASELINE)
    assert reproducible(lines) == reproducible(again)


def test_responses_that_an_engine_failed_are_counted_apart_from_rewards_that_failed(
    config, tmp_path, monkeypatch
):
    submit = SimEngine.submit

    def fail_two_of_each_group(self, job):
        if job.request_id.endswith(("1", "2")):
            self._fail(job, "struck")
        else:
            submit(self, job)

    monkeypatch.setattr(SimEngine, "submit", fail_two_of_each_group)
    path = config("return 1 / response.metadata['index']")
    [line] = run(path, tmp_path / "out", "train.iterations=1", "seer.max_chunk_failures=0")
    assert (line["responses"], line["failed_responses"], line["failed_rewards"]) == (12, 6, 2)


def test_without_a_single_reward_training_stops(config, tmp_path):
    result = seer_train(config("raise ValueError('never')"), tmp_path / "out")
    assert result.exit_code == 2
    assert "no response of iteration 0 has a reward" in result.stderr
    assert "ValueError: never" in result.stderr
