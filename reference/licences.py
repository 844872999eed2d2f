"""docs/reference/licences.md: what comes with Seer, and which pinned distributions are not permissive."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from reference.licence_metadata import INTEL, UNKNOWN, normalized
from reference.packages import FOLDERS
from reference.page import ROOT, Page

__all__ = ["ENVIRONMENTS", "RECORD", "flaw_of", "page", "pinned", "recorded", "released_requirements"]

RECORD = ROOT / "requirements" / "licences.toml"

SCRIPT = "scripts/environment.sh"
"""The script that pins uv and PyTorch for each."""

ENVIRONMENTS = {
    ".venv": ("requirements/constraints.txt", SCRIPT),
    ".venv-sglang": tuple(f"requirements/sglang-{each}.txt" for each in ("constraints", "cpu", "nodeps")),
    ".venv-verl": (
        "requirements/verl-constraints.txt",
        "requirements/verl-cpu.txt",
        "scripts/setup-verl",
        SCRIPT,
    ),
    ".venv-clients": ("requirements/clients.txt",),
    ".venv-openenv": ("requirements/openenv.txt",),
    ".venv-verifiers": ("requirements/verifiers.txt",),
    ".venv-docs": ("requirements/docs.txt",),
    "an extra": ("*/pyproject.toml", "*/*/pyproject.toml"),
}
"""The files that pin each environment; extras of Seer's distributions pin others."""

PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD",  # of packages whose metadata lacks the number of clauses
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "HPND",
    "ISC",
    "MIT",
    "MIT-0",
    "MIT-CMU",
    "PSF-2.0",
    "Python-2.0",
    "Unlicense",
    "Zlib",
}
"""Licences of which every dependency may be."""

UNMODIFIED = "its copyleft is for its own files, which Seer neither changes nor distributes"

EXCEPTIONS = {
    "axe-playwright-python": ("MIT AND MPL-2.0", f"{UNMODIFIED}; tests of the documentation's site need it"),
    "certifi": ("MPL-2.0", UNMODIFIED),
    "chardet": (
        "LGPL-2.1-or-later",
        "lm-eval's tables use it as a library; tests alone need it; Seer neither changes nor distributes it",
    ),
    "hypothesis": ("MPL-2.0", f"{UNMODIFIED}; tests alone need it"),
    "intel-*": (
        INTEL,
        "vLLM's build for CPUs loads it, and Intel allows its use; Seer does not distribute it",
    ),
    "orjson": ("MPL-2.0 AND (Apache-2.0 OR MIT)", UNMODIFIED),
    "pathspec": ("MPL-2.0", f"{UNMODIFIED}; builds and the documentation's site need it"),
    "pycountry": (
        "LGPL-2.1-only",
        "vLLM's tokenizers use it as a library; Seer neither changes nor distributes it",
    ),
    "supervisor": ("LicenseRef-Repoze", "a BSD licence with a clause on notices in changed files"),
    "tqdm": ("MPL-2.0 AND MIT", UNMODIFIED),
}
"""Distributions with another licence: the licence, and the reason why it is no obstacle.

A name may be a pattern.
"""

PINNED = re.compile(r"""(?:^|['"])([A-Za-z0-9][\w.-]*)(?:\[[\w,]+\])?==([^\s;+'"]+)""", re.M)


def pinned(files: Iterable[str]) -> dict[str, str]:
    """Return the version of each foreign distribution that files pin, by normalized name.

    ``files`` are patterns of paths in the checkout.
    """
    paths = (path for pattern in files for path in sorted(ROOT.glob(pattern)))
    found = {
        normalized(name): version for path in paths for name, version in PINNED.findall(path.read_text())
    }
    return {name: version for name, version in found.items() if not name.startswith("seer-")}


def recorded() -> dict[str, str]:
    """Return the licence of each ``name==version`` that requirements/licences.toml lists."""
    return {key: str(value) for key, value in tomllib.loads(RECORD.read_text()).items()}


def flaw_of(name: str, version: str, licence: str) -> str | None:
    """Return a sentence about a licence that is not allowed, or None for one that is."""
    allowed = next((each for pattern, (each, _) in EXCEPTIONS.items() if fnmatch(name, pattern)), None)
    if licence == allowed or is_permissive(licence):
        return None
    where = "PERMISSIVE or EXCEPTIONS of reference/licences.py"
    if licence == UNKNOWN:
        return f"{name} {version} has no licence in its metadata: read its files, and add it to BY_HAND"
    return (
        f"{name} {version} has the licence {licence}, which is not allowed: replace it, or argue in {where}"
    )


def is_permissive(licence: str) -> bool:
    """Return whether a choice of licences ends in permissive ones; parentheses are for EXCEPTIONS."""
    return all(
        any(each in PERMISSIVE for each in part.split(" OR "))
        for part in licence.removeprefix("(").removesuffix(")").split(" AND ")
    )


def released_requirements() -> dict[str, set[str]]:
    """Return the names of our distributions that require a foreign one, by its normalized name."""
    found: dict[str, set[str]] = {}
    for file in project_files():
        project = tomllib.loads(file.read_text())["project"]
        needed = [*project.get("dependencies", ())]
        needed += [each for extra in project.get("optional-dependencies", {}).values() for each in extra]
        for each in needed:
            name = normalized(re.split(r"[\[<>=!~; ]", each)[0])
            if not name.startswith("seer-"):
                found.setdefault(name, set()).add(project["name"])
    return found


def project_files() -> Iterator[Path]:
    """Yield the pyproject.toml of each distribution of ours, examples and stubs apart."""
    yield ROOT / "pyproject.toml"
    for folder in (*FOLDERS, "packages"):
        yield from sorted([*ROOT.glob(f"{folder}/pyproject.toml"), *ROOT.glob(f"{folder}/*/pyproject.toml")])


def page() -> Page:
    """Return the page."""
    found = Page(
        "licences.md",
        "Licences",
        "Which licences come with Seer? Seer itself is Apache-2.0. Its wheels contain no code of others but"
        " nanobind (BSD-3-Clause) and robin-map (MIT), which are compiled into the draft index, and Apache"
        " ECharts (Apache-2.0, with zrender and parts of d3, BSD-3-Clause), which each page of `seer report`"
        " contains.",
        "`requirements/licences.toml` lists every distribution that the environments of Seer pin, direct or"
        " not, with the licence of its metadata. `make licences` reads them again when a pin has changed. A"
        " test fails when a distribution has a licence that is not allowed. vLLM and SGLang for NVIDIA GPUs"
        " bring CUDA libraries under NVIDIA's own licence, which are not listed.",
    )
    licences = recorded()
    exceptions = []
    for name, version in sorted({pin for files in ENVIRONMENTS.values() for pin in pinned(files).items()}):
        key = f"{name}=={version}"
        if key not in licences:
            found.flaws.append(f"{key} is pinned, and no licence of it is recorded: run `make licences`")
            continue
        if flaw := flaw_of(name, version, licences[key]):
            found.flaws.append(flaw)
        if not is_permissive(licences[key]):
            exceptions.append((f"`{name}`", version, licences[key], _reason(name)))
    found.heading(2, "Licences that are not permissive")
    found.table(["distribution", "version", "licence", "why it is no obstacle"], exceptions)
    return found


def _reason(name: str) -> str:
    return next((why for pattern, (_, why) in EXCEPTIONS.items() if fnmatch(name, pattern)), "")
