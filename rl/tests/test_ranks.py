"""Ranks that need no trainer."""

import pytest
from seer_rl.errors import TrainError
from seer_rl.ranks import Ranks

HALF = """
import os, sys, time

os.write(int(sys.argv[3]), (100).to_bytes(4, "big") + b"half")
time.sleep(600)
"""


def test_a_rank_that_hangs_in_the_midst_of_its_answer_is_named_in_bounded_time(tmp_path):
    (tmp_path / "half_a_rank.py").write_text(HALF)
    ranks = Ranks("half_a_rank", 1, {"PYTHONPATH": str(tmp_path)}, timeout_s=5.0)
    try:
        with pytest.raises(TrainError, match=r"no rank .* got any further within 5 s, .* is rank 0"):
            ranks.ask("anything")
    finally:
        ranks.close()
