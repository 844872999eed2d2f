"""``seer status`` of a training: how it ended, and how many iterations its metrics have."""

import pytest
from click.testing import CliRunner
from seer_cli import main
from training_runs import RecordingListener, fail, run

from seer_core.errors import ConfigError, OutputError


@pytest.fixture
def status(tmp_path):
    """Return a function that returns the exit status of `seer status`, and its sentence."""

    def status():
        result = CliRunner().invoke(main, ["status", str(tmp_path / "out")])
        return result.exit_code, result.output

    return status


def interrupt():
    raise KeyboardInterrupt


def test_a_training_that_failed_says_why_until_it_goes_on(config, tmp_path, status):
    path, out = config(), tmp_path / "out"
    with pytest.raises(OSError, match="interrupted"):
        run(path, out, listener=RecordingListener((1, "training"), fail))
    code, sentence = status()
    assert code == 1
    assert sentence.endswith("the last one failed with 1 iteration: OSError: interrupted\n")
    with pytest.raises(KeyboardInterrupt):
        run(path, out, resume=True, listener=RecordingListener((2, "rewards"), interrupt))
    words = "ended in order, interrupted with 2 iterations; go on with the same command and --resume\n"
    assert (status()[0], status()[1].endswith(words)) == (0, True)
    run(path, out, resume=True)
    assert (status()[0], status()[1].endswith("ended in order, finished with 3 iterations\n")) == (0, True)
    assert not (out / "status.json").exists()


def test_a_command_that_is_refused_leaves_the_status_of_the_run_before(config, tmp_path, status):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    before = status()
    for error, overrides, resume in ((OutputError, (), False), (ConfigError, ("seer.seed=3",), True)):
        with pytest.raises(error):
            run(path, out, *overrides, resume=resume)
        assert status() == before
