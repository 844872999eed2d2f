import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from seer_host.installation import PLUGINS, how_to_install, in_checkout
from seer_session.assembly import unknown_plugin

ROOT = Path(__file__).parents[2]
META = tomllib.loads((ROOT / "packages/seer-rollout/pyproject.toml").read_text())["project"]


def test_this_is_a_checkout():
    assert in_checkout()


def test_a_remedy_in_a_checkout_is_its_own_command():
    assert how_to_install("sglang", "`make setup-sglang`") == "run `make setup-sglang` in Seer's checkout"


@pytest.mark.parametrize(
    ("extra", "again", "remedy"),
    [
        ("sglang", False, "run `pip install 'seer-rollout[sglang]'`"),
        ("", False, "run `pip install seer-rollout`"),
        ("", True, "run `pip install --force-reinstall seer-rollout`"),
    ],
)
def test_a_remedy_beside_wheels_is_an_extra_of_theirs(tmp_path, extra, again, remedy):
    assert how_to_install(extra, "`make setup`", again=again, root=tmp_path) == remedy


def remedies(pattern):
    """Return what ``pattern`` finds in the sources, tests apart, in the order of their paths."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [path for path in map(Path, listed.stdout.splitlines()) if "tests" not in path.parts]
    return [found for path in paths for found in re.findall(pattern, (ROOT / path).read_text())]


def test_each_extra_that_a_remedy_names_exists():
    named = remedies(r"""how_to_install\(\s*["']([a-z,-]*)["']""")
    assert len(named) > 10
    extras = {extra for each in named if each for extra in each.split(",")}
    assert extras <= set(META["optional-dependencies"])


def test_a_plugin_of_seers_that_is_not_here_has_its_remedy():
    assert str(unknown_plugin("sglang", "seer.engine")) == (
        "seer.engine: the plug-in 'sglang' is not installed here; run `make setup-sglang` in Seer's checkout"
    )
    assert "no installed plug-in is called 'velr'" in str(unknown_plugin("velr", "seer.engine"))


def test_each_plugin_that_an_environment_may_lack_has_a_remedy():
    light = re.search(r"for technique in (.*?);", (ROOT / "scripts/setup-core").read_text())[1].split()
    folders = {f"plugins/{name}" for name in light} | {"backends/sim", "backends/kv_local", "contrib/rivals"}
    named = set()
    for file in (
        file
        for room in ("plugins", "backends", "training", "contrib")
        for file in ROOT.glob(f"{room}/*/pyproject.toml")
    ):
        if str(file.parent.relative_to(ROOT)) not in folders:
            named |= set(tomllib.loads(file.read_text())["project"].get("entry-points", {}).get("seer", {}))
    assert named == set(PLUGINS)


def test_each_target_that_a_remedy_names_exists():
    targets = set(remedies(r"make (setup[a-z-]*)"))
    assert {"setup", "setup-sglang"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert [
        target for target in sorted(targets) if not re.search(rf"^{target}:", makefile, re.MULTILINE)
    ] == []
