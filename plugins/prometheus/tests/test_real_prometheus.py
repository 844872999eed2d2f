"""Prometheus itself scrapes a run and a server, and answers every query of the board."""

import json
import math
import os
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter
from seer_host.ports import reserved_port
from seer_prometheus.exposition import Exposition
from seer_prometheus.metrics import Metrics
from seer_worker.process.figures import serve_figures

from seer_core.model import InstanceInfo
from seer_core.model.events import InstanceStarted
from tests.support.eventually import PATIENCE_S, eventually

UNPACKED = Path(__file__).parents[3] / "build/prometheus/usr/bin"
PLACES = os.pathsep.join([os.environ.get("PATH", os.defpath), str(UNPACKED)])
SCRAPES = """
scrape_configs:
  - job_name: seer
    scrape_interval: 200ms
    scrape_timeout: 200ms
    {more}
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: engines
    scrape_interval: 200ms
    scrape_timeout: 200ms
    http_sd_configs: [{{url: "http://{target}/targets", refresh_interval: 1s}}]
"""
SETTINGS = """[rollout]
max_tokens = 900
n = 8
[plugin.divided_rollout]
chunk_tokens = 64
[engine.sim]
instances = 2
lengths = { mean_tokens = 300 }
"""


def program(name):
    """Return the path of a program of Prometheus."""
    found = shutil.which(name, path=PLACES)
    if found is None:
        pytest.skip("no Prometheus here; run: make prometheus")
    return found


def get(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=PATIENCE_S) as answer:
        return answer.read().decode()


@pytest.fixture
def port():
    with reserved_port() as one:
        yield one


@pytest.fixture
def scraping(tmp_path):
    """Return a function that starts a Prometheus of a target and returns what answers queries with values."""
    processes, ports = [], ExitStack()

    def start(target, more=""):
        (tmp_path / "prometheus.yml").write_text(SCRAPES.format(target=target, more=more))
        address = f"127.0.0.1:{ports.enter_context(reserved_port())}"
        command = [
            program("prometheus"),
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'prometheus'}",
            f"--web.listen-address={address}",
        ]
        with (tmp_path / "prometheus.log").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))

        def query(expression):
            asked = urllib.parse.urlencode({"query": expression})
            answer = json.loads(get(f"http://{address}/api/v1/query?{asked}"))["data"]["result"]
            return [float(each["value"][1]) for each in answer]

        def ready():
            assert processes[-1].poll() is None, (tmp_path / "prometheus.log").read_text()
            try:
                return get(f"http://{address}/-/ready")
            except urllib.error.URLError:
                return None

        eventually(ready)
        return query

    yield start
    for process in processes:
        process.kill()
        process.wait()
    ports.close()


def board_queries():
    """Return the queries of the board, as Grafana would send them."""
    board = json.loads((files("seer_prometheus") / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(asked) > 12
    return [each.replace("$job", "seer").replace("$__rate_interval", "1m") for each in asked]


def assert_every_query_has_data(query):
    waiting = board_queries()

    def answered():
        waiting[:] = [each for each in waiting if not any(map(math.isfinite, query(each)))]
        return not waiting

    try:
        eventually(answered)
    except AssertionError:
        pytest.fail("no data for: " + "\n".join(waiting))


def assert_promtool_is_content(text):
    checked = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_prometheus_scrapes_a_run_and_answers_every_query_of_the_board(
    scraping, port, start_seer, write_config, write_prompts, tmp_path
):
    config = write_config(
        ["divided_rollout", "context_sched", "grouped_spec", "prometheus"],
        f"{SETTINGS}[plugin.prometheus]\nport = {port}\n",
    )
    prompts = write_prompts(*({"prompt_token_ids": [5] * 8} for _ in range(20_000)))  # more than it can do
    query = scraping(f"127.0.0.1:{port}")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    run = start_seer("run", config, "--prompts", prompts, "--out", tmp_path / "out", **quiet)
    assert_every_query_has_data(query)
    assert run.poll() is None
    assert query("sum(seer_instance_up)") == [2]
    assert_promtool_is_content(get(f"http://127.0.0.1:{port}/metrics"))


def test_prometheus_scrapes_a_server_has_the_tokens_of_its_clients_and_answers_every_query(
    scraping, start_seer, write_config, tmp_path
):
    config = write_config(["divided_rollout", "context_sched", "grouped_spec"], SETTINGS)
    (tmp_path / "token").write_text("a-token-of-the-run\n")
    server = start_seer("serve", config, "--port", "0", "--token-file", tmp_path / "token", stdout=None)
    said = next(filter(None, (re.search(r"running on http://(\S+)", line) for line in server.stderr)))
    address, bearer = said[1], {"Authorization": "Bearer a-token-of-the-run"}
    query = scraping(address, f"authorization: {{credentials_file: {tmp_path / 'token'}}}")
    eventually(lambda: query("seer_groups_total"))
    body = {"prompt": [5] * 8, "n": 8, "max_tokens": 900, "return_token_ids": True}
    request = urllib.request.Request(
        f"http://{address}/v1/completions",
        json.dumps(body).encode(),
        {**bearer, "Content-Type": "application/json"},
    )
    tokens = 0
    for _ in range(4):
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            tokens += sum(len(each["token_ids"]) for each in json.load(answer)["choices"])
    eventually(lambda: query("sum(seer_generated_tokens_total)") == [tokens])
    assert_every_query_has_data(query)
    assert_promtool_is_content(get(f"http://{address}/metrics", **bearer))


def test_prometheus_finds_the_own_figures_of_engines_by_the_addresses_that_a_run_names(scraping, port):
    own = CollectorRegistry()
    Counter("vllm:generation_tokens", "Tokens", ["engine"], registry=own).labels("0").inc(17)
    metrics = Exposition.at("127.0.0.1", port).add(Metrics())
    info = InstanceInfo("vllm-0", 64, 16, 4, 64, metrics_address=serve_figures("127.0.0.1", own))
    metrics.observe(0.0, InstanceStarted(info), [])
    query = scraping(f"127.0.0.1:{port}")
    found = '{engine="vllm-0",exported_engine="0",job="engines"}'
    assert eventually(lambda: query(f"vllm:generation_tokens_total{found}")) == [17]
