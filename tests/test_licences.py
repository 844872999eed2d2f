"""Every dependency has a licence that is allowed, and that the page of licences lists."""

import sysconfig
from importlib.metadata import distributions

import pytest

from reference.frame import ROOT
from reference.licence_metadata import BY_HAND, UNKNOWN, licence_of, normalized
from reference.licences import (
    ENVIRONMENTS,
    EXCEPTIONS,
    flaw_of,
    is_permissive,
    pinned,
    recorded,
    released_requirements,
)

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
        expression, text = metadata.get("License-Expression"), metadata.get("License")
        licence = licence_of(name, expression, text, classifiers)
        yield name, each.version.partition("+")[0], licence


def test_every_installed_distribution_has_an_allowed_licence():
    found = list(installed())
    assert len(found) > 20
    assert [flaw for each in found if (flaw := flaw_of(*each))] == []


def test_the_recorded_licences_are_those_of_what_is_installed():
    licences = recorded()
    differing = [
        f"{name} {version} has the licence {licence}, and requirements/licences.toml has {listed}"
        for name, version, licence in installed()
        if (listed := licences.get(f"{name}=={version}", licence)) != licence
    ]
    assert differing == []


def test_a_licence_is_recorded_for_each_pin_and_for_nothing_else():
    assert recorded().keys() == PINS, "run `make licences`"


def test_what_a_distribution_of_ours_requires_is_pinned_somewhere():
    assert released_requirements().keys() - {pin.partition("==")[0] for pin in PINS} == set()


def test_each_exception_and_each_licence_by_hand_is_of_a_pin():
    names = {pin.partition("==")[0] for pin in PINS}
    assert BY_HAND.keys() - names == set()
    assert {each for each in EXCEPTIONS if "*" not in each} - names == set()


@pytest.mark.parametrize(
    ("name", "licence", "flaw"),
    [
        ("some", "GPL-3.0-only", "some 1.0 has the licence GPL-3.0-only, which is not allowed"),
        ("some", "MIT AND GPL-3.0-only", "which is not allowed"),
        ("some", UNKNOWN, "some 1.0 has no licence in its metadata"),
        ("tqdm", "GPL-2.0-only", "tqdm 1.0 has the licence GPL-2.0-only"),
        ("some", "MPL-2.0 AND MIT", "some 1.0 has the licence MPL-2.0 AND MIT"),
    ],
)
def test_a_licence_that_is_not_allowed_is_a_sentence(name, licence, flaw):
    assert flaw in flaw_of(name, "1.0", licence)


def test_an_exception_is_for_its_distribution_and_its_licence():
    assert flaw_of("tqdm", "1.0", "MPL-2.0 AND MIT") is None


@pytest.mark.parametrize("licence", ["MIT", "GPL-2.0-only OR MIT", "Apache-2.0 AND MIT", "(MIT AND BSD)"])
def test_a_choice_that_ends_in_permissive_licences_is_permissive(licence):
    assert is_permissive(licence)


@pytest.mark.parametrize(
    ("expression", "field", "classifiers", "licence"),
    [
        ("MIT-0", "BSD", [], "MIT-0"),
        (None, "Apache 2.0", ["License :: OSI Approved :: BSD License"], "Apache-2.0"),
        (None, "MIT License\n\nCopyright (c) 2022", [], "MIT"),
        (None, "Copyright (c) 2005", ["License :: OSI Approved :: BSD License"], "BSD"),
        (None, None, ["License :: OSI Approved :: MIT License", "Topic :: Software"], "MIT"),
        (None, "see the files", ["License :: Other/Proprietary License"], UNKNOWN),
        (None, None, [], UNKNOWN),
    ],
)
def test_the_licence_is_that_of_the_expression_the_field_or_the_classifiers(
    expression, field, classifiers, licence
):
    assert licence_of("some", expression, field, classifiers) == licence


def test_a_licence_by_hand_counts_before_the_metadata():
    assert licence_of("Setuptools", "GPL-3.0-only", None, []) == "MIT"
