"""Pages whose commands and Python run here, on simulated engines; long ones on smaller workloads."""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from seer_host.config_files import make_config
from seer_host.tables import structure
from seer_lab.foreign.slime_dump import GUIDE
from seer_lab.policies import POLICIES
from seer_lab.recorded import read_recorded
from seer_lab.traces import read_lengths

from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).parents[1]
DATA = ROOT / "lab/tests/data"
REQUEST = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
SHORT = {
    "synthetic": ("--lengths", "groups=6", "--lengths", "mean_tokens=200", "--lengths", "cap_tokens=900"),
    "qwen2-vl-72b": ("--scale", "0.0625", "--lengths", "mean_tokens=400", "--lengths", "cap_tokens=900"),
}
"""Options that make a workload of a page small; the last one of a name holds."""


def page(name):
    return (ROOT / name).read_text("utf-8")


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


def commands(text):
    return [line for block in blocks(text, "sh") for line in block.splitlines()]


FIRST, COMPARE, LOGS = map(page, ("docs/start/first-rollout.md", "docs/guides/compare-policies.md", GUIDE))
OPERATE = page("docs/guides/operate.md")
TABLES = {
    "engine.vllm": "seer_vllm.plugin",
    "kv_pool.local": "seer_kv_local",
    "launcher.ray": "seer_ray.plugin",
}
"""The modules with the settings of the tables of that page."""


@pytest.fixture
def run(seer):
    """Return a function that runs a command of a page, which has to succeed, and returns what it printed."""

    def run(command):
        program, *arguments = shlex.split(command)
        small = SHORT.get(arguments[1], ()) if arguments[0] in ("sim", "sweep") else ()
        result = seer(*arguments, *small)
        assert (program, result.exit_code) == ("seer", 0), result.output
        return result.stdout

    return run


def test_the_python_of_the_readme_runs_as_it_stands(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (source,) = blocks(page("README.md"), "python")
    exec(compile(source, "README.md", "exec"), {})
    steps = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in steps] == ["step 0", "step 1", "step 2"]


