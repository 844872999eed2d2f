"""Rewards that raise any class of error, or return anything: each has its reason, and training goes on."""

import math
import textwrap

import pytest
import structlog
from seer_rl import Response, RewardError
from seer_rl.advantages import group_advantages
from seer_rl.rewards import LARGEST_REWARD, RewardPool, flaw_of_reward
from training_runs import run, seer_train

from seer_core.errors import ConfigError
from tests.support.raising import ERRORS, class_of

LONGEST_REASON = 2000
OF_IMPORTS = [
    "KeyboardInterrupt",
    "SystemExit",
    "CancelledError",
    "GeneratorExit",
    "a surrogate",
    "text raises",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rewards")


@pytest.fixture(scope="module")
def judged(folder):
    """Return a function that judges one response after the other in one process, and returns what comes."""
    (folder / "raising.py").write_text(
        textwrap.dedent(
            """
            import math, os
            from tests.support.raising import raise_one

            class Odd:
                def __float__(self):
                    raise KeyboardInterrupt("float")
                __repr__ = __str__ = __float__

            async def later():
                return 1.0

            def some():
                yield 1.0

            def reward(response):
                name, answer = response.metadata["raises"], response.metadata["answers"]
                if name:
                    raise_one(name)
                return eval(answer)
            """
        )
    )
    with RewardPool("raising.py:reward", folder, 1, 60.0) as pool:
        pids = {worker._process.pid for worker in pool._workers}

        def judge(raises="", answers="1.5", **more):
            response = Response({"raises": raises, "answers": answers}, "text", [5, 6], "stop", **more)
            try:
                return pool.submit(response).result()
            except RewardError as error:
                return str(error)

        yield judge
        assert {worker._process.pid for worker in pool._workers} == pids, "a process was replaced"


@pytest.mark.parametrize("name", ERRORS)
def test_what_a_reward_raises_is_its_response_s_reason_and_the_process_goes_on(judged, name):
    reason = judged(name)
    assert class_of(name) in reason
    assert reason.isprintable()
    assert len(reason) <= LONGEST_REASON
    assert judged() == 1.5


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ("None", "TypeError: float"),
        ("'high'", "ValueError: could not convert string to float: 'high'; a reward must be a finite number"),
        (r"'\ud800'", r"ValueError: could not convert string to float: '\ud800'"),
        ("b'1' * 10**6", "it is inf; a reward must be"),
        ("[1.0]", "TypeError: float"),
        ("1j", "TypeError: float"),
        ("Odd()", "KeyboardInterrupt: float at "),
        ("Odd", "TypeError: float"),
        ("later().close()", "TypeError: float"),
        ("some()", "TypeError: float"),
        ("10**400", "OverflowError: int too large to convert to float; a reward must be a finite number"),
        ("math.nan", "it is nan; a reward must be a finite number"),
        ("-math.inf", "it is -inf; a reward must be a finite number"),
        ("'nan'", "it is nan; a reward must be a finite number"),
        ("-1e200", "it is -1e+200; a reward must be a number from -1e+15 to 1e+15"),
        ("1.7976931348623157e308", "a reward must be a number from -1e+15 to 1e+15"),
        ("1.1e15", "it is 1.1e+15; a reward must be"),
    ],
)
def test_what_is_no_reward_is_refused_by_name(judged, answers, reason):
    assert reason in judged(answers=answers)
    assert judged() == 1.5


@pytest.mark.parametrize(
    ("answers", "reward"),
    [("True", 1.0), ("-0.0", 0.0), ("5e-324", 5e-324), ("-1e15", -1e15), ("10**15", 1e15), ("'2'", 2.0)],
)
def test_what_is_a_number_is_a_reward(judged, answers, reward):
    assert judged(answers=answers) == reward


@pytest.mark.parametrize(
    "answers",
    [
        "print('x' * 3_000_000) or 1.5",
        r"os.write(1, b'\0\xff' * 100_000) and 1.5",
        "print({'reward': 7}, flush=True) or 1.5",
        r"os.write(1, b'{\"reward\": 7}\n') and 1.5",
        "os.close(0) or 1.5",
    ],
)
def test_what_a_reward_prints_is_no_answer_however_much(judged, answers, capfd):
    assert judged(answers=answers) == 1.5


def test_a_reward_that_forks_answers_once(judged):
    assert [judged(answers="float(os.fork() >= 0)"), judged(), judged()] == [1.0, 1.5, 1.5]


def test_a_sum_with_the_environment_s_reward_is_refused_if_it_is_too_large(judged):
    reason = judged(answers="8e14", environment_reward=8e14)
    assert (
        reason == "with that of its environment it is 1.6e+15; a reward must be a number from -1e+15 to 1e+15"
    )
    assert "it is inf" in judged(environment_reward=math.inf)
    assert judged(answers="8e14", environment_reward=-8e14) == 0.0


def test_rewards_as_large_as_may_be_have_finite_advantages():
    rewards = [LARGEST_REWARD, -LARGEST_REWARD, 0.0]
    assert not any(map(flaw_of_reward, rewards))
    for scale in (True, False):
        assert all(abs(each) < 3e38**0.5 for each in group_advantages(rewards, scale=scale))


@pytest.mark.parametrize(
    "name", ["KeyboardInterrupt", "SystemExit", "CancelledError", "a surrogate", "text raises"]
)
def test_a_file_that_raises_as_it_is_imported_is_an_error_at_the_start(tmp_path, name):
    (tmp_path / "broken.py").write_text(f"from tests.support.raising import raise_one\nraise_one({name!r})")
    with pytest.raises(ConfigError) as caught, RewardPool("broken.py:reward", tmp_path, 1, 60.0):
        pass
    assert class_of(name) in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", ["deep", "surrogate"])
def test_metadata_that_is_no_json_is_a_reason(judged, kind):
    deep = []
    for _ in range(100_000):
        deep = [deep]
    assert "its metadata is no JSON: " in judged(answers={"deep": deep, "surrogate": "\ud800"}[kind])


def test_training_goes_on_with_the_responses_that_have_a_reward(config, tmp_path):
    reward = r"""
    if response.metadata["index"] == 1:
        raise KeyboardInterrupt("\ud835" * 10_000)
    if response.token_ids[0] % 3 == 0:
        return -1e200
    return float(response.token_ids[0] % 2)"""
    with structlog.testing.capture_logs() as logs:
        lines = run(config(reward.strip()), tmp_path / "out", "train.iterations=2")
    failed = [log for log in logs if log["event"] == "reward_failed"]
    reasons = {log["reason"].partition(":")[0].partition(";")[0] for log in failed}
    assert reasons == {"KeyboardInterrupt", "it is -1e+200"}
    assert all(log["first"].rpartition("/")[0] == log["prompts"][0] for log in failed)
    assert sum(line["failed_rewards"] for line in lines) == sum(log["responses"] for log in failed)
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)


def test_training_without_a_single_reward_ends_in_one_sentence(config, tmp_path):
    result = seer_train(config("return -1e200"), tmp_path / "out")
    assert result.exit_code == 2
    assert "no response of iteration 0 has a reward" in result.stderr
    assert "it is -1e+200; a reward must be a number" in result.stderr
