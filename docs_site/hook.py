"""Pages outside ``docs/`` become part of the site, and links to source files become their names.

The site can be read without the repository, and no address of the repository is known. So the READMEs of its
folders are pages of the site, and a link to any other file outside ``docs/`` shows as the file's path.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SECTIONS = ["start", "guides", "explain", "reference", "results", "parts"]
NOT_SHOWN = {"build", "docs", "docs_site", "out"}

NO_LINKS = r"(?ms:^(?P<fence>`{3,})[^\n]*\n.*?^(?P=fence)[ ]*$)|`[^`\n]*`(?!\])"
LINK = re.compile(NO_LINKS + r"|!?\[(?P<text>[^\]]*)\]\(<?(?P<path>[^)>#\s]*)(?P<anchor>#[^)>\s]*)?>?\)")


def outside_pages() -> dict[Path, str]:
    """Return each page outside ``docs/``, and its place in the site."""
    pages = {ROOT / "README.md": "index.md"}
    for name in ("CONTRIBUTING", "CHANGELOG"):
        pages[ROOT / f"{name}.md"] = f"parts/{name.lower()}.md"
    for page in sorted(ROOT.glob("[a-z]*/**/README.md")):
        folder = page.parent.relative_to(ROOT)
        if folder.parts[0] not in NOT_SHOWN:
            pages[page] = f"parts/{'-'.join(folder.parts)}.md"
    return pages


def outside_pictures() -> dict[Path, str]:
    """Return each picture outside ``docs/``, and its place in the site."""
    pictures = [path for kind in ("png", "svg") for path in ROOT.glob(f"[a-z]*/**/*.{kind}")]
    places = {path: path.relative_to(ROOT) for path in sorted(pictures)}
    return {path: str(place) for path, place in places.items() if place.parts[0] not in NOT_SHOWN}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the pictures outside ``docs/``."""
    for page, uri in outside_pages().items():
        files.append(File.generated(config, uri, content=page.read_text()))
    for picture, uri in outside_pictures().items():
        files.append(File.generated(config, uri, abs_src_path=str(picture)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Put the sections in the readers' order; within one, pages follow their file names."""

    def place(item: object) -> int:
        title = str(getattr(item, "title", "")).lower()
        return SECTIONS.index(title) if title in SECTIONS else -1 if isinstance(item, Page) else len(SECTIONS)

    nav.items.sort(key=place)
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site."""
    outside = outside_pages() | outside_pictures()
    sources = {uri: path for path, uri in outside.items()}
    docs = Path(config.docs_dir)
    source = sources.get(page.file.src_uri, docs / page.file.src_uri)

    def point(link: re.Match[str]) -> str:
        text, path, anchor = link["text"], link["path"], link["anchor"] or ""
        if not path or re.match("[a-z]+:", path):
            return link[0]
        target = Path(os.path.normpath(source.parent / path))
        if target.is_dir() and (target / "README.md").exists():
            target /= "README.md"
        uri = outside.get(target)
        if uri is None and target.is_relative_to(docs) and target.is_file():
            uri = target.relative_to(docs).as_posix()
        if uri is not None:
            mark = "!" if link[0].startswith("!") else ""
            return f"{mark}[{text}]({os.path.relpath(uri, Path(page.file.src_uri).parent)}{anchor})"
        if not target.exists():
            return link[0]  # a broken link, which fails the build
        name = target.relative_to(ROOT).as_posix()
        plain = text.strip("`")
        return f"`{name}`" if plain in name else f"{text} (`{name}`)"

    return LINK.sub(lambda link: link[0] if link["path"] is None else point(link), markdown)
