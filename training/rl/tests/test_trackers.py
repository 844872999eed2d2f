"""Metrics beside ``metrics.jsonl``: TensorBoard's and MLflow's own readers read them, wandb gets them."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import training_runs
from seer_rl.trackers import Trackers, points
from structlog.testing import capture_logs

from seer_core.errors import ConfigError
from tests.support.raising import ERRORS, class_of, raise_one

EVALUATED = (
    "train.evaluation.prompts=toy_task.py:prompts",
    "train.evaluation.every=2",
    "train.evaluation.groups=2",
)


def run(path, out, *overrides, resume=False):
    training_runs.run(path, out, *overrides, resume=resume)
    return training_runs.read_metrics(out)


def events(out):
    """Return what TensorBoard shows: [step, value] of each name."""
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' of seer-rl is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(out / "tensorboard"))
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)] for name in found.Tags()["scalars"]
    }


def test_points_are_numbers_by_step_and_an_evaluation_stands_at_the_weights_it_is_of():
    record = {
        "iteration": 4,
        "weight_version": 4,
        "loss": 0.5,
        "rewards_sha256": "f00",
        "responses": 8,
        "evaluations": [
            {"weight_version": 4, "reward_mean": 0.25},
            {"weight_version": 5, "reward_mean": 0.75},
        ],
    }
    assert points(record) == {
        4: {"train/loss": 0.5, "train/responses": 8.0, "evaluation/reward_mean": 0.25},
        5: {"evaluation/reward_mean": 0.75},
    }


@pytest.mark.parametrize("name", ERRORS)
def test_a_tracker_that_raises_any_error_is_left_out_and_the_others_go_on(name):
    class Keeping:
        def __init__(self):
            self.steps, self.closed = [], 0

        def log(self, step, values):
            self.steps.append(step)

        def close(self):
            self.closed += 1

    class Raising(Keeping):
        def log(self, step, values):
            raise_one(name)

        def close(self):
            super().close()
            self.log(0, {})

    raising, keeping = Raising(), Keeping()
    trackers = Trackers([raising, keeping])

    def run():
        for iteration in range(2):
            trackers.iterated({"iteration": iteration, "loss": 0.5, "evaluations": []})
        trackers.close()

    with capture_logs() as logs, ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()  # in the main thread KeyboardInterrupt is Ctrl-C
    assert (keeping.steps, keeping.closed, raising.closed) == ([0, 1], 1, 1)
    assert {(each["event"], each["tracker"]) for each in logs} == {("tracker_failed", "Raising")}
    for each in logs:
        assert class_of(name) in each["reason"]
        assert each["reason"].isprintable()


def test_tensorboard_shows_every_iteration_once_also_after_going_on(config, tmp_path):
    path, out = config(), tmp_path / "out"
    settings = ("train.tracking.tensorboard=true", *EVALUATED)
    run(path, out, *settings, "train.iterations=2")
    lines = run(path, out, *settings, resume=True)
    found = events(out)
    assert found["train/loss"] == [(number, pytest.approx(line["loss"])) for number, line in enumerate(lines)]
    assert [step for step, _ in found["train/rollout_s"]] == [0, 1, 2]
    assert [step for step, _ in found["evaluation/reward_mean"]] == [0, 2, 2, 3]
    assert not any("sha256" in name for name in found)


def test_weights_and_biases_gets_every_iteration_once_also_after_going_on(config, tmp_path, monkeypatch):
    project = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", project)
    path, out = config(), tmp_path / "out"
    settings = ("train.tracking.wandb=ring", *EVALUATED)
    run(path, out, *settings, "train.iterations=2")
    lines = run(path, out, *settings, resume=True)
    (first, again) = project.begun
    assert first["project"] == "ring"
    assert first["config"]["groups"] == 3
    assert (again["id"], again["resume"]) == ("run-1", "allow")
    assert project.axes == {"train/*": "train/iteration", "evaluation/*": "evaluation/iteration"}
    assert project.logged("train/loss") == [(each["iteration"], each["loss"]) for each in lines]
    assert [step for step, _ in project.logged("evaluation/reward_mean")] == [0, 2, 3]
    assert project.finished == 2


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    """MLflow's client, on a store in files."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return MlflowClient()


def mlflow_run(client):
    """Return the only run of the experiment ``ring``."""
    [found] = client.search_runs([client.get_experiment_by_name("ring").experiment_id])
    return found


