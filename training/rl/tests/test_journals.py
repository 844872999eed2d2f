"""Training that ends in the middle of a rollout goes on there, with the same losses."""

import subprocess
import sys

import pytest
from seer_rl.journals import RolloutJournals
from training_runs import RecordingListener, make_model, read_metrics, reproducible, run

from seer_core.errors import InputError
from tests.support.eventually import eventually

CONFIG = """
[train]
prompts = "toy_task.py:prompts"
reward = "toy_task.py:reward"
iterations = 2
groups = 3
model = "model"
max_dlogp = 0.0  # the engine makes its log-probs up
[train.evaluation]
prompts = "toy_task.py:prompts"
groups = 1
[train.torch]
micro_tokens = 128
[seer]
plugins = ["divided_rollout"]
engine = "no_model"
[plugin.divided_rollout]
chunk_tokens = 4
[rollout]
n = 4
max_tokens = 40
"""


@pytest.fixture
def config(no_model, write_training, tmp_path):
    """A run on an engine whose tokens are real, where those of simulated ones are never written down."""
    write_training(tmp_path)
    (tmp_path / "model").unlink()
    make_model(tmp_path / "model", 1000)
    path = tmp_path / "toy_task.py"
    path.write_text(
        path.read_text().replace('"prompt": f"{seed} {index}"', '"prompt_token_ids": [5, 6 + index]')
    )
    (tmp_path / "train.toml").write_text(CONFIG)
    return tmp_path / "train.toml"


class Dying(RecordingListener):
    """Raises once so many responses of an iteration's rollout have finished."""

    def __init__(self, iteration, finished):
        super().__init__()
        self.end = iteration, finished

    def responses(self, finished, wanted):
        if self.phases[-1] == (self.end[0], "rollout") and finished == self.end[1]:
            raise OSError("interrupted")


@pytest.fixture(scope="module")
def kept():
    """A list for the metrics that later tests compare with, too."""
    return []


@pytest.fixture
def expected(kept, config, tmp_path):
    """The metrics of the training that nothing interrupts."""
    if not kept:
        kept.append(reproducible(run(config, tmp_path / "whole")))
    return kept[0]


@pytest.mark.parametrize(
    ("iteration", "finished"),
    [
        (0, 7),
        (1, 12),
        pytest.param(0, 1, marks=pytest.mark.long),
        pytest.param(1, 5, marks=pytest.mark.long),
    ],
)
def test_a_rollout_that_was_interrupted_is_gone_on_with(config, expected, tmp_path, iteration, finished):
    out = tmp_path / "out"
    with pytest.raises(OSError, match="interrupted"):
        run(config, out, listener=Dying(iteration, finished))
    lines = run(config, out, resume=True)
    assert reproducible(read_metrics(out)) == expected
    assert lines[0]["resumed_tokens"] >= finished
    assert all(line["resumed_tokens"] == 0 for line in lines[1:])
    assert list((out / "journal").iterdir()) == []


def test_training_that_was_killed_in_a_rollout_goes_on_in_it(config, expected, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-c", "from seer_main import main; main()", "train", config, "--out", out]
    with (tmp_path / "stderr").open("w") as stderr:
        slow = ["--set", "engine.no_model.token_s=0.02"]
        killed = subprocess.Popen([*command, *slow], stderr=stderr)
    try:
        journal = out / "journal/000000/000001.journal"
        eventually(lambda: killed.poll() is not None or (journal.exists() and journal.stat().st_size > 1500))
        assert killed.poll() is None, (tmp_path / "stderr").read_text()
    finally:
        killed.kill()
        killed.wait()
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    metrics = read_metrics(out)
    assert reproducible(metrics) == expected
    assert metrics[0]["resumed_tokens"] > 0


def test_without_a_journal_the_rollout_is_done_again(config, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(OSError, match="interrupted"):
        run(config, out, "train.journal='none'", listener=Dying(0, 5))
    assert not (out / "journal").exists()
    assert run(config, out, resume=True)[0]["resumed_tokens"] == 0


def test_other_settings_in_the_second_life_are_refused(config, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(OSError, match="interrupted"):
        run(config, out, listener=Dying(0, 5))
    with pytest.raises(InputError, match="max_tokens was 40 and is 39 now"):
        run(config, out, "rollout.max_tokens=39", resume=True)


def test_journals_of_iterations_that_a_checkpoint_has_are_dropped(tmp_path):
    journals = RolloutJournals(tmp_path, "system")
    for iteration in (0, 1, 2):
        with journals.open(iteration), journals.open(iteration, held_out=iteration):
            pass
    (tmp_path / "notes").write_text("mine")
    journals.drop(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002", "000002-held-out-2", "notes"]


def test_journals_that_a_killed_process_did_not_drop_go_with_resume(config, tmp_path):
    out = tmp_path / "out"
    run(config, out)
    with RolloutJournals(out / "journal", "system").open(1):
        pass
    run(config, out, resume=True)
    assert list((out / "journal").iterdir()) == []
