"""Every dependency has a licence that is allowed, and that requirements/licences.toml lists."""

import sysconfig
from importlib.metadata import distributions

from reference.licence_metadata import BY_HAND, licence_of, normalized
from reference.licences import (
    ENVIRONMENTS,
    EXCEPTIONS,
    flaw_of,
    pinned,
    recorded,
    released_requirements,
)
from reference.page import ROOT

NVIDIA = ("nvidia-", "cuda-")
"""Libraries of builds for GPUs, which the page mentions and does not list."""

STUBS = {path.name for path in (ROOT / "requirements" / "stubs").iterdir()}
PINS = {f"{name}=={version}" for files in ENVIRONMENTS.values() for name, version in pinned(files).items()}


def installed():
    """Yield name, version and licence of each foreign distribution of this environment."""
    # Of this environment alone: setuptools puts its own copies of others on ``sys.path``.
    for each in distributions(path=sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})):
        metadata = each.metadata
        name = normalized(metadata["Name"])
        if name in STUBS or name.startswith(("seer-", *NVIDIA)):
            continue
        classifiers = metadata.get_all("Classifier", [])
        # ``get``: the finder of ``importlib_metadata``, which MLflow imports, raises where a key is missing.
        licence = licence_of(name, metadata.get("License-Expression"), metadata.get("License"), classifiers)
        yield name, each.version.partition("+")[0], licence


def test_every_installed_distribution_has_an_allowed_licence_which_is_the_recorded_one():
    found, licences = list(installed()), recorded()
    assert len(found) > 20
    assert [flaw for each in found if (flaw := flaw_of(*each))] == []
    differing = [each for each in found if licences.get(f"{each[0]}=={each[1]}", each[2]) != each[2]]
    assert differing == [], "run `make licences`"


def test_a_licence_is_recorded_for_each_pin_and_for_nothing_else():
    assert recorded().keys() == PINS, "run `make licences`"
    names = {pin.partition("==")[0] for pin in PINS}
    assert released_requirements().keys() - names == set()
    assert {*BY_HAND, *(each for each in EXCEPTIONS if "*" not in each)} - names == set()
