"""How a rollout is scheduled does not change what is learned, by a single bit; nor does the engine."""

import pytest

from tests.support.installed import skip_without

from .bit_equality import ARMS, PICTURES, TURNS, differences, train

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")

MOST_WAIT = ("engine.vllm.max_running=4",)
"""When a first response is over and an engine is killed, others still wait for a place."""


@pytest.mark.first_by_default("engine", ["vllm", "sglang"])
def test_group_round_robin_and_full_seer_train_the_same_weights_bit_for_bit(tmp_path, engine, soak):
    names = list(ARMS) if soak.full else ["baseline", "seer"]
    iterations, groups = (10, 16) if soak.full else (2, 8)
    arms = {name: train(name, tmp_path, engine, iterations, groups, soak.overrides) for name in names}
    assert differences(arms) == []
    assert len({row["weights_sha256"] for row in arms["seer"]}) == iterations
    # It was no comparison of a thing with itself.
    preemptions = {name: sum(row["preemptions"] for row in rows) for name, rows in arms.items()}
    assert preemptions["baseline"] > preemptions["seer"]
    assert preemptions["seer"] == 0 or engine == "sglang"  # which may retract a request with drafts
    assert [(tmp_path / name / "weights").exists() for name in ("baseline", "seer")] == [True, False]
    assert all(row["acceptance_length"] > 1 and row["chunks"] > row["responses"] for row in arms["seer"])
    assert max(row["dlogp_mean"] for rows in arms.values() for row in rows) < 1e-6
    assert not soak.full or any(row["instances_lost"] for row in arms["killed"])


@pytest.mark.first_by_default("engine", ["vllm", "sglang"])
def test_turns_train_the_same_weights_bit_for_bit_under_any_schedule_and_after_a_kill(tmp_path, engine, soak):
    iterations, groups = (6, 16) if soak.full else (2, 4)
    overrides = (*soak.overrides, "plugin.divided_rollout.chunk_tokens=8")
    names = list(ARMS) if soak.full else ["baseline", "killed"]  # of which the first iteration is undisturbed
    arms = {name: train(name, tmp_path, engine, iterations, groups, overrides, TURNS) for name in names}
    assert differences(arms) == []
    seer = arms.get("seer", arms["killed"])
    assert len({row["weights_sha256"] for row in seer}) == iterations
    assert all(row["turns"] > 4 * row["responses"] for rows in arms.values() for row in rows)
    assert all(row["trained_tokens"] < row["tokens"] for row in seer)
    # It was no comparison of a thing with itself.
    assert sum(row["chunks"] for row in seer) > sum(row["chunks"] for row in arms["baseline"])
    assert all(row["acceptance_length"] > 1 for row in seer)
    assert any(row["instances_lost"] for row in arms["killed"])
    assert max(row["dlogp_mean"] for rows in arms.values() for row in rows) < 1e-6


def test_images_train_the_same_weights_bit_for_bit_under_any_schedule_and_after_a_kill(tmp_path, soak):
    iterations, groups = (6, 16) if soak.full else (2, 4)
    overrides = (*soak.overrides, *MOST_WAIT)
    names = list(ARMS) if soak.full else ["baseline", "killed"]  # of which the first iteration is undisturbed
    arms = {name: train(name, tmp_path, "vllm", iterations, groups, overrides, PICTURES) for name in names}
    assert differences(arms) == []
    assert len({row["weights_sha256"] for row in arms["killed"]}) == iterations
    # It was no comparison of a thing with itself.
    assert sum(row["chunks"] for row in arms["killed"]) > 2 * sum(row["chunks"] for row in arms["baseline"])
    assert any(row["instances_lost"] for row in arms["killed"])
    assert max(row["dlogp_mean"] for rows in arms.values() for row in rows) < 1e-6


def test_an_adapter_trains_the_same_weights_bit_for_bit_after_a_kill(tmp_path, soak):
    pytest.importorskip("peft", reason="the extra 'lora' of seer-rl is not installed")
    iterations, groups = (6, 16) if soak.full else (2, 4)
    lora = ("train.lora.rank=8", "engine.vllm.lora_rank=8", "train.optimizer.learning_rate=3e-3")
    overrides = (*soak.overrides, *lora, *MOST_WAIT)
    arms = {
        name: train(name, tmp_path, "vllm", iterations, groups, overrides) for name in ("baseline", "killed")
    }
    assert differences(arms) == []
    assert len({row["weights_sha256"] for row in arms["killed"]}) == iterations
    assert any(row["instances_lost"] for row in arms["killed"])
    assert max(row["dlogp_mean"] for rows in arms.values() for row in rows) < 1e-5


@pytest.mark.long
def test_both_engines_train_the_same_weights_bit_for_bit(tmp_path, soak):
    iterations, groups = (10, 16) if soak.full else (1, 4)
    arms = {
        engine: train("baseline", tmp_path / engine, engine, iterations, groups, soak.overrides)
        for engine in ("vllm", "sglang")
    }
    assert differences(arms) == []
