"""All pages of the generated reference."""

from __future__ import annotations

from reference import commands, errors, files, http_api, licences, openapi, settings
from reference.page import PAGES, Page

__all__ = ["flaws", "rendered", "write"]

MODULES = (commands, errors, files, http_api, licences, settings)


def pages() -> list[Page]:
    """Return the pages, each built from the code as it is."""
    return [module.page() for module in MODULES]


def rendered() -> dict[str, str]:
    """Return the text of each page in docs/reference that is generated, by its name."""
    return {page.name: page.text for page in pages()}


def flaws() -> list[str]:
    """Return a sentence for each thing that has no meaning written beside it."""
    return sorted({flaw for page in pages() for flaw in page.flaws})


def write() -> None:
    """Write all pages, and the OpenAPI document of the server beside what is built."""
    for name, text in rendered().items():
        (PAGES / name).write_text(text)
    openapi.write()
