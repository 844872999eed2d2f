"""Training on responses whose turns an environment answers: masks, rewards, refusals, resumption."""

import shutil
import sys
from pathlib import Path

import pytest
import structlog
from training_runs import BASELINE, RecordingListener, make_model, read_metrics, reproducible, run

from seer_core.errors import ConfigError

SOURCE = Path(__file__).with_name("toy_turns.py")
TURNS = ("train.environment=toy_turns.py:Sums", "engine.sim.lengths.mean_tokens=5")
KL = "train.loss.kl=0.1"
"""With a penalty all responses are trained on."""
WITHOUT_FUNCTION = "train.reward=''"


@pytest.fixture
def turns(config, tmp_path):
    """Return the path of a config beside which the environment lies."""
    shutil.copy(SOURCE, tmp_path)
    return config("return float(response.token_ids[0] % 2)")


def events(tmp_path):
    """Return what the environment beside a config has noted, and clear it."""
    noted = sys.modules[str((tmp_path / "toy_turns.py").resolve())].EVENTS
    found = list(noted)
    noted.clear()
    return found


def test_the_environment_s_tokens_are_counted_and_not_trained_on(turns, tmp_path):
    lines = run(turns, tmp_path / "out", *TURNS, KL)
    assert [line["responses"] for line in lines] == [12] * 3
    assert all(line["turns"] > 12 and line["environment_tokens"] > 0 for line in lines)
    assert [line["trained_tokens"] for line in lines] == [
        line["tokens"] - line["environment_tokens"] for line in lines
    ]
    assert len({line["weights_sha256"] for line in lines}) == 3
    assert all(line["environment_s"] >= 0 for line in lines)


def test_scheduling_does_not_change_the_weights_that_are_learnt_from_turns(turns, tmp_path):
    divided = run(turns, tmp_path / "seer", *TURNS, KL, "plugin.divided_rollout.chunk_tokens=2")
    whole = run(turns, tmp_path / "baseline", *TURNS, KL, *BASELINE, "engine.sim.instances=3")
    assert reproducible(divided) == reproducible(whole)
    assert all(one["chunks"] > other["chunks"] for one, other in zip(divided, whole, strict=True))


def test_the_environment_s_reward_and_the_function_s_are_added_up(turns, tmp_path):
    alone, both, function = (
        run(turns, tmp_path / name, *overrides, "train.iterations=1")[0]
        for name, overrides in {
            "alone": (*TURNS, WITHOUT_FUNCTION),
            "both": TURNS,
            "function": ("train.environment=toy_turns.py:Silent", TURNS[1]),
        }.items()
    )
    assert alone["tokens_sha256"] == both["tokens_sha256"]
    first_tokens = function["reward_mean"]  # those do not depend on what comes behind the first turn
    assert both["reward_mean"] == pytest.approx(alone["reward_mean"] + first_tokens)
    assert 0 < alone["reward_mean"] < both["reward_mean"]


def test_a_reward_sees_the_turns_without_their_seconds(config, turns, tmp_path):
    source = (tmp_path / "toy_task.py").read_text()
    body = "return 0.0 if any(turn.environment_s for turn in response.turns) else float(len(response.turns))"
    (tmp_path / "toy_task.py").write_text(source.replace("return float(response.token_ids[0] % 2)", body))
    [line] = run(turns, tmp_path / "out", "train.iterations=1", *TURNS)
    environment = run(turns, tmp_path / "alone", "train.iterations=1", *TURNS, WITHOUT_FUNCTION)[0]
    assert line["reward_mean"] == pytest.approx(environment["reward_mean"] + line["turns"] / 12)


def test_held_out_prompts_have_the_environment_too(turns, tmp_path):
    evaluation = ("train.evaluation.prompts=toy_task.py:prompts", "train.evaluation.groups=2")
    lines = run(turns, tmp_path / "out", *TURNS, WITHOUT_FUNCTION, *evaluation, "train.iterations=1")
    assert [each["weight_version"] for each in lines[0]["evaluations"]] == [0, 1]
    asked = {each[0] for each in events(tmp_path) if isinstance(each, tuple)}
    assert {name for name in asked if name.startswith("held-out")} == {
        f"held-out-{group}/{index}" for group in range(2) for index in range(4)
    }


def test_the_environment_of_a_training_is_started_once_and_stopped(turns, tmp_path):
    run(turns, tmp_path / "out", *TURNS, "train.iterations=2")
    noted = events(tmp_path)
    assert (noted[0], noted[-1]) == ("started", "stopped")
    assert noted.count("started") == noted.count("stopped") == 1
    assert noted.count("begun behind 0") == 2 * 12


def test_responses_whose_environment_failed_are_left_out_and_counted(turns, tmp_path):
    overrides = ("train.environment=toy_turns.py:Broken", TURNS[1], "train.iterations=1")
    with structlog.testing.capture_logs() as logs:
        [line] = run(turns, tmp_path / "out", *overrides)
    [failed] = [log for log in logs if log["event"] == "reward_failed"]
    assert 0 < line["failed_responses"] == failed["responses"] < 12
    assert "its environment raised ValueError: no such tool" in failed["reason"]


