"""All pages of the generated reference."""

from __future__ import annotations

import json

from reference import commands, errors, events, files, http_api, licences, openapi, python_api, settings
from reference.frame import PAGES, Page

__all__ = ["flaws", "rendered", "write"]

MODULES = (commands, errors, events, files, http_api, licences, settings)


def pages() -> list[Page]:
    """Return the pages, each built from the code as it is."""
    return [*(module.page() for module in MODULES), *python_api.pages()]


def rendered() -> dict[str, str]:
    """Return the text of each file in docs/reference that is generated, by its name."""
    document = json.dumps(openapi.document(), indent=2) + "\n"
    return {page.name: page.text for page in pages()} | {"openapi.json": document}


def flaws() -> list[str]:
    """Return a sentence for each thing that has no meaning written beside it."""
    return sorted({flaw for page in pages() for flaw in page.flaws})


def write() -> None:
    """Write all pages."""
    for name, text in rendered().items():
        (PAGES / name).write_text(text)