def test_the_commands_of_the_first_rollout_run_and_its_table_is_what_its_example_gives(
    run, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    printed = {command: run(command) for command in commands(FIRST) if "examples/first_rollout" in command}
    found = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in printed["seer compare examples/first_rollout/rollout.toml"].splitlines()
        if len(cells := line.split("│")) > 3
    }
    table = FIRST.partition("| figure |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len(rows) == 9
    assert {name: found[name] for name, *_ in rows} == {name: cells for name, *cells in rows}


@pytest.fixture
def lengths(tmp_path, monkeypatch, distribution, seer, write_config, write_prompts):
    """A directory with the lengths, the finished run and the plug-in that the page about policies names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.jsonl").write_text(blocks(COMPARE, "jsonl")[0])
    distribution("shortest_first", page("examples/plugins/prioritizer/seer_fewest_left/__init__.py"))
    config = write_config(["divided_rollout", "context_sched", "grouped_spec"])
    config = config.rename(tmp_path / "config.toml")
    prompts = write_prompts(*({"prompt": "once more", "n": 2, "max_tokens": 60} for _ in range(2)))
    for command, *arguments in (
        ("run", "--prompts", prompts, "--out", "out/first"),
        ("profile", "--context", 64, "--context", 1024, "--out", "profile.json"),
        ("compare", "--json", "compare.json"),
    ):
        assert seer(command, config, *arguments).exit_code == 0


@pytest.mark.usefixtures("lengths")
def test_the_commands_of_the_page_about_policies_run(run):
    for command in commands(COMPARE):
        run(command)


def test_the_page_about_policies_lists_every_one_and_no_other():
    section = COMPARE.partition("## Policies")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`([^`]+)`", row)} == set(POLICIES)


def test_the_commands_of_the_page_about_logs_run_and_its_python_reads_dumps_alike(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "verl", "rollouts")
    shutil.copytree(DATA / "slime", "dumps")
    (tmp_path / "my_model").symlink_to(ROOT / "examples/tiny_reasoner/weights")
    (tmp_path / "requests.jsonl").write_text(json.dumps(REQUEST) + "\n")
    exec(compile(blocks(LOGS, "python")[0], GUIDE, "exec"), {})
    for command in commands(LOGS):
        run(command)
    converted = read_lengths(tmp_path / "lengths.jsonl")
    recorded = read_recorded(tmp_path / "dumps").iterations
    assert [[(group.prompt_tokens, group.output_tokens) for group in groups] for groups in converted] == [
        [(group.prompt_tokens, group.output_tokens) for group in groups] for groups in recorded
    ]


@pytest.fixture
def operated(tmp_path, monkeypatch, write_prompts):
    """A directory with a config and prompts of the names that the page for operators gives them."""
    monkeypatch.chdir(tmp_path)
    tables = '[seer]\nplugins = ["divided_rollout", "length_posterior", "grouped_spec"]\nengine = "sim"\n'
    tables += "[engine.sim]\ninstances = 4\n[engine.sim.lengths]\nmean_tokens = 60\n"
    (tmp_path / "rollout.toml").write_text(f"{tables}{blocks(OPERATE, 'toml')[-1]}")
    write_prompts(*({"prompt": "once more", "n": 2, "max_tokens": 90, "group_id": f"g{i}"} for i in range(6)))
    return tmp_path


@pytest.mark.usefixtures("operated")
def test_the_commands_of_the_page_for_operators_run(run):
    found = [line.partition("#")[0].strip() for line in commands(OPERATE)]
    found = [line for line in found if line.startswith("seer ")]
    rows = re.findall(r"^\|[^|]+\| `(seer (?:status|report|explain)[^`]*)` \|$", OPERATE, re.M)
    assert (len(found), len(rows)) == (5, 3)
    begun = next(place for place, line in enumerate(found) if line.startswith("seer run"))
    for line in (*found[: begun + 1], *rows, *found[begun + 1 :]):
        run(line.replace("GROUP/INDEX", "g1/1"))


def test_the_tables_of_the_page_for_operators_have_settings_that_there_are():
    whole = {}
    for text in blocks(OPERATE, "toml"):
        for name, table in tomllib.loads(text).items():
            whole.setdefault(name, {}).update(table)
    config = make_config(whole, base_dir=ROOT, origin="the page")
    assert (config.seer.restarts.attempts, config.seer.kv_pool) == (3, "local")
    for name, module in TABLES.items():
        kind, _, table = name.partition(".")
        found = structure(whole[kind][table], importlib.import_module(module).Settings, name)
        assert {*whole[kind][table]} <= {*found.__struct_fields__}


def test_the_calls_of_the_page_for_operators_limit_and_drain_an_instance(operated):
    [calls] = [text for text in blocks(OPERATE, "sh") if "curl" in text]
    assert calls.startswith("TOKEN=$(cat token.txt)\n")
    (operated / "token.txt").write_text("a secret of 24 characters\n")
    (operated / "token.txt").chmod(0o600)
    command = [sys.executable, "-c", "from seer_main import main; main()", "serve", "rollout.toml"]
    with subprocess.Popen(
        [*command, "--port", "0", "--token-file", "token.txt"], stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            lines = (re.search(r"running on http://(\S+)", line) for line in server.stderr)
            address = next(filter(None, lines))[1]
            script = calls.replace("127.0.0.1:8000", address).replace("vllm-3", "sim-3")
            script = script.replace("curl ", "curl --silent --show-error --write-out '\\n' ")
            done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, timeout=PATIENCE_S)
        finally:
            server.terminate()
            server.communicate(timeout=PATIENCE_S)
    answers = [json.loads(line)["done"] for line in done.stdout.splitlines() if line]
    assert len(answers) == 2, done
    assert all("sim-3" in answer for answer in answers)


def test_the_placer_of_its_guide_fills_the_slot_in_the_commands_shown(distribution, run):
    guide = page("docs/guides/write-a-placer.md")
    distribution("fewest", blocks(guide, "python")[0])
    for command in commands(guide):
        if command.startswith("seer sim"):
            assert "mine" in run(command)


def test_the_python_of_the_engine_s_guide_is_that_of_the_example():
    files = (ROOT / "examples/plugins/engine").rglob("*.py")
    example = "\n".join(plain(file.read_text("utf-8")) for file in files)
    for source in blocks(page("docs/guides/write-an-engine.md"), "python"):
        assert plain(source) in example


def plain(source):
    """Return code without indentation."""
    return "\n".join(line.strip() for line in source.strip().splitlines())


def test_the_lines_for_wheels_name_the_pytorch_that_the_set_up_installs():
    torch = re.search(r"^torch='?([^'\n]+)'?$", page("scripts/environment.sh"), re.M)[1]
    assert f"pip install '{torch}' --extra-index-url" in page("docs/start/install.md")
