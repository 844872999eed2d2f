"""``seer train --report`` and ``--dashboard``: pages of rollouts, which no training depends on."""

import json
import re
import urllib.request

from seer_rl.config import load_training
from seer_rl.training_run import train
from training_runs import RecordingListener, read_metrics, reproducible, run, seer_train

from seer_core.model.events import RolloutPaused, RolloutResumed
from seer_core.ports.policy import Observer
from tests.support.eventually import PATIENCE_S


def shown(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text("utf-8")).group(1))["runs"]


def test_a_page_has_the_rollouts_of_all_iterations_and_changes_no_loss(config, tmp_path):
    page, path = tmp_path / "train.html", config()
    result = seer_train(path, tmp_path / "out", "train.iterations=3", f"--report={page}")
    assert result.exit_code == 0, result.output
    lines = read_metrics(tmp_path / "out")
    rollouts = shown(page)
    assert all(each["whole"] for each in rollouts)
    tokens, expected = [each["figures"]["tokens"] for each in rollouts], [line["tokens"] for line in lines]
    assert [each for each in tokens if each in expected] == expected  # evaluations are among them
    assert reproducible(lines) == reproducible(run(path, tmp_path / "without", "train.iterations=3"))


class Events(Observer):
    """Keeps events."""

    def __init__(self):
        self.events = []

    def observe(self, now, event, commands):
        self.events.append(event)


class PausingListener(RecordingListener):
    """Pauses each rollout from its page, and lets it go on, when its first response has come."""

    def __init__(self, printed):
        super().__init__()
        self.printed, self.address, self.answers = printed, "", []

    def responses(self, finished, wanted):
        self.address = self.address or re.search(r"dashboard: (\S+)", self.printed()).group(1)
        if finished == 1:
            for do in ("pause", "resume"):
                self.answers.append(self.command(do=do, by="Ada"))

    def command(self, **command):
        page, _, token = self.address.partition("?token=")
        body = json.dumps(command).encode()
        request = urllib.request.Request(f"{page}command", body, {"X-Seer-Token": token})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.read().decode()


def test_a_training_is_paused_from_its_page_and_keeps_its_losses(config, tmp_path, uninterrupted, capsys):
    events, listener = Events(), PausingListener(lambda: capsys.readouterr().err)
    train(*load_training(config(), ()), tmp_path / "out", listener, [events], dashboard=0)
    assert reproducible(listener.lines) == uninterrupted
    times = len(listener.answers) // 2
    assert times >= len(listener.lines)
    paused = "paused: no chunk is sent until the rollout goes on"
    assert listener.answers == [paused, "the rollout goes on"] * times
    asked = [each for each in events.events if isinstance(each, RolloutPaused | RolloutResumed)]
    assert asked == [RolloutPaused("Ada (dashboard)"), RolloutResumed("Ada (dashboard)")] * times
