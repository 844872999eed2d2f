"""A server that is killed: one error at once, and the same tokens when it is back."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from seer_client import Client, ClientError

from tests.support.patience import PATIENCE_S

CONFIG = """
[seer]
plugins = ["divided_rollout"]
engine = "sim"

[rollout]
max_tokens = 200
"""
RECORDS = [{"prompt": "a", "n": 4, "group_id": "g"}]


@pytest.fixture
def start(tmp_path):
    """Return a function that starts ``seer serve`` and returns the process with its address."""
    processes = []
    (tmp_path / "seer.toml").write_text(CONFIG)

    def run():
        command = [sys.executable, "-c", "from seer_main import main; main()", "serve"]
        command += [str(tmp_path / "seer.toml"), "--port", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                return process, found[1]
        raise AssertionError("the server did not start")

    yield run
    for process in processes:
        process.kill()
        process.wait(PATIENCE_S)
        process.stderr.close()


def test_a_server_that_is_killed_is_one_error_and_gives_the_same_when_it_is_back(start):
    process, url = start()
    with Client(url, patience_s=0) as client, ThreadPoolExecutor(2) as pool:
        first = {each.request_id: each.token_ids for each in client.rollout(RECORDS)}
        groups = [{"group_id": "a", "n": 1}, {"group_id": "b", "n": 1}]
        with client.reserve(groups, prompt_wait_s=600):
            waiting = pool.submit(client.rollout_row, "a", 0, prompt="a")
            with pytest.raises(ClientError, match="no prompt yet"):
                client.rollout_row("b", 0)
            process.kill()
            process.wait(PATIENCE_S)
            with pytest.raises(ClientError, match="was lost"):
                waiting.result(PATIENCE_S)
        with pytest.raises(ClientError, match="no server can be reached"):
            client.state()
    process, url = start()
    with Client(url) as client:
        assert {each.request_id: each.token_ids for each in client.rollout(RECORDS)} == first
