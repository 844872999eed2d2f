"""The campaign of faults, small: that it strikes what it says, and finds every response again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FAULTS = Path(__file__).parents[2] / "benchmarks" / "faults.py"

pytestmark = pytest.mark.engine
pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")


def test_instances_are_killed_and_no_response_is_lost_doubled_or_wrong(tmp_path):
    options = ["--count", "3", "--groups", "2", "--n", "2", "--pools", "local", "--silence", "60"]
    kinds = ["--only", "instance killed", "instance killed in a weight update"]
    done = subprocess.run(
        [
            sys.executable,
            str(FAULTS),
            *options,
            *kinds,
            "--bound",
            "300",
            "--json",
            str(tmp_path / "table.json"),
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads((tmp_path / "table.json").read_bytes())
    assert sum(row["faults"] for row in table) == 3
    killed = next(row for row in table if row["kind"] == "instance killed")
    assert killed["responses"] >= 4
    assert {row[what] for row in table for what in ("lost", "doubled", "wrong")} == {0}
