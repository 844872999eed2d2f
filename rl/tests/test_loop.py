"""The loop on simulated engines: real rewards, a real trainer, real checkpoints."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import structlog
from click.testing import CliRunner
from seer_rl.config import load_training
from seer_rl.errors import TrainError
from seer_rl.start import train
from seer_sim.engine import SimEngine

from seer_core.cli import main
from seer_core.errors import ConfigError, InputError, OutputError, PromptError

SPEEDS = {"tokens_per_s", "tail_s", "chunks", "preemptions", "instances_lost", "acceptance_length"}
BASELINE = ("seer.plugins=['group_round_robin']",)


class Quiet:
    """Somebody who looks on, and does something at a phase."""

    def __init__(self, at=None, do=None):
        self.at, self.do = at, do
        self.lines, self.phases = [], []

    def phase(self, iteration, name):
        self.phases.append((iteration, name))
        if (iteration, name) == self.at:
            self.do()

    def responses(self, finished, wanted):
        assert finished <= wanted

    def iterated(self, metrics):
        self.lines.append(metrics)


def run(path, out, *overrides, resume=False, watch=None):
    watch = watch or Quiet()
    train(*load_training(path, overrides), out, watch, resume=resume)
    return watch.lines


def learnt(lines):
    """Return what of metrics must not depend on how anything was scheduled."""
    return [
        {key: value for key, value in line.items() if key not in SPEEDS and not key.endswith("_s")}
        for line in lines
    ]


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_training_writes_metrics_and_checkpoints_that_are_whole_models(config, tmp_path):
    from transformers import AutoModelForCausalLM

    lines = run(config(), tmp_path / "out")
    assert metrics(tmp_path / "out") == lines
    assert [line["iteration"] for line in lines] == [0, 1, 2]
    assert [line["weight_version"] for line in lines] == [0, 1, 2]
    assert [line["responses"] for line in lines] == [12] * 3
    assert all(0 < line["reward_mean"] < 1 and line["grad_norm"] > 0 for line in lines)
    assert len({line["tokens_sha256"] for line in lines}) == 3
    assert len({line["weights_sha256"] for line in lines}) == 3
    names = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert names == ["000002", "000003"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoints" / "000003")


def test_how_responses_are_scheduled_does_not_change_what_is_learnt(config, tmp_path):
    path = config()
    seer = run(path, tmp_path / "seer", "plugin.divided_rollout.chunk_tokens=8")
    baseline = run(path, tmp_path / "baseline", *BASELINE, "engine.sim.instances=3")
    assert learnt(seer) == learnt(baseline)
    assert [line["chunks"] for line in seer] != [line["chunks"] for line in baseline]


def test_engines_sleep_while_a_colocated_trainer_trains_and_learn_the_same(config, tmp_path, monkeypatch):
    from seer_core import Session

    calls = []
    for name in ("sleep", "wake", "update_weights"):
        original = getattr(Session, name)

        def noted(self, *arguments, original=original, name=name):
            calls.append(name)
            return original(self, *arguments)

        monkeypatch.setattr(Session, name, noted)
    monkeypatch.setattr("seer_rl.loop.give_back", lambda: calls.append("give_back"))
    path = config()
    apart = run(path, tmp_path / "apart", "train.iterations=2")
    assert set(calls) == {"update_weights"}
    calls.clear()
    together = run(path, tmp_path / "together", "train.iterations=2", "train.colocated=true")
    assert calls == ["sleep", "give_back", "wake", "update_weights"] * 2
    assert learnt(apart) == learnt(together)


def test_weights_go_by_shared_memory_as_by_a_directory(config, tmp_path):
    path = config()
    by_directory = run(path, tmp_path / "directory", "train.iterations=2")
    shared = run(path, tmp_path / "shared", "train.iterations=2", "train.weights=shared_memory")
    assert learnt(shared) == learnt(by_directory)
    assert (tmp_path / "directory" / "weights").exists()
    assert not (tmp_path / "shared" / "weights").exists()
    again = run(path, tmp_path / "shared", "train.weights=shared_memory", resume=True)
    assert [line["iteration"] for line in again] == [2]


def test_a_trainer_that_cannot_share_its_weights_is_refused(config, tmp_path, monkeypatch):
    from seer_rl.torch_trainer import TorchTrainer

    monkeypatch.delattr(TorchTrainer, "tensors")
    with pytest.raises(ConfigError, match="needs a trainer with a method `tensors`, which 'torch' has not"):
        run(config(), tmp_path / "out", "train.weights=shared_memory")


def test_held_out_prompts_are_evaluated_with_the_same_seeds_and_learnt_by_nobody(config, tmp_path):
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
    assert learnt(lines) == learnt(plain)


WAIT_FOR = """
    if response.metadata["index"] >= {held_out}:
        end = time.monotonic() + 20
        while not (HERE / "{file}").exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert (HERE / "{file}").exists()
    return float(response.token_ids[0] % 2)"""


def test_rewards_of_an_evaluation_are_computed_while_the_next_rollout_goes_on(config, tmp_path):
    path = config(WAIT_FOR.format(held_out=3, file="rolling").strip())
    overrides = (
        "train.iterations=1",
        "train.evaluation.prompts=toy_task.py:prompts",
        "train.evaluation.groups=4",
        "train.rewards.workers=4",
        "train.rewards.timeout_s=30",
    )
    watch = Quiet((0, "rewards"), (tmp_path / "rolling").touch)
    # They come when the next rollout is over: had anybody waited for them before it, they had failed.
    [line] = run(path, tmp_path / "out", *overrides, watch=watch)
    assert [each["failed_rewards"] for each in line["evaluations"]] == [0, 0]


def test_a_checkpoint_is_written_while_the_next_rollout_goes_on(config, tmp_path, monkeypatch, uninterrupted):
    from seer_rl.torch_trainer import TorchTrainer

    rolling, save, waited = threading.Event(), TorchTrainer.save, []

    def slow(self, directory):
        if self._updates == 1:
            waited.append(rolling.wait(60))
        save(self, directory)

    monkeypatch.setattr(TorchTrainer, "save", slow)
    run(config(), tmp_path / "out", watch=Quiet((1, "rollout"), rolling.set))
    assert waited == [True]
    assert learnt(metrics(tmp_path / "out")) == uninterrupted


@pytest.mark.parametrize("fail", ["", "assert response.metadata['index'] != 1\n    "])
def test_what_a_trainer_computes_before_the_last_rewards_changes_nothing(config, tmp_path, monkeypatch, fail):
    from seer_rl.torch_trainer import TorchTrainer

    foresee, compute, computed = TorchTrainer.foresee, TorchTrainer._reference_logprobs, []
    done = tmp_path / "foreseen"

    def foresee_then_let_rewards_come(self, samples):
        foresee(self, samples)
        done.touch()

    def count(self, batch):
        computed.append(len(batch.ids))
        return compute(self, batch)

    monkeypatch.setattr(TorchTrainer, "foresee", foresee_then_let_rewards_come)
    monkeypatch.setattr(TorchTrainer, "_reference_logprobs", count)
    path = config(fail + WAIT_FOR.format(held_out=0, file="foreseen").strip())
    overrides = ("train.loss.kl=0.1", "train.rewards.timeout_s=30")
    lines = run(path, tmp_path / "out", *overrides)
    assert [line["failed_rewards"] for line in lines] == [4 if fail else 0] * 3
    # Twelve responses in an iteration; with failures those left are laid out anew.
    assert sum(computed) == 3 * (12 + (8 if fail else 0))
    monkeypatch.delattr(TorchTrainer, "foresee")
    assert learnt(run(path, tmp_path / "plain", *overrides)) == learnt(lines)


def test_the_seed_of_the_run_changes_its_responses(config, tmp_path):
    path = config()
    first = run(path, tmp_path / "first", "train.iterations=1")
    second = run(path, tmp_path / "second", "train.iterations=1", "seer.seed=1")
    assert first[0]["tokens_sha256"] != second[0]["tokens_sha256"]


def test_a_reward_that_raises_or_hangs_costs_its_response_and_nothing_else(config, tmp_path):
    reward = """
    if response.metadata["index"] == 1 and response.token_ids[0] % 2:
        raise ValueError("no")
    if response.metadata["index"] == 2 and response.token_ids[0] % 3 == 0:
        time.sleep(60)
    return float(len(response.token_ids) % 2)"""
    path, small = config(reward.strip()), ("train.iterations=2", "train.rewards.timeout_s=0.3")
    with structlog.testing.capture_logs() as logs:
        lines = run(path, tmp_path / "out", *small)
    told = [(log["reason"], log["responses"]) for log in logs if log["event"] == "reward_failed"]
    assert {reason for reason, _ in told} == {"ValueError: no", "it took longer than 0.3 s"}
    assert len(told) <= 4
    assert sum(line["failed_rewards"] for line in lines) == sum(responses for _, responses in told)
    again = run(path, tmp_path / "again", *small, *BASELINE)
    assert learnt(lines) == learnt(again)


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


def test_groups_that_can_teach_nothing_are_told_of(config, tmp_path):
    path = config("return 1.0")
    with structlog.testing.capture_logs() as logs:
        [line] = run(path, tmp_path / "same", "train.iterations=1")
    assert (line["mixed_groups"], line["grad_norm"]) == (0, 0)
    assert [log["iteration"] for log in logs if log["event"] == "no_advantage"] == [0]
    with pytest.raises(TrainError, match=r"every group has one response.*; set \[rollout\].n"):
        run(path, tmp_path / "alone", "rollout.n=1")


def test_without_a_single_reward_training_stops(config, tmp_path):
    result = seer(config("raise ValueError('never')"), tmp_path / "out")
    assert result.exit_code == 2
    assert "no response of iteration 0 has a reward" in result.stderr
    assert "ValueError: never" in result.stderr


def test_engines_that_disagree_with_the_trainer_stop_training(config, tmp_path):
    result = seer(config(), tmp_path / "out", "train.max_dlogp=0.001")
    assert result.exit_code == 2
    assert "do the engines serve the trainer's weights" in result.stderr
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize("phase", ["rollout", "rewards", "training", "weights", "checkpoint"])
def test_training_that_broke_off_anywhere_goes_on_with_the_same_losses(
    config, tmp_path, phase, uninterrupted
):
    path, out = config(), tmp_path / "out"
    with pytest.raises(OSError, match="struck"):
        run(path, out, watch=Quiet((1, phase), strike))
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["000001"]
    run(path, out, resume=True)
    assert learnt(metrics(out)) == uninterrupted


def strike():
    raise OSError("struck")


@pytest.fixture(scope="module")
def uninterrupted(write_training, tmp_path_factory):
    """What three iterations of the tests' config learn."""
    folder = tmp_path_factory.mktemp("whole")
    return learnt(run(write_training(folder), folder / "out"))


