"""``seer new-plugin``: what it writes passes its own tests at once, and so does the page about plug-ins."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import seer_testing
from seer_cli.copying import EXAMPLE_SLOTS, files_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/write-a-plugin.md"
BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<body>.*?)^```$", re.M | re.S)
LIMIT_S = 300


def run(*command, cwd, **environment):
    """Run a command of this Python to its end, which has to be a good one, and return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(site, *projects):
    """Install distributions where only those see them that have ``site`` in their PYTHONPATH."""
    pip = [
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
    ]
    run(*pip, "--target", site, *projects, cwd=site.parent)


def pytest_in(*projects, site):
    """Run the tests of distributions."""
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={site.parent}"]
    return run("-W", "error", "-m", "pytest", *options, *projects, cwd=site.parent, PYTHONPATH=str(site))


@pytest.fixture
def new_plugin(seer, tmp_path):
    """Return a function that writes a plug-in and returns its directory."""

    def write(name, slot):
        result = seer("new-plugin", name, "--slot", slot, "--path", tmp_path / name)
        assert result.exit_code == 0, result.output
        return tmp_path / name

    return write


def test_there_is_an_example_for_every_slot():
    for slot in EXAMPLE_SLOTS:
        files = files_of("mine", slot)
        assert {"pyproject.toml", "README.md", "seer_mine/__init__.py", "seer_mine/py.typed"} <= set(files)
        assert "tests/test_mine.py" in files


def test_examples_import_only_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [contract] = [each for each in contracts if "import only the contract" in each["name"]]
    for slot in EXAMPLE_SLOTS:
        source = files_of("mine", slot)["seer_mine/__init__.py"]
        nodes = ast.walk(ast.parse(source))
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not imported & set(contract["forbidden_modules"]), slot


def test_examples_come_with_the_wheel_that_a_source_distribution_makes(tmp_path):
    source = tmp_path / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("cli", "examples/plugins"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run("-c", build, tmp_path, cwd=source / "cli")
    [archive] = tmp_path.glob("*.tar.gz")
    install(tmp_path / "site", archive)
    code = "from seer_cli import main; main()"
    options = ("new-plugin", "mine", "--slot", "kv_pool")
    site = str(tmp_path / "site")
    shown = run("-c", code, *options, cwd=tmp_path, PYTHONPATH=site)
    assert "plug-in 'mine'" in shown
    copied = {str(file.relative_to(tmp_path / "mine")) for file in (tmp_path / "mine").rglob("*.*")}
    assert copied == set(files_of("mine", "kv_pool"))
    assert (tmp_path / "site" / "seer_cli" / "examples" / "kv_pool").is_dir()


def test_a_new_plug_in_of_every_slot_passes_its_own_tests_at_once(new_plugin, tmp_path):
    projects = [new_plugin(f"my_{slot}", slot) for slot in EXAMPLE_SLOTS]
    site = tmp_path / "site"
    install(site, *projects)
    summary = pytest_in(*(project / "tests" for project in projects), site=site)
    assert re.search(r"\d\d passed", summary)
    assert "skipped" not in summary


@pytest.mark.engine
def test_a_third_party_prioritizer_runs_unchanged_on_vllm_s_own_scheduler(new_plugin, tmp_path):
    pytest.importorskip("vllm")
    site, rows = tmp_path / "site", {}
    install(site, new_plugin("mine", "prioritizer"))
    sizes = ("groups=6", "group_size=4", "mean_tokens=60", "cap_tokens=200", "prompt_tokens=32")
    small = [f"--lengths={size}" for size in sizes]
    scarce = ["--instances", 1, "--pressure", 5]
    # Of so few chunks, one that ends early a block sooner or later changes the total by several percent.
    scarce += ["--set", "plugin.divided_rollout.chunk_tokens=32"]
    scarce += ["--set", "plugin.divided_rollout.reserved_share=1"]
    for engine in ("sim", "paced"):
        file = tmp_path / f"{engine}.json"
        command = "import seer_cli as cli; cli.main()"
        policies = ["--policy", "divided", "--policy", "mine=divided_rollout,mine"]
        options = ["--engine", engine, *small, *scarce, *policies, "--json", file]
        run("-c", command, "sim", "synthetic", *options, cwd=tmp_path, PYTHONPATH=str(site))
        rows[engine] = {row["name"]: row for row in json.loads(file.read_text())}
    for policy in ("divided", "mine"):
        paced, simulated = rows["paced"][policy], rows["sim"][policy]
        assert paced["summaries"][0]["tokens"] == simulated["summaries"][0]["tokens"]
        assert paced["total_time_s"] == pytest.approx(simulated["total_time_s"], rel=0.05)
    assert rows["paced"]["mine"]["plugins"] == ["divided_rollout", "mine"]


def test_new_plug_ins_are_well_kept_under_a_long_name(new_plugin):
    keys = {"engines": "engine = {}", "kv_pool": "kv_pool = {}", "placer": "placer = {}"}
    for slot in EXAMPLE_SLOTS:
        name = f"a_rather_long_name_for_a_{slot}"
        project = new_plugin(name, slot)
        metadata = tomllib.loads((project / "pyproject.toml").read_text())
        assert metadata["project"]["name"] == f"seer-{name.replace('_', '-')}"
        assert metadata["project"]["entry-points"] == {"seer": {name: f"seer_{name}"}}
        assert keys.get(slot, "plugins = [{}]").format(f'"{name}"') in (project / "README.md").read_text()
        assert "$" not in "".join(file.read_text() for file in project.rglob("*.py"))
        run("-m", "ruff", "check", "--config", ROOT / "pyproject.toml", "--ignore", "D", ".", cwd=project)


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("Shortest-First", "no name for a plug-in: .* for example 'shortest_first'"),
        ("9lives", "no name for a plug-in: .* for example 'lives'"),
        ("a__b", "no name for a plug-in: .* for example 'a_b'"),
        ("../escape", "no name for a plug-in: .* for example 'escape'"),
        ("é", "no name for a plug-in: use lower-case words joined by _$"),
        ("none", "stands for no plug-in"),
        ("sim", "a plug-in called 'sim' is installed already"),
        ("core", "a package called seer_core is installed already"),
    ],
)
def test_a_name_that_will_not_do_is_refused(seer, tmp_path, name, fact):
    result = seer("new-plugin", name, "--slot", "placer", "--path", tmp_path / "new")
    assert result.exit_code == 2
    assert re.search(fact, result.stderr.strip())
    assert not (tmp_path / "new").exists()


