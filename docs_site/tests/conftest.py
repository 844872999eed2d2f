import signal
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build/site"
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# What a script starts with `&` ignores SIGINT.  So would the runs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    help = "store the pictures of reports in docs_site/tests/stored anew, instead of comparing them"
    parser.addoption("--renew-pictures", action="store_true", help=help)


def pytest_generate_tests(metafunc):
    if "page_path" in metafunc.fixturenames:
        pages = sorted(page.relative_to(SITE).as_posix() for page in SITE.glob("**/*.html"))
        assert pages, f"{SITE} holds no pages; run: make site"
        metafunc.parametrize("page_path", [page for page in pages if page != "404.html"])


@pytest.fixture(scope="session")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def tabs(browser):
    """Return a tab for each colour scheme, and the addresses that they ask for."""
    asked = []
    contexts = {scheme: browser.new_context(color_scheme=scheme) for scheme in ("light", "dark")}
    tabs = {scheme: context.new_page() for scheme, context in contexts.items()}
    for tab in tabs.values():
        tab.on("request", lambda request: asked.append(request.url))
    tabs["asked"] = asked
    return tabs


@pytest.fixture
def open_page(tabs):
    """Return a function that opens a page of the site from its file."""

    def open_page(path, scheme="light", width=1280):
        tab = tabs[scheme]
        tab.set_viewport_size({"width": width, "height": 800})
        tab.goto((SITE / path).as_uri())
        return tab

    tabs["asked"].clear()
    yield open_page
    assert [url for url in tabs["asked"] if not url.startswith(("file:", "data:", "blob:", "about:"))] == []