def test_training_that_was_killed_goes_on_with_the_same_losses(config, tmp_path, uninterrupted):
    path, out = config(), tmp_path / "out"
    command = [
        sys.executable,
        "-c",
        "from seer_main import main; main()",
        "train",
        str(path),
        "--out",
        str(out),
    ]
    with (tmp_path / "stderr").open("w") as stderr:
        killed = subprocess.Popen([*command, "--set", "train.iterations=500"], stderr=stderr)
    try:
        wait_until(lambda: killed.poll() is not None or (out / "checkpoints" / "000001").exists())
        assert killed.poll() is None, (tmp_path / "stderr").read_text()
    finally:
        killed.kill()
        killed.wait()
    for each in (out / "checkpoints").iterdir():  # as if it had been killed in the second iteration
        if each.name != "000001":
            shutil.rmtree(each)
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert learnt(metrics(out)) == uninterrupted


def test_going_on_where_nothing_is_left_or_nothing_began(config, tmp_path):
    path, out = config(), tmp_path / "out"
    begun = seer(path, out, "train.iterations=1", "train.evaluation.prompts=toy_task.py:prompts", resume=True)
    assert begun.exit_code == 0, begun.stderr
    assert re.search(r"iteration 1 of 1  reward 0\.\d+( +held out 0\.\d+){2} .* tokens/s ", begun.stderr)
    left = seer(path, out, "train.iterations=1", resume=True)
    assert left.exit_code == 0
    assert "all 1 iterations are done" in left.stdout