def test_a_second_slot_is_refused_and_not_left_out(seer, tmp_path):
    result = seer("new-plugin", "both", "--slot", "splitter", "--slot", "placer", "--path", tmp_path / "both")
    assert result.exit_code == 2
    assert "--slot is given 2 times; write a plug-in for 'splitter', and add other hooks" in result.stderr
    assert not (tmp_path / "both").exists()


def test_what_is_there_is_never_overwritten(seer, new_plugin, tmp_path):
    project = new_plugin("mine", "placer")
    before = {file: file.read_bytes() for file in project.rglob("*") if file.is_file()}
    (tmp_path / "file").write_text("precious")
    for path in (project, tmp_path / "file"):
        result = seer("new-plugin", "mine", "--slot", "splitter", "--path", path)
        assert result.exit_code == 2
        assert f"{path} is there already" in result.stderr
    assert {file: file.read_bytes() for file in project.rglob("*") if file.is_file()} == before
    assert (tmp_path / "file").read_text() == "precious"


def test_a_place_that_cannot_be_written_is_named(seer, tmp_path):
    (tmp_path / "file").touch()
    result = seer("new-plugin", "mine", "--slot", "placer", "--path", tmp_path / "file" / "mine")
    assert result.exit_code == 2
    assert "name another place with --path" in result.stderr


def test_the_help_shows_an_example_and_the_slots(seer):
    text = seer("new-plugin", "--help").output
    assert "seer new-plugin shortest_first --slot prioritizer" in text
    assert all(slot in text for slot in EXAMPLE_SLOTS)


def test_the_page_about_plug_ins_names_every_slot_and_every_contract():
    table = PAGE.read_text().partition("| slot | Protocol |")
    rows = [line for line in "".join(table[1:]).splitlines() if line.startswith("| ")]
    assert {row.split("|")[1].strip() for row in rows} == {"slot", *EXAMPLE_SLOTS}
    contracts = {name for name in seer_testing.__all__ if name.endswith("Contract")}
    assert {name for row in rows for name in re.findall(r"`(\w+Contract)`", row)} == contracts


def test_the_page_about_plug_ins_does_what_it_says(tmp_path, write_config, write_prompts):
    chunks = "[plugin.divided_rollout]\nchunk_tokens = 32"
    config = write_config(["divided_rollout"], chunks, seer='kv_pool = "none"')
    prompts = [{"prompt": "x" * (9 + number), "n": 4, "max_tokens": 200} for number in range(6)]
    paths = {
        "examples/tiny_reasoner/demo.toml": str(config),
        "examples/tiny_reasoner/prompts.jsonl": str(write_prompts(*map(json.dumps, prompts))),
    }
    page = PAGE.read_text().replace("\\\n", " ")
    blocks = [(match["language"], match["body"]) for match in BLOCK.finditer(page)]
    commands = [line for language, body in blocks if language == "sh" for line in body.splitlines()]
    scripts = [line for line in commands if line.startswith("seer ")]
    assert [line.split()[1] for line in scripts] == ["new-plugin", "sim", "run", "sim", "compare"]
    site = tmp_path / "site"

    def script(line):
        words = [paths.get(word, word) for word in shlex.split(line)[1:]]
        command = "import seer_cli as cli; cli.main()"
        return run("-W", "error", "-c", command, *words, cwd=tmp_path, PYTHONPATH=str(site))

    script(scripts[0])
    shown = [body for language, body in blocks if language == "python"]
    written = {body.splitlines()[0][2:]: body for body in shown if body.startswith("# ")}
    assert all((tmp_path / path).is_file() for path in written), "the page shows files that are not written"
    for path, body in written.items():
        (tmp_path / path).write_text(body)
    with (tmp_path / "longest_group/seer_longest_group/__init__.py").open("a") as module:
        module.writelines(f"\n\n{body}" for body in shown if not body.startswith("# "))
    install(site, tmp_path / "longest_group")
    assert "13 passed" in pytest_in(tmp_path / "longest_group" / "tests", site=site)
    assert "mine" in script(scripts[1])
    script(scripts[2])
    assert "mine" in script(scripts[3])
    assert "+ longest_group" in script(scripts[4])
