"""Ranks that need no trainer."""

import os
import queue
import signal

import pytest
from seer_rl.errors import TrainError
from seer_rl.rank_messages import Train
from seer_rl.ranks import Ranks

from tests.support.patience import PATIENCE_S

HALF = """
import os, sys, time

os.write(int(sys.argv[2]), (100).to_bytes(4, "big") + b"half")
time.sleep(600)
"""


def test_a_rank_that_hangs_in_the_midst_of_its_answer_is_named_in_bounded_time(tmp_path):
    (tmp_path / "half_a_rank.py").write_text(HALF)
    ranks = Ranks("half_a_rank", 1, {"PYTHONPATH": str(tmp_path)}, timeout_s=5.0)
    try:
        with pytest.raises(TrainError, match=r"no rank .* got any further within 5 s, .* is rank 0"):
            ranks.ask(Train())
    finally:
        ranks.close()


def test_a_rank_that_dies_between_two_questions_is_reported_and_the_others_end_in_silence(tmp_path):
    (tmp_path / "idle_rank.py").write_text("import time\ntime.sleep(600)")
    ranks, reported = Ranks("idle_rank", 2, {"PYTHONPATH": str(tmp_path)}, timeout_s=5.0), queue.SimpleQueue()
    try:
        ranks.when_lost(reported.put)
        os.kill(ranks.pids[1], signal.SIGKILL)
        assert "rank 1 of the trainer was killed by SIGKILL; go on with --resume" in str(
            reported.get(timeout=PATIENCE_S)
        )
    finally:
        ranks.close()
    assert reported.empty()