def test_another_run_is_neither_written_over_nor_gone_on_from(config, tmp_path):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    with pytest.raises(OutputError, match="--resume"):
        run(path, out)
    with pytest.raises(ConfigError, match=r"\[train\]\.optimizer, \[seer\]\.seed changed"):
        run(path, out, "seer.seed=3", "train.optimizer.warmup=2", resume=True)
    shutil.copytree(path.parent / "model", path.parent / "copy")
    changes = ("train.model=copy", "rollout.n=3", "rollout.max_tokens=30")
    with pytest.raises(ConfigError, match=r"model, \[rollout\]\.n, \[rollout\]\.max_tokens changed"):
        run(path, out, *changes, resume=True)
    (out / "checkpoints" / "000001" / "training.json").write_text("{")
    with pytest.raises(InputError, match="no state of training"):
        run(path, out, resume=True)


@pytest.mark.parametrize(
    "damage", [os.unlink, lambda file: os.truncate(file, 0), lambda file: os.truncate(file, 9)]
)
def test_a_checkpoint_whose_optimizer_is_damaged_is_one_error(config, tmp_path, damage):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    damage(out / "checkpoints" / "000001" / "optimizer.pt")
    with pytest.raises(ConfigError, match=r"optimizer.pt is no state of an optimizer: .*; delete .*000001"):
        run(path, out, resume=True)


