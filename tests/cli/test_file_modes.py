"""Who may read what a run writes: results follow the umask, and the journal is its user's alone."""

import os
import re
import signal
import stat
from pathlib import Path

import pytest

from .helpers import BOUND_S

PAGE = (Path(__file__).parents[2] / "SECURITY.md").read_text()


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_results_follow_the_umask_and_the_journal_is_closed_to_others(start_seer, trickling, tmp_path, umask):
    process = start_seer(
        *trickling(signal=int(signal.SIGTERM), signal_after=2), preexec_fn=lambda: os.umask(umask)
    )
    process.communicate(timeout=BOUND_S)
    out = tmp_path / "out"
    modes = {
        path.relative_to(out).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in out.rglob("*")
        if path.is_file()
    }
    journal = {name: mode for name, mode in modes.items() if name.startswith("journal/")}
    assert journal
    assert set(journal.values()) == {0o600}
    results = {name: mode for name, mode in modes.items() if name not in journal}
    assert set(results) == {"completions.jsonl", "summary.json", "trace.jsonl"}
    assert set(results.values()) == {0o666 & ~umask}
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~umask


def test_the_page_on_security_has_the_bounds_and_the_defaults_of_the_ports():
    from seer_prometheus import Settings

    from seer_host import viewer_port

    assert Settings().host == "127.0.0.1"
    assert f"port {Settings().port}" in PAGE
    text = " ".join(PAGE.split())
    assert f"{viewer_port.MOST_CONNECTIONS} at a time" in text
    assert f"{viewer_port.HEAD_S:g} seconds" in text
    assert viewer_port.FILES_PER_CONNECTION == 8
    assert "an eighth of the files" in text
    for port in ("`--dashboard`", "`prometheus`", "`metrics = true`"):
        assert re.search(rf"^\| .*{port}", PAGE, re.MULTILINE)
