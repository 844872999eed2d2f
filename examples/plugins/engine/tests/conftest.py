"""The package is found here and in workers, installed or not."""

import os
from pathlib import Path

import pytest

PACKAGE = str(Path(__file__).parents[1])


@pytest.fixture(autouse=True)
def _package(monkeypatch):
    monkeypatch.syspath_prepend(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", PACKAGE, os.pathsep)