def test_prompts_that_are_none_are_one_error(config, tmp_path):
    path = config()
    with (tmp_path / "toy_task.py").open("a") as file:
        file.write("\n\ndef nothing(iteration, groups, seed):\n    return []\n")
    with pytest.raises(PromptError, match=r"'toy_task\.py:nothing' gave none for iteration 0"):
        run(path, tmp_path / "out", "train.prompts=toy_task.py:nothing")


def test_a_second_run_in_one_directory_at_a_time_is_refused_and_the_first_goes_on(
    config, tmp_path, uninterrupted
):
    path, out = config(), tmp_path / "out"

    def run_again():
        with pytest.raises(OutputError, match=r"another run is training into .*out"):
            run(path, out, resume=True)

    run(path, out, watch=Quiet((1, "rewards"), run_again))
    assert learnt(metrics(out)) == uninterrupted


def test_a_run_whose_metrics_were_moved_away_is_not_written_over_and_keeps_each_line_once(config, tmp_path):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    (out / "metrics.jsonl").rename(tmp_path / "moved.jsonl")
    with pytest.raises(OutputError, match="--resume"):
        run(path, out)
    with pytest.raises(OSError, match="struck"):
        run(path, out, resume=True, watch=Quiet((2, "checkpoint"), strike))
    assert [line["iteration"] for line in metrics(out)] == [1, 2]
    run(path, out, resume=True)
    assert [line["iteration"] for line in metrics(out)] == [1, 2]


@pytest.mark.parametrize("rest", [b'{"iteration":1,"weight_ver', b"\0" * 40])
def test_metrics_whose_last_line_was_cut_are_gone_on_with_and_it_is_said(
    config, tmp_path, uninterrupted, rest
):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(rest)
    run(path, out, "train.iterations=1", resume=True)  # nothing is left, and the plot needs no such line
    with structlog.testing.capture_logs() as logs:
        run(path, out, resume=True)
    [told] = [log for log in logs if log["event"] == "metrics_cut"]
    assert told["reason"].endswith("metrics.jsonl ends in a line that is cut; it is left out")
    assert learnt(metrics(out)) == uninterrupted


