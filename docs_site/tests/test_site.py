"""The built site in a browser, opened from its files."""

import functools
import itertools
import re
from html import unescape
from urllib.parse import unquote, urlsplit

from axe_playwright_python.sync_playwright import Axe

from conftest import SITE

AXE = Axe()
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}


@functools.cache
def names(page):
    return {unescape(name) for name in re.findall(r'\bid="?([^"\s>]+)', page.read_text())}


def test_no_link_is_broken(page_path):
    page = SITE / page_path
    for link in re.findall(r'\b(?:href|src)="?([^"\s>]+)', page.read_text()):
        parts = urlsplit(unescape(link))
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        assert target.is_file(), f"{link} leads nowhere"
        if parts.fragment and target.suffix == ".html":
            assert unquote(parts.fragment) in names(target), f"{link}: no such place"


def test_headings_are_in_order_and_no_page_is_wider_than_its_window(open_page, page_path):
    tab = open_page(page_path)
    found = tab.evaluate(
        "[...document.querySelectorAll('article :is(h1,h2,h3,h4,h5,h6)')].map((h) => h.tagName)"
    )
    levels = [int(name[1]) for name in found]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(below <= above + 1 for above, below in itertools.pairwise(levels)), levels
    for width in (1280, 360):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_axe_finds_nothing_in_light_and_dark(open_page, page_path):
    for scheme in ("light", "dark"):
        tab = open_page(page_path, scheme)
        shown = tab.evaluate("document.body.dataset.mdColorScheme")
        assert shown == {"light": "default", "dark": "slate"}[scheme]
        found = AXE.run(tab, options=RULES).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"][:300]) for each in found] == [], scheme


def test_search_finds_a_word_from_a_file(open_page):
    tab = open_page("index.html")
    tab.locator(".md-search__input").first.click()
    tab.keyboard.type("Mooncake")
    found = tab.locator(".md-search-result__link").first
    found.wait_for(timeout=10_000)
    assert "mooncake" in found.inner_text().lower()