def test_all_trackers_get_the_same_points_also_after_going_on(config, tmp_path, monkeypatch, mlflow):
    project = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", project)
    path, out = config(), tmp_path / "out"
    names = ("tensorboard=true", "wandb=ring", "mlflow=ring")
    settings = (*(f"train.tracking.{each}" for each in names), *EVALUATED)
    run(path, out, *settings, "train.iterations=2")
    lines = run(path, out, *settings, resume=True)
    assert mlflow_run(mlflow).info.status == "FINISHED"
    run_id = mlflow_run(mlflow).info.run_id
    histories = {
        name: [(point.step, point.value) for point in mlflow.get_metric_history(run_id, name)]
        for name in mlflow_run(mlflow).data.metrics
    }
    assert histories["train/loss"] == [(each["iteration"], each["loss"]) for each in lines]
    assert [step for step, _ in histories["evaluation/reward_mean"]] == [0, 2, 3]
    assert histories == {name: project.logged(name) for name in project.summary if "/iteration" not in name}
    assert {name: dict(points) for name, points in events(out).items()} == {
        name: pytest.approx(dict(points), rel=1e-6) for name, points in histories.items()
    }


def test_a_run_of_mlflow_has_the_settings_of_the_training(config, tmp_path, mlflow):
    run(config(), tmp_path / "out", "train.tracking.mlflow=ring", "train.iterations=1")
    found = mlflow_run(mlflow).data.params
    assert (found["groups"], found["torch.micro_tokens"]) == ("3", "128")


def test_a_store_of_mlflow_that_is_not_there_ends_training_before_it_begins(config, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://")
    with pytest.raises(ConfigError, match=r"MLflow does not begin: .*set MLFLOW_TRACKING_URI"):
        run(config(), tmp_path / "out", "train.tracking.mlflow=ring")


class Wandb:
    """As much of wandb as is used, also as its run."""

    id = "run-1"

    def __init__(self):
        self.begun, self.axes, self.summary, self.lines, self.finished = [], {}, {}, [], 0

    def init(self, **settings):
        self.begun.append(settings)
        return self

    def define_metric(self, names, step_metric):
        self.axes[names] = step_metric

    def log(self, values):
        self.lines.append(values)
        self.summary |= values

    def logged(self, name):
        return [(line[f"{name.split('/')[0]}/iteration"], line[name]) for line in self.lines if name in line]

    def finish(self):
        self.finished += 1


@pytest.mark.parametrize(
    ("modules", "setting", "remedy"),
    [
        (["wandb"], "train.tracking.wandb=ring", "pip install wandb"),
        # Both: MLflow without one of its modules would stay half imported for the tests that follow.
        (["mlflow", "mlflow.tracking"], "train.tracking.mlflow=ring", "pip install mlflow-skinny"),
        (["tensorboard.compat.proto"], "train.tracking.tensorboard=true", r"run `make setup`"),
    ],
)
def test_a_tracker_that_is_not_installed_is_said_before_anything_begins(
    config, tmp_path, monkeypatch, modules, setting, remedy
):
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=remedy):
        run(config(), tmp_path / "out", setting)


def test_a_tracker_that_fails_is_left_out_and_training_goes_on(config, tmp_path, monkeypatch, capsys):
    project = Wandb()
    project.log = lambda *_, **__: 1 / 0
    monkeypatch.setitem(sys.modules, "wandb", project)
    lines = run(config(), tmp_path / "out", "train.tracking.wandb=ring")
    assert len(lines) == 3
    assert "".join(capsys.readouterr()).count("division by zero") == 1


def test_a_plot_is_drawn_at_the_end_and_again_when_nothing_is_left(config, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra 'plot' of seer-rl is not installed")
    path, out = config(), tmp_path / "out"
    run(path, out, *EVALUATED, "train.iterations=2")
    plot = out / "training.png"
    assert plot.read_bytes().startswith(b"\x89PNG")
    plot.unlink()
    run(path, out, *EVALUATED, "train.iterations=2", resume=True)
    assert plot.exists()


def test_without_matplotlib_training_ends_as_it_should_and_says_how_to_get_a_plot(
    config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "seer_rl.plots", None)
    run(config(), tmp_path / "out", "train.iterations=1")
    assert "run `make setup`" in "".join(capsys.readouterr())
    assert not (tmp_path / "out" / "training.png").exists()