def test_metrics_without_a_last_end_of_line_lose_none_and_others_are_one_error(config, tmp_path):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    file = out / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole.rstrip())
    run(path, out, "train.iterations=2", resume=True)
    assert [line["iteration"] for line in metrics(out)] == [0, 1]
    file.write_bytes(b"cut\n" + whole)
    with pytest.raises(OutputError, match=r"metrics\.jsonl:1: no metrics: .*; move it away"):
        run(path, out, resume=True)


def test_a_full_disk_at_a_checkpoint_leaves_the_one_before(config, tmp_path, monkeypatch):
    from seer_rl.torch_trainer import TorchTrainer

    path, out = config(), tmp_path / "out"
    save = TorchTrainer.save

    def full(self, directory):
        if self._updates == 2:
            raise OSError(28, "No space left on device")
        save(self, directory)

    monkeypatch.setattr(TorchTrainer, "save", full)
    with pytest.raises(OutputError, match="No space left"):
        run(path, out)
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["000001"]


def test_a_gradient_that_is_not_a_number_is_one_error_and_leaves_the_checkpoint_before(config, tmp_path):
    result = seer(config(), tmp_path / "out", "train.optimizer.learning_rate=1e30")
    assert result.exit_code == 2
    assert "the norm of its gradient nan: the weights would be lost" in result.stderr
    assert [one.name for one in (tmp_path / "out" / "checkpoints").iterdir()] == ["000001"]


def test_a_disk_that_is_full_when_weights_are_written_is_one_error(config, tmp_path):
    program = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from seer_main import main
