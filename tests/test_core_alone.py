"""The core's tests can be imported where neither the simulator nor anything else that computes is installed.

`make core-test` runs them in such an environment.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
ABSENT = (
    *(
        "seer_sim",
        "seer_lab",
        "seer_worker",
        "seer_vllm",
        "seer_mooncake",
        "seer_kv_local",
        "seer_grouped_spec",
    ),
    *("torch", "transformers", "vllm", "mooncake"),
)
ALONE = """
import sys
sys.modules.update(dict.fromkeys({absent!r}))  # an import of one raises an ImportError
import pytest
sys.exit(pytest.main(["tests/core", "--collect-only", "-qx", "-p", "no:cacheprovider", "-p", "no:xdist"]))
"""


def test_the_core_s_tests_need_no_engine_and_no_simulator():
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(absent=ABSENT)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
