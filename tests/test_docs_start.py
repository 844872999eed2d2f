"""The pages that a newcomer reads first: their commands and their Python run, and they stay short."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from seer_lab.policies import parse_policy

from seer_core.plugins.config import load_config
from seer_core.plugins.loading import fill_slots

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
FIRST = (ROOT / "docs/start/first-rollout.md").read_text("utf-8")
EXAMPLE = ROOT / "examples/first_rollout"
ACTIVATION = ". .venv/bin/activate"


def blocks(text, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)


SIMULATED = [
    line
    for block in blocks(FIRST, "sh")
    for line in block.splitlines()
    if "examples/first_rollout" in line or "synthetic" in line
]


def test_the_python_of_the_readme_runs_as_it_stands(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (source,) = blocks(README, "python")
    exec(compile(source, "README.md", "exec"), {})
    steps = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in steps] == ["step 0", "step 1", "step 2"]
    assert len(set(steps)) == 3


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130


@pytest.mark.parametrize(
    "page",
    sorted([*ROOT.glob("docs/start/*.md"), *ROOT.glob("docs/guides/*.md")]),
    ids=lambda page: page.stem,
)
def test_a_start_page_or_a_guide_is_no_longer_than_250_lines(page):
    assert len(page.read_text("utf-8").splitlines()) <= 250


@pytest.mark.parametrize("command", SIMULATED)
def test_a_command_of_the_first_rollout_runs(command, seer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    program, *arguments = shlex.split(command)
    result = seer(*arguments)
    assert (program, result.exit_code) == ("seer", 0), result.output


def test_the_first_rollout_is_the_example_and_its_table_what_the_example_gives(seer):
    shown, shipped = blocks(FIRST, "toml")[0], (EXAMPLE / "rollout.toml").read_text("utf-8")
    assert values(shown) == values(shipped.partition("\n[compare]")[0])
    printed = seer("compare", EXAMPLE / "rollout.toml").stdout
    table = [line for line in FIRST.splitlines() if line.startswith("| ")]
    rows = [row for row in table if row.split("|")[1].strip() in FIGURES]
    assert len(rows) == len(FIGURES)
    for row in rows:
        name, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        (line,) = [line for line in printed.splitlines() if line.split("│")[1:2] == [f" {name} ".ljust(25)]]
        assert cells == [cell.strip() for cell in line.split("│")[2:-1]]


FIGURES = {
    *("tokens per second", "total time, s", "tail time, s", "preemptions", "recomputed tokens"),
    *("tokens from the KV pool", "chunks", "migrations", "same tokens"),
}


def values(toml):
    return [re.sub(r"\s+#.*", "", line) for line in toml.splitlines() if line and not line.startswith("#")]


def test_one_page_alone_shows_the_activation_line():
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [page for page in listed.stdout.splitlines() if ACTIVATION in (ROOT / page).read_text("utf-8")]
    assert pages == ["docs/start/install.md"]


ENGINE = (ROOT / "docs/guides/write-an-engine.md").read_text("utf-8")


@pytest.mark.parametrize("source", blocks(ENGINE, "python"))
def test_the_python_of_the_engine_s_guide_is_that_of_the_example(source):
    folder = ROOT / "examples/plugins/engine"
    example = "\n".join(file.read_text("utf-8") for file in folder.rglob("*.py"))
    assert plain(source) in plain(example)


def plain(source):
    """Return code without indentation."""
    return "\n".join(line.strip() for line in source.strip().splitlines())


def test_the_placer_of_its_guide_fills_the_slot_in_the_command_shown(distribution, seer):
    page = (ROOT / "docs/guides/write-a-placer.md").read_text("utf-8")
    (source,) = blocks(page, "python")
    distribution("fewest", source)
    commands = [block for block in blocks(page, "sh") if block.startswith("seer sim")]
    for command, policies in zip(
        commands, (["divided", "mine"], ["divided", "mine", "rr", "core"]), strict=True
    ):
        result = seer(*shlex.split(command)[1:], "--lengths", "groups=8")
        assert result.exit_code == 0, result.output
        rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.startswith("│ ")]
        figures = {row[0].strip(): tuple(row[1:]) for row in rows if row[0].strip()}
        assert list(figures) == policies
        assert len(set(figures.values())) == len(policies)


def test_the_lines_for_wheels_name_the_pytorch_that_the_set_up_installs():
    page = (ROOT / "docs/start/install.md").read_text("utf-8")
    script = (ROOT / "scripts/environment.sh").read_text("utf-8")
    torch, index = (
        re.search(rf"^{name}='?([^'\n]+)'?$", script, re.M)[1] for name in ("torch", "torch_index")
    )
    (block,) = [each for each in blocks(page, "sh") if "--find-links dist 'seer-rollout[" in each]
    assert block.splitlines()[0] == f"pip install '{torch}' --extra-index-url {index}"
    (extras,) = re.findall(r"seer-rollout\[([\w,]+)\]", block)
    known = tomllib.loads((ROOT / "packages/seer-rollout/pyproject.toml").read_text("utf-8"))
    assert {"vllm", "trl"} <= set(extras.split(",")) <= set(known["project"]["optional-dependencies"])
    removed = block.splitlines()[2].removeprefix("pip uninstall -y ").split()
    assert all(name in (ROOT / "scripts/try-wheels").read_text("utf-8") for name in removed)


def test_the_two_slots_of_the_guide_are_filled_as_it_says(distribution, write_config):
    page = (ROOT / "docs/guides/write-a-plugin.md").read_text("utf-8")
    distribution("mine", TWO_SLOTS)
    (config,) = [each for each in blocks(page, "toml") if 'splitter = "mine"\nplacer = "mine"' in each]
    path = write_config()
    path.write_text(config.replace('"vllm"', '"sim"'))
    owners = {slot.name: slot.owner for slot in fill_slots(load_config(path)).slots}
    assert (owners["splitter"], owners["placer"]) == ("mine", "mine")
    (command,) = re.findall("`(seer sim [^`]*splitter:mine[^`]*)`", page)
    policy = parse_policy(shlex.split(command)[-1])
    assert policy.plugins == ("divided_rollout", "mine")
    assert policy.overrides[1:] == ("seer.slots.splitter=mine", "seer.slots.placer=mine")


TWO_SLOTS = """
from seer_core.plugins.hookspecs import hookimpl
from seer_core.scheduling.scheduler import Policies

@hookimpl
def seer_make_splitter():
    return type(Policies().splitter.strategy)()

@hookimpl
def seer_make_placer():
    return type(Policies().placer.strategy)()
"""


def test_the_page_for_operators_has_each_part_with_its_line_and_its_command():
    page = (ROOT / "docs/guides/operate.md").read_text("utf-8")
    for part in ("The engine", "The KV pool", "The launcher", "Watching", "Deaths", "Slow instances"):
        _, _, section = page.partition(f"\n## {part}\n")
        assert "`" in section.partition("\n## ")[0], part
    tables = [tomllib.loads(each) for each in blocks(page, "toml")]
    assert {key for table in tables for key in table.get("seer", {})} >= {
        "engine",
        "kv_pool",
        "launcher",
        "restarts",
    }