main()
"""
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(config()), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert f"cannot write the weights to {out / 'weights'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (out / "checkpoints").exists()


def test_a_rank_of_megatron_that_is_lost_is_one_error_and_training_goes_on_as_if_it_had_not(
    config, tmp_path, monkeypatch
):
    pytest.importorskip("megatron", reason="Megatron-core is not installed: `make setup` installs it")
    from seer_rl.megatron import MegatronTrainer

    path, out = config(), tmp_path / "out"
    parallel = ("train.trainer=megatron", "train.megatron.data_parallel=2")
    expected = run(path, tmp_path / "whole", *parallel)
    train = MegatronTrainer.train
    calls = []

    def lose_a_rank(self, samples):
        calls.append(self)
        if len(calls) == 2:
            os.kill(self._ranks.pids[1], signal.SIGKILL)
        return train(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(MegatronTrainer, "train", lose_a_rank)
        with pytest.raises(TrainError, match="rank 1 of the trainer was ended by SIGKILL"):
            run(path, out, *parallel)
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["000001"]
    run(path, out, *parallel, resume=True)
    assert learnt(metrics(out)) == learnt(expected)
    with pytest.raises(ConfigError, match=r"\[train\].megatron changed"):
        run(path, out, *parallel, "train.megatron.tensor_parallel=2", "train.iterations=4", resume=True)


def test_a_trainer_that_is_lost_during_a_rollout_ends_it(config, tmp_path, monkeypatch):
    from seer_rl.torch_trainer import TorchTrainer

    told, stopped, stop = [], threading.Event(), SimEngine.stop

    async def note(self):
        stopped.set()
        await stop(self)

    def lose_the_trainer():
        told[0](TrainError("the trainer is lost"))
        assert stopped.is_set()

    monkeypatch.setattr(TorchTrainer, "when_lost", lambda self, tell: told.append(tell), raising=False)
    monkeypatch.setattr(SimEngine, "stop", note)
    watch = Quiet((1, "rollout"), lose_the_trainer)
    with pytest.raises(TrainError, match="the trainer is lost"):
        run(config(), tmp_path / "out", watch=watch)
    assert watch.phases[-1] == (1, "rollout")


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
        assert stopped.wait(60)

    monkeypatch.setattr(MegatronTrainer, "__enter__", keep)
    monkeypatch.setattr(SimEngine, "stop", note)
    watch = Quiet((1, "rollout"), lose_a_rank)
    with pytest.raises(TrainError, match="rank 0 of the trainer was ended by SIGKILL; go on with --resume"):
        run(config(), tmp_path / "out", "train.trainer=megatron", watch=watch)
    assert watch.phases[-1] == (1, "rollout")


def test_a_checkpoint_that_failed_is_told_of_beside_what_ended_training(config, tmp_path, monkeypatch):
    from seer_rl.torch_trainer import TorchTrainer

    def full(self, directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TorchTrainer, "save", full)
    path = config()
    with structlog.testing.capture_logs() as logs, pytest.raises(OSError, match="struck"):
        run(path, tmp_path / "both", watch=Quiet((1, "rollout"), strike))
    [told] = [log for log in logs if log["event"] == "checkpoint_failed"]
    assert "No space left on device" in told["reason"]
    with structlog.testing.capture_logs() as logs, pytest.raises(OutputError, match="No space left"):
        run(path, tmp_path / "alone")
    assert "checkpoint_failed" not in [log["event"] for log in logs]


@pytest.mark.parametrize(
    ("override", "error", "match"),
    [
        (
            "train.iteratons=3",
            ConfigError,
            r"unknown key 'iteratons' in \[train\]; did you mean 'iterations'",
        ),
        ("train.loss.clip=3", ConfigError, r"\[train.loss\]"),
        ("train.reward=toy_task.py:rewrd", ConfigError, r"\[train\].reward: 'toy_task.py:rewrd' cannot"),
        ("train.prompts=toy_task.py:promts", ConfigError, r"\[train\].prompts: 'toy_task.py:promts' cannot"),
        ("train.evaluation.prompts=x", ConfigError, r"\[train.evaluation\].prompts: 'x' names no function"),
        ("train.trainer=torhc", ConfigError, r"'torhc' is none; use 'torch' or 'megatron', or name one"),
        ("train.trainer=builtins:print", ConfigError, "made a NoneType, which is no trainer"),
        ("train.trainer=toy_task.py:reward", ConfigError, "reward' raised TypeError: .*; it is called with"),
        ("train.torch.device=gpu", ConfigError, r"\[train.torch\].device: torch cannot use 'gpu': .*; use"),
        ("train.prompts=gone.jsonl", PromptError, "gone.jsonl"),
        ("train.model=nowhere", ConfigError, "nowhere, is no directory"),
        ("train.megatron.tensor_parallel=0", ConfigError, r"\[train\].megatron.tensor_parallel: expected"),
        ("rollout.temperature=0.5", Exception, "temperature 0.5"),
    ],
)
def test_what_is_wrong_with_a_config_is_said(config, tmp_path, override, error, match):
    with pytest.raises(error, match=match):
        run(config(), tmp_path / "out", override)


def test_a_trainer_with_another_vocabulary_than_the_engines_is_refused(config, tmp_path, other_model):
    result = seer(config(), tmp_path / "out", f"train.model={other_model}")
    assert result.exit_code == 2
    assert "the trainer's model has 512 tokens and the engines' 32000" in result.stderr


def test_prompts_of_a_file_are_taken_in_turn(config, tmp_path):
    path = config("return float(response.token_ids[0] % 2) if response.metadata['name'] in 'ABC' else 9.0")
    lines = [json.dumps({"prompt": name, "metadata": {"name": name}}) for name in "ABC"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    rows = run(path, tmp_path / "out", "train.prompts=prompts.jsonl", "train.groups=2", "train.iterations=2")
    assert [row["responses"] for row in rows] == [8, 8]
    assert max(row["reward_mean"] for row in rows) < 1


def seer(path, out, *overrides, resume=False):
    options = [part for override in overrides for part in ("--set", override)]
    arguments = ["train", str(path), "--out", str(out), *options, *(["--resume"] if resume else [])]
    return CliRunner().invoke(main, arguments)


def wait_until(condition):
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
