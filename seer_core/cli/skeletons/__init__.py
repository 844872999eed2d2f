"""What ``seer new-plugin`` writes: for each slot a strategy that works, its hook, and its tests."""

from __future__ import annotations

from collections.abc import Mapping
from string import Template

import attrs

from seer_core.cli.skeletons.drafting import DRAFTER, DRAFTER_TESTS
from seer_core.cli.skeletons.kv import KV_POOL, KV_POOL_TESTS
from seer_core.cli.skeletons.policy import (
    OBSERVER,
    OBSERVER_TESTS,
    PLACER,
    PLACER_TESTS,
    PRIORITIZER,
    PRIORITIZER_TESTS,
    SPLITTER,
    SPLITTER_TESTS,
)
from seer_core.cli.skeletons.ports import ENGINES, ENGINES_TESTS

__all__ = ["SKELETONS", "files_of"]


@attrs.frozen
class Skeleton:
    """A slot's plug-in: what it is ``about``, templates of Python, and the config's line that enables it."""

    about: str
    module: str
    tests: str
    dependencies: tuple[str, ...] = ("seer-core",)
    enabled: str = 'plugins = ["$name"]'


def files_of(name: str, slot: str) -> Mapping[str, str]:
    """Return the files of a new plug-in, by path; ``name`` is a valid one."""
    skeleton = SKELETONS[slot]
    words = {
        "name": name,
        "slot": slot,
        "enabled": Template(skeleton.enabled).substitute(name=name),
        "about": skeleton.about,
        "title": skeleton.about[0].upper() + skeleton.about[1:],
        "project": f"seer-{name.replace('_', '-')}",
        "package": f"seer_{name}",
        "strategy": "".join(word.capitalize() for word in name.split("_")),
        "dependencies": ", ".join(f'"{dependency}"' for dependency in skeleton.dependencies),
    }
    files = {
        "pyproject.toml": PYPROJECT,
        "README.md": README,
        f"seer_{name}/__init__.py": skeleton.module,
        f"seer_{name}/py.typed": "",
        f"tests/test_{name}.py": skeleton.tests,
    }
    return {path: Template(text).substitute(words).lstrip("\n") for path, text in files.items()}


PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "$project"
version = "0.1.0"
description = "A Seer plug-in: $about"
readme = "README.md"
requires-python = ">=3.11"
dependencies = [$dependencies]

[project.optional-dependencies]
test = ["seer-core[testing]", "seer-sim"]

[project.entry-points.seer]
$name = "$package"

[tool.setuptools]
packages = ["$package"]

[tool.setuptools.package-data]
$package = ["py.typed"]

[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = "--import-mode=importlib"
"""

README = """
# $project

$title.  Fills Seer's slot `$slot`.

```toml
[seer]
$enabled
```

Its tests inherit Seer's contract for the slot, and roll out with it:

```sh
pip install -e '.[test]'
pytest
```
"""

SKELETONS: Mapping[str, Skeleton] = {
    "splitter": Skeleton("chunks that grow as a response goes on", SPLITTER, SPLITTER_TESTS),
    "prioritizer": Skeleton("the request with the fewest tokens left first", PRIORITIZER, PRIORITIZER_TESTS),
    "placer": Skeleton("a chunk goes where most KV is free", PLACER, PLACER_TESTS),
    "drafter": Skeleton(
        "drafts from what a response has said before", DRAFTER, DRAFTER_TESTS, ("seer-core", "numpy")
    ),
    "engines": Skeleton(
        "engines without a model, for a start", ENGINES, ENGINES_TESTS, enabled='engine = "$name"'
    ),
    "kv_pool": Skeleton(
        "KV in a database of SQLite, for a start",
        KV_POOL,
        KV_POOL_TESTS,
        ("seer-core", "numpy"),
        'kv_pool = "$name"',
    ),
    "observer": Skeleton("counts chunks per instance and how responses ended", OBSERVER, OBSERVER_TESTS),
}
