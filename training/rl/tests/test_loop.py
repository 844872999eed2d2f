"""The training loop on simulated engines: real rewards, a real trainer, real checkpoints."""

import os
import signal
import threading

import msgspec
import pytest
import structlog
from seer_rl.errors import TrainError
from seer_sim.engine import SimEngine
from training_runs import (
    BASELINE,
    WAIT_FOR,
    RecordingListener,
    read_metrics,
    reproducible,
    run,
    seer_train,
)

from tests.support.eventually import PATIENCE_S


def test_training_writes_metrics_and_checkpoints_that_are_whole_models(config, tmp_path):
    from transformers import AutoModelForCausalLM

    lines = run(config(), tmp_path / "out")
    assert read_metrics(tmp_path / "out") == lines
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert [line["weight_version"] for line in lines] == [0, 1, 2]
    assert [line["responses"] for line in lines] == [12] * 3
    assert all(0 < line["reward_mean"] < 1 and line["grad_norm"] > 0 for line in lines)
    assert len({line["tokens_sha256"] for line in lines}) == 3
    assert len({line["weights_sha256"] for line in lines}) == 3
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["000002", "000003"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoints" / "000003")


def test_scheduling_does_not_change_the_weights(config, tmp_path):
    path = config()
    seer = run(path, tmp_path / "seer", "plugin.divided_rollout.chunk_tokens=8")
    baseline = run(path, tmp_path / "baseline", *BASELINE, "engine.sim.instances=3")
    assert reproducible(seer) == reproducible(baseline)
    assert [line["chunks"] for line in seer] != [line["chunks"] for line in baseline]


def test_engines_sleep_while_a_colocated_trainer_trains_the_same_weights(config, tmp_path, monkeypatch):
    from seer_session import Session

    calls = []
    for name in ("sleep", "wake", "update_weights"):
        original = getattr(Session, name)

        def noted(self, *arguments, original=original, name=name):
            calls.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(Session, name, noted)
    monkeypatch.setattr("seer_rl.loop.return_freed_memory", lambda: calls.append("return_freed_memory"))
    path = config()
    apart = run(path, tmp_path / "apart", "train.iterations=2")
    assert set(calls) == {"update_weights"}
    calls.clear()
    together = run(path, tmp_path / "together", "train.iterations=2", "train.colocated=true")
    assert calls == ["sleep", "return_freed_memory", "wake", "update_weights"] * 2
    assert reproducible(apart) == reproducible(together)


@pytest.mark.parametrize("fail", ["", "assert response.metadata['index'] != 1\n    "])
def test_what_a_trainer_computes_before_the_last_rewards_changes_nothing(config, tmp_path, monkeypatch, fail):
    from seer_rl.torch_trainer import TorchTrainer

    precompute, compute, computed = TorchTrainer.precompute_reference, TorchTrainer._compute_reference, []
    done = tmp_path / "precomputed"

    def precompute_then_let_rewards_come(self, samples):
        precompute(self, samples)
        done.touch()

    def count(self, batch):
        computed.append(len(batch.ids))
        return compute(self, batch)

    monkeypatch.setattr(TorchTrainer, "precompute_reference", precompute_then_let_rewards_come)
    monkeypatch.setattr(TorchTrainer, "_compute_reference", count)
    path = config(fail + WAIT_FOR.format(held_out=0, file="precomputed").strip())
    overrides = ("train.loss.kl=0.1", f"train.rewards.timeout_s={PATIENCE_S}")
    lines = run(path, tmp_path / "out", *overrides)
    assert [line["failed_rewards"] for line in lines] == [4 if fail else 0] * 3
    # Twelve responses in an iteration; with failures those left are laid out anew.
    assert sum(computed) == 3 * (12 + (8 if fail else 0))
    monkeypatch.delattr(TorchTrainer, "precompute_reference")
    assert reproducible(run(path, tmp_path / "plain", *overrides)) == reproducible(lines)


def test_the_seed_of_the_run_changes_its_responses(config, tmp_path):
    path = config()
    first = run(path, tmp_path / "first", "train.iterations=1")
    second = run(path, tmp_path / "second", "train.iterations=1", "seer.seed=1")
    assert first[0]["tokens_sha256"] != second[0]["tokens_sha256"]


def test_groups_without_an_advantage_are_logged_and_groups_of_one_refused(config, tmp_path):
    path = config("return 1.0")
    with structlog.testing.capture_logs() as logs:
        [line] = run(path, tmp_path / "same", "train.iterations=1")
    assert (line["mixed_groups"], line["grad_norm"]) == (0, 0)
    assert [log["iteration"] for log in logs if log["event"] == "no_advantage"] == [0]
    with pytest.raises(TrainError, match=r"every group has one response.*; set \[rollout\].n"):
        run(path, tmp_path / "alone", "rollout.n=1")


def test_engines_that_disagree_with_the_trainer_stop_training(config, tmp_path):
    result = seer_train(config(), tmp_path / "out", "train.max_dlogp=0.001")
    assert result.exit_code == 2
    assert "do the engines serve the trainer's weights" in result.stderr
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_engines_with_quantised_weights_are_said_to_be_so_once_in_each_line_and_in_the_error(
    config, tmp_path, monkeypatch
):
    start = SimEngine.start

    async def start_quantised(self, sink):
        return msgspec.structs.replace(await start(self, sink), quantization="fp8")

    monkeypatch.setattr(SimEngine, "start", start_quantised)
    path, out = config(), tmp_path / "out"
    result = seer_train(path, out, "train.iterations=2")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.count("the engines' log-probs are those of weights quantised by fp8") == 1
    assert [line["quantization"] for line in read_metrics(out)] == [["fp8"], ["fp8"]]
    result = seer_train(path, tmp_path / "other", "train.max_dlogp=0.001")
    assert result.exit_code == 2
    assert "max_dlogp = 0.001: they are those of weights quantised by fp8; raise it" in result.stderr


def test_a_gradient_that_is_not_a_number_is_one_error_and_leaves_the_checkpoint_before(config, tmp_path):
    result = seer_train(config(), tmp_path / "out", "train.optimizer.learning_rate=1e30")
    assert result.exit_code == 2
    assert "the norm of its gradient nan: the weights would be lost" in result.stderr
    assert [one.name for one in (tmp_path / "out" / "checkpoints").iterdir()] == ["000001"]


def test_a_trainer_that_is_lost_during_a_rollout_ends_it(config, tmp_path, monkeypatch):
    from seer_rl.torch_trainer import TorchTrainer

    notifiers, stopped, stop = [], threading.Event(), SimEngine.stop

    async def note(self):
        stopped.set()
        await stop(self)

    def lose_the_trainer():
        notifiers[0](TrainError("the trainer is lost"))
        assert stopped.is_set()

    monkeypatch.setattr(TorchTrainer, "when_lost", lambda self, notify: notifiers.append(notify))
    monkeypatch.setattr(SimEngine, "stop", note)
    listener = RecordingListener((1, "rollout"), lose_the_trainer)
    with pytest.raises(TrainError, match="the trainer is lost"):
        run(config(), tmp_path / "out", listener=listener)
    assert listener.phases[-1] == (1, "rollout")


def test_a_rank_of_megatron_that_dies_during_a_rollout_ends_it(config, tmp_path, monkeypatch):
    pytest.importorskip("megatron", reason="Megatron-core is not installed: `make setup` installs it")
    from seer_rl.megatron import MegatronTrainer

    ranks, stopped = [], threading.Event()
    enter, stop = MegatronTrainer.__enter__, SimEngine.stop

    def keep(self):
        enter(self)
        ranks.append(self._ranks)
        return self

    async def note(self):
        stopped.set()
        await stop(self)

    def lose_a_rank():
        os.kill(ranks[0].pids[0], signal.SIGKILL)
        assert stopped.wait(PATIENCE_S)

    monkeypatch.setattr(MegatronTrainer, "__enter__", keep)
    monkeypatch.setattr(SimEngine, "stop", note)
    listener = RecordingListener((1, "rollout"), lose_a_rank)
    with pytest.raises(TrainError, match="rank 0 of the trainer was killed by SIGKILL; go on with --resume"):
        run(config(), tmp_path / "out", "train.trainer=megatron", listener=listener)
    assert listener.phases[-1] == (1, "rollout")
