"""The display of a run, on a terminal and elsewhere."""

import io
import re

from seer_rl.display import TrainDisplay

METRICS = {
    "iteration": 1,
    "reward_mean": 0.5,
    "evaluations": [{"reward_mean": 0.25}],
    "mean_tokens": 20.4,
    "loss": 0.125,
    "dlogp_mean": 1e-6,
    "rollout_s": 2.0,
    "tokens_per_s": 1000.0,
    "resumed_tokens": 0,
    "training_s": 1.0,
    "weights_s": 0.1,
    "quantization": [],
    "failed_responses": 0,
    "failed_rewards": 3,
}


def test_an_iteration_is_one_line_with_its_failures():
    stream = io.StringIO()
    with TrainDisplay(4, stream) as display:
        display.phase(1, "rollout")
        display.responses(3, 12)
        display.iterated(METRICS)
    starting, started, line = stream.getvalue().splitlines()
    assert starting == "starting trainer and engines ..."
    assert re.fullmatch(r"trainer and engines started in \d+ s", started)
    assert line.startswith("iteration 2 of 4  reward 0.500  held out 0.250  length 20")
    assert line.endswith("weights 0.1 s  3 REWARDS FAILED")


def test_tokens_that_an_earlier_process_wrote_are_named_beside_the_throughput_of_the_others():
    stream = io.StringIO()
    with TrainDisplay(4, stream) as display:
        display.iterated({**METRICS, "resumed_tokens": 40630})
    assert "rollout 2.0 s at 1000 tokens/s, 40,630 tokens resumed  training" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_the_current_phase_and_its_responses(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with TrainDisplay(4, stream) as display:
        display.phase(1, "rollout")
        display.responses(3, 12)
    assert "iteration 2 of 4: rollout" in stream.getvalue()
    assert "3 of 12 responses" in stream.getvalue()
