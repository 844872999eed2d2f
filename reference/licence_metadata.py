"""The licence in a distribution's metadata: an SPDX expression, a field of free text, or classifiers."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["BY_HAND", "INTEL", "UNKNOWN", "licence_of", "normalized"]

UNKNOWN = "unknown"

INTEL = "LicenseRef-Intel-EULA"

BY_HAND = {
    "agent-client-protocol": "Apache-2.0",
    "arctic-inference": "Apache-2.0",
    "axe-playwright-python": "MIT AND MPL-2.0",  # axe.min.js inside is Deque's
    "chardet": "LGPL-2.1-or-later",
    "intel-cmplr-lib-ur": INTEL,
    "intel-openmp": INTEL,
    "openai-harmony": "Apache-2.0",
    "oss-harmony": "Apache-2.0",
    "prime-pydantic-config": "Apache-2.0",
    "protobuf-py-ext": "Apache-2.0",  # a part of protobuf-py
    "sentencepiece": "Apache-2.0",
    "setuptools": "MIT",
    "supervisor": "LicenseRef-Repoze",
    "word2number": "MIT",
}
"""Licences of distributions whose metadata name none, or not all, as their files have them."""

SPDX = {
    "0bsd": "0BSD",
    "apache": "Apache-2.0",
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache-2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD",
    "bsd license": "BSD",
    "bsd 2-clause license": "BSD-2-Clause",
    "bsd-2-clause": "BSD-2-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd-3-clause": "BSD-3-Clause",
    "cc0-1.0 or apache-2.0": "CC0-1.0 OR Apache-2.0",
    "isc": "ISC",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit": "MIT",
    "mit license": "MIT",
    "mit or apache-2.0": "MIT OR Apache-2.0",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "mpl-2.0": "MPL-2.0",
    "mpl-2.0 and mit": "MPL-2.0 AND MIT",
    "psf-2.0": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
    "unlicense": "Unlicense",
}
"""SPDX expressions by what packages write instead, in lower case."""


def normalized(name: str) -> str:
    """Return a distribution's name as the index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def licence_of(name: str, expression: str | None, field: str | None, classifiers: Sequence[str]) -> str:
    """Return the SPDX expression of a distribution's licence, or ``unknown``.

    ``expression``, ``field`` and ``classifiers`` are License-Expression, License and the classifiers.  The
    first of them that names a licence counts; of a field that holds a whole text, the first line does.
    """
    if normalized(name) in BY_HAND:
        return BY_HAND[normalized(name)]
    if expression:
        return expression
    first = (field or "").strip().partition("\n")[0].strip().lower()
    if first in SPDX:
        return SPDX[first]
    named = [each.rpartition(" :: ")[2].lower() for each in classifiers if each.startswith("License :: ")]
    known = sorted({SPDX[each] for each in named if each in SPDX})
    return " AND ".join(known) or UNKNOWN