def test_without_a_function_a_response_that_got_no_reward_has_0(turns, tmp_path):
    overrides = ("train.environment=toy_turns.py:Silent", TURNS[1], WITHOUT_FUNCTION, "train.iterations=1")
    with structlog.testing.capture_logs() as logs:
        [line] = run(turns, tmp_path / "out", *overrides)
    assert (line["reward_mean"], line["failed_rewards"], line["grad_norm"]) == (0.0, 0, 0.0)
    assert [log["iteration"] for log in logs if log["event"] == "no_advantage"] == [0]


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ((WITHOUT_FUNCTION,), r"\[train\].reward names no function, and there is no environment"),
        (("train.environment=toy_turns.py:Smus",), r"\[train\].environment: 'toy_turns.py:Smus' cannot be"),
        (("train.environment=toy_turns.py:Wordless",), "made a Wordless, which is no environment: .*step"),
        (("train.environment=toy_task.py:reward",), r"reward' raised TypeError: .*; it is called without"),
        (("train.environment=toy_turns.py:Unready",), "its start raised OSError: no tools"),
    ],
)
def test_an_environment_that_is_none_is_refused_by_name(turns, tmp_path, overrides, match):
    with pytest.raises(ConfigError, match=match):
        run(turns, tmp_path / "out", *overrides)


@pytest.fixture
def plugin(distribution):
    """Install the environment as a plug-in, ``toy_tool``."""
    source = (
        SOURCE.read_text("utf-8")
        + """

import msgspec
from seer_core.plugins.hookspecs import hookimpl


class Settings(msgspec.Struct, frozen=True):
    level: int = 0


@hookimpl
def seer_make_environment(settings: Settings):
    return Sums()
"""
    )
    distribution("toy_tool", source)
    return "seer.plugins=['divided_rollout','context_sched','toy_tool']"


def test_a_plug_in_s_environment_trains_the_same_and_its_settings_may_not_change(turns, tmp_path, plugin):
    own = run(turns, tmp_path / "own", *TURNS)
    out = tmp_path / "out"
    lines = run(turns, out, plugin, TURNS[1], "train.iterations=2")
    assert reproducible(lines) == reproducible(own[:2])
    with pytest.raises(ConfigError, match=r"the environment of \[seer\].plugins changed since .*000002"):
        run(turns, out, plugin, TURNS[1], "plugin.toy_tool.level=1", resume=True)
    with pytest.raises(ConfigError, match=r"the environment of \[seer\].plugins changed"):
        run(turns, out, TURNS[1], resume=True)
    run(turns, out, plugin, TURNS[1], resume=True)
    assert reproducible(read_metrics(out)) == reproducible(own)


def test_two_environments_are_refused(turns, tmp_path, plugin):
    with pytest.raises(ConfigError, match=r"\[train\].environment names .*, and \[seer\].plugins 'toy_tool'"):
        run(turns, tmp_path / "out", plugin, *TURNS)


def test_another_environment_in_the_second_life_is_refused(turns, tmp_path):
    run(turns, tmp_path / "out", *TURNS, "train.iterations=1")
    with pytest.raises(ConfigError, match=r"\[train\]\.environment changed"):
        run(turns, tmp_path / "out", "train.environment=toy_turns.py:Broken", TURNS[1], resume=True)


class Interrupted(RecordingListener):
    """Raises once so many responses have finished."""

    def responses(self, finished, wanted):
        if finished == 7:
            raise OSError("interrupted")


def test_a_rollout_with_turns_that_was_interrupted_is_gone_on_with(no_model, turns, tmp_path):
    (tmp_path / "model").unlink()
    make_model(tmp_path / "model", 1000)
    path = tmp_path / "toy_task.py"
    prompt = '"prompt_token_ids": [5, 6 + index]'
    path.write_text(path.read_text().replace('"prompt": f"{seed} {index}"', prompt))
    turns.write_text(
        turns.read_text("utf-8")
        .replace("[engine.sim]\n[engine.sim.lengths]\nmean_tokens = 24\n", "")
        .replace('engine = "sim"', 'engine = "no_model"'),
        "utf-8",
    )
    overrides = (TURNS[0], KL, "plugin.divided_rollout.chunk_tokens=3", "train.iterations=2")
    expected = reproducible(run(turns, tmp_path / "whole", *overrides))
    assert expected[0]["turns"] > 12
    whole = [each for each in events(tmp_path) if isinstance(each, tuple)]
    out = tmp_path / "out"
    with pytest.raises(OSError, match="interrupted"):
        run(turns, out, *overrides, listener=Interrupted())
    first = [each for each in events(tmp_path) if isinstance(each, tuple)]
    lines = run(turns, out, *overrides, resume=True)
    assert reproducible(read_metrics(out)) == expected
    assert lines[0]["resumed_tokens"] > 0
    second = [each for each in events(tmp_path) if isinstance(each, tuple)]
    assert len(first) + len(second) < len(whole) + 12  # answers that the journal has are not asked for again
