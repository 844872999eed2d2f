"""All distributions have one version, and their wheels have all files of their packages and nothing else."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
from seer_host.installation import COMMAND_EXTRAS, PLUGINS

from reference.packages import repository_entry_points

ROOT = Path(__file__).parents[1]
META = ROOT / "packages/seer-rollout"


def distributions():
    """Return the metadata of all distributions of the tree, examples and stubs apart, by folder."""
    listed = subprocess.run(
        ["git", "ls-files", "*pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [Path(name) for name in listed.stdout.splitlines()]
    return {
        ROOT / file.parent: tomllib.loads((ROOT / file).read_text())["project"]
        for file in files
        if file.parts[0] not in ("examples", "requirements")
    }


DISTRIBUTIONS = distributions()
RELEASED = {
    folder: project
    for folder, project in DISTRIBUTIONS.items()
    if "Private :: Do Not Upload" not in project.get("classifiers", ())
}
VERSION = DISTRIBUTIONS[ROOT]["version"]
"""That of the core is everyone's."""


@pytest.mark.parametrize("folder", DISTRIBUTIONS, ids=lambda folder: folder.name)
def test_a_distribution_has_the_version_of_the_core_and_needs_the_others_in_it(folder):
    project = DISTRIBUTIONS[folder]
    assert project["version"] == VERSION
    extras = project.get("optional-dependencies", {}).values()
    needed = [*project.get("dependencies", ()), *(each for extra in extras for each in extra)]
    ours = {each for each in needed if each.startswith("seer-")}
    assert {each for each in ours if not each.endswith(f"=={VERSION}")} == set()
    names = {each["name"] for each in RELEASED.values()}
    assert {re.split(r"[\[=]", each)[0] for each in ours} <= names


def test_a_command_of_another_distribution_has_an_extra_that_installs_it():
    assert set(COMMAND_EXTRAS) == {point.name for point in repository_entry_points("seer.commands")}
    assert set(COMMAND_EXTRAS.values()) <= {"", *RELEASED[META]["optional-dependencies"]}


def test_a_plug_in_that_the_package_lacks_has_an_extra_that_installs_it():
    needed = {each.partition("==")[0] for each in RELEASED[META]["dependencies"]}
    offered = {
        name
        for project in RELEASED.values()
        for name in project.get("entry-points", {}).get("seer", {})
        if project["name"] not in needed
    }
    extras = {name: extra for name, (extra, _) in PLUGINS.items() if extra}
    assert set(extras) == offered
    assert set(extras.values()) <= set(RELEASED[META]["optional-dependencies"])


def test_the_changelog_begins_with_the_version_and_the_citation_names_it():
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert re.match(r"## ([^\s,]+)", first)[1] == VERSION, "run `scripts/set-version VERSION`"
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)
    assert cited == VERSION, "run `scripts/set-version VERSION`"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Build the pure wheels; the draft index has a compiler and a minute to itself in `make wheels`."""
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "scripts/build-wheels", "--pure", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return out


def wheel_of(folder, wheels):
    name = RELEASED[folder]["name"].replace("-", "_")
    return wheels / f"{name}-{VERSION}-py3-none-any.whl"


PURE = [folder for folder in RELEASED if not (folder / "CMakeLists.txt").is_file()]


def test_all_pure_distributions_have_a_wheel(wheels):
    assert {path.name for path in wheels.iterdir()} == {wheel_of(each, wheels).name for each in PURE}


@pytest.mark.parametrize("folder", [each for each in PURE if each != META], ids=lambda folder: folder.name)
def test_a_wheel_has_each_file_of_its_package_and_no_test(folder, wheels):
    listed = subprocess.run(
        ["git", "ls-files", "seer_*"], cwd=folder, capture_output=True, text=True, check=True
    )
    wanted = {name for name in listed.stdout.splitlines() if (folder / name).is_file()}
    with ZipFile(wheel_of(folder, wheels)) as wheel:
        files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert wanted <= files, sorted(wanted - files)
    package = min((name for name in wanted if "/" in name), key=len).split("/")[0]
    assert f"{package}/py.typed" in files
    assert [name for name in files if "tests/" in name and "/examples/" not in name] == []


def test_seer_simulates_from_wheels(wheels, tmp_path):
    installed = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-index"]
    pip += ["--no-deps", "--target", str(installed), *map(str, wheels.iterdir())]
    subprocess.run(pip, check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    asked = "import seer_host.installation as i; print(i.__file__); print(i.how_to_install('lab', ''))"
    where, remedy = run("-c", asked).stdout.splitlines()
    assert Path(where).is_relative_to(installed)
    assert remedy == "run `pip install 'seer-rollout[lab]'`"
    done = run("-c", "from seer_main import main; main()", "sim", "synthetic")
    assert done.returncode == 0, done.stderr
    assert "synthetic: 512 responses of 64 groups" in done.stdout
    shutil.copytree(ROOT / "examples/first_rollout", tmp_path, dirs_exist_ok=True)
    options = ("rollout.toml", "--prompts", "prompts.jsonl", "--out", "out")
    done = run("-c", "from seer_main import main; main()", "run", *options)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out/completions.jsonl").read_text().splitlines()) == 512
