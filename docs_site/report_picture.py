"""Take the documents' picture of a report: ``python docs_site/report_picture.py REPORT.html PICTURE.png``."""

import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

report, picture = (Path(argument).resolve() for argument in sys.argv[1:])
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    tab = browser.new_page(viewport={"width": 1100, "height": 1800}, color_scheme="light")
    tab.goto(report.as_uri())
    tab.locator("#main section").first.wait_for()
    tab.wait_for_timeout(500)  # charts are drawn bit by bit
    places = ("#short .facts", "#instances .chart >> nth=1")
    first, last = (tab.locator(each).bounding_box() for each in places)
    begin, end = first["y"] - 10, last["y"] + last["height"] + 10
    tab.screenshot(path=picture, clip={"x": 0, "y": begin, "width": 1100, "height": end - begin})
    browser.close()
