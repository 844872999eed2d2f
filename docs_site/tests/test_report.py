"""Pages of ``seer report`` in a browser, opened from their files."""

import gzip
import itertools
import json
import re
import shutil
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from PIL import Image, ImageColor
from thumbnails import PARTS, changed_parts, thumbnails

from conftest import ROOT

AXE = Axe()
RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}
MARKUP = '</script><img src=x onerror="window.hacked=1">שלום<b>'
HOSTILE = MARKUP + "\u202egnp.exe\x07" + "a" * 100_000
"""As no run names a group, but a file may."""
STORED = Path(__file__).parent / "stored"
SECTIONS = ["short", "instances", "request", "seconds", "finishes", "waits", "groups", "drafts"]
SETTINGS = """[seer]
plugins = ["divided_rollout", "context_sched", "grouped_spec"]
engine = "sim"
[plugin.divided_rollout]
chunk_tokens = 64
[engine.sim]
instances = 3
max_running = 4
max_model_tokens = 2048
kv_capacity_tokens = 4096
kill_at_s = [{ instance = "sim-1", at_s = 1.5, restart_after_s = 1.0 }]
lengths = { mean_tokens = 300, sigma = 0.8, group_share = 0.5, cap_tokens = 900 }
[rollout]
max_tokens = 900
"""


def seer(*arguments):
    done = subprocess.run([ROOT / ".venv/bin/seer", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def assert_nothing_found(tab):
    found = AXE.run(tab, options=RULES).response["violations"]
    assert [(each["id"], each["nodes"][0]["html"][:300]) for each in found] == []


def assert_no_wider_than_its_window(tab):
    for width in (1280, 800, 360):
        tab.set_viewport_size({"width": width, "height": 800})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """The directory of a run with its report, and a report of a comparison, of prompts with hostile ids."""
    directory = tmp_path_factory.mktemp("reports")
    config, prompts = directory / "run.toml", directory / "prompts.jsonl"
    config.write_text(SETTINGS)
    groups = [{"prompt_token_ids": [5] * 8, "n": 4} for _ in range(12)]
    groups[3]["group_id"] = MARKUP
    groups[4]["group_id"] = "a" * 200
    prompts.write_text("".join(json.dumps(group) + "\n" for group in groups))
    seer("run", config, "--prompts", prompts, "--out", directory / "run")
    trace = directory / "run/trace.jsonl"
    trace.write_text(
        trace.read_text().replace(json.dumps(MARKUP, ensure_ascii=False)[1:-1], json.dumps(HOSTILE)[1:-1])
    )
    seer("report", directory / "run")
    seer("compare", config, "--prompts", prompts, "--report", directory / "arms.html")
    return directory


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The directory of a report of a stored trace, so that it changes with the page alone."""
    directory = tmp_path_factory.mktemp("recorded")
    shutil.copy(STORED / "summary.json", directory)
    (directory / "trace.jsonl").write_bytes(gzip.decompress((STORED / "trace.jsonl.gz").read_bytes()))
    seer("report", directory)
    return directory


@pytest.fixture
def open_report(browser, made):
    """Return a function that opens a report; none may log, raise or ask for an address."""
    contexts, troubles = [], []

    def open_report(name="run/report.html", scheme="light", width=1280):
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800})
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: troubles.append(message.text))
        tab.on("pageerror", lambda error: troubles.append(str(error)))
        tab.on("request", lambda request: troubles.append(request.url))
        page = (made / name).as_uri()
        tab.goto(page)
        tab.locator("#main section").first.wait_for()
        troubles.remove(page)
        return tab

    yield open_report
    for context in contexts:
        context.close()
    assert troubles == []


def test_every_view_is_drawn_and_its_figures_are_those_of_the_summary(open_report, made):
    tab = open_report()
    assert (
        tab.evaluate("[...document.querySelectorAll('#main > section')].map((each) => each.id)") == SECTIONS
    )
    drawn = tab.evaluate(
        "[...document.querySelectorAll('.chart')].map((each) => ["
        " each.getAttribute('aria-label').length, each.querySelectorAll('svg, canvas').length,"
        " each.clientHeight])"
    )
    assert len(drawn) >= 10
    for label, pictures, height in drawn:
        assert label > 20
        assert pictures >= 1
        assert height > 80
    summary = json.loads((made / "run/summary.json").read_text())
    shown = tab.evaluate(
        "Object.fromEntries([...document.querySelectorAll('[data-figure]')].map("
        "(each) => [each.dataset.figure, each.textContent]))"
    )
    assert len(shown) == 6
    for name, text in shown.items():
        assert text == (f"{summary[name]:,.1f}" if name.endswith("time_s") else f"{summary[name]:,.0f}"), name
    seconds = tab.locator("#seconds tbody tr td:last-child").all_text_contents()
    assert [float(each) for each in seconds] == pytest.approx([summary["total_time_s"]] * 3, abs=0.02)
    assert "lost: killed by" in tab.locator("#instances").text_content()


def test_hostile_ids_are_text(open_report):
    for name, hostile in (("run/report.html", HOSTILE), ("arms.html", MARKUP)):
        tab = open_report(name)
        tab.locator("#groups details summary").last.click()
        assert hostile in tab.locator("#groups table").last.evaluate("(table) => table.textContent")
        assert tab.evaluate("window.hacked") is None
        assert tab.locator("img").count() == 0
        assert tab.locator("b").count() == 0


@pytest.mark.parametrize("name", ["run/report.html", "arms.html"])
def test_axe_finds_nothing_and_no_page_is_wider_than_its_window(open_report, name):
    for scheme in ("light", "dark"):
        tab = open_report(name, scheme)
        assert tab.evaluate("document.documentElement.dataset.scheme") == scheme
        tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert_nothing_found(tab)
        assert_no_wider_than_its_window(tab)


def test_the_keyboard_alone_reaches_and_works_every_control(open_report):
    tab = open_report()
    wanted = tab.locator(":is(a, button, select, input, summary):visible").count()
    reached = set()
    for _ in range(3 * wanted):
        tab.keyboard.press("Tab")
        name = tab.evaluate(
            "(() => { const at = document.activeElement; at.dataset.at ??= String(Math.random());"
            " return at.matches('a, button, select, input, summary') ? at.dataset.at : ''; })()"
        )
        reached.add(name)
        if len(reached - {""}) == wanted:
            break
    assert len(reached - {""}) == wanted
    shown = tab.locator("#instances [role=status]")
    whole = shown.inner_text()
    tab.get_by_role("button", name="zoom in").focus()
    tab.keyboard.press("Enter")
    closer = shown.inner_text()
    assert closer != whole
    tab.get_by_role("button", name="later").focus()
    tab.keyboard.press("Space")
    assert shown.inner_text() != closer
    tab.get_by_role("button", name="show all").focus()
    tab.keyboard.press("Enter")
    assert shown.inner_text() == whole
    first = tab.locator("#request table").inner_text()
    tab.locator("#life").focus()
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#request table").inner_text() != first
    tab.locator("#lane-figure").focus()
    tab.keyboard.press("ArrowDown")
    assert tab.locator("#lane-figure").input_value() == "reserved"


def test_colours_and_patterns_change_what_is_drawn(open_report):
    tab = open_report()
    picture = "document.querySelector('#seconds .chart svg').outerHTML"
    light = tab.evaluate(picture)
    assert "<pattern" not in light
    tab.locator("#patterns").check()
    assert "<pattern" in tab.evaluate(picture)
    tab.locator("#patterns").uncheck()
    tab.locator("#scheme").select_option("dark")
    assert tab.evaluate(picture) != light
    tab.locator("#scheme").select_option("light")
    assert tab.evaluate("document.documentElement.dataset.scheme") == "light"


def test_a_comparison_shows_differences_first_and_each_run_on_demand(open_report):
    tab = open_report("arms.html")
    assert tab.locator("#main > section").first.get_attribute("id") == "side"
    table = tab.locator("#side table").first.inner_text()
    arms = tab.evaluate("[...document.querySelectorAll('#run option')].map((each) => each.textContent)")
    assert len(arms) == 5
    assert all(arm in table for arm in arms)
    assert "tokens (1.00x)" not in table
    before = tab.locator("#short .facts").inner_text()
    tab.locator("#run").select_option(label=arms[3])
    assert tab.locator("#short .facts").inner_text() != before
    assert arms[3] in tab.locator("#main > p").inner_text()


def test_tiles_of_a_part_of_a_run_agree_with_the_sentence_below_them(open_report, made):
    lines = (made / "run/trace.jsonl").read_text().splitlines(keepends=True)
    (made / "part").mkdir(exist_ok=True)
    (made / "part/trace.jsonl").write_text("".join(lines[: len(lines) // 2]))
    seer("report", made / "part")
    short = open_report("part/report.html").locator("#short")
    responses, groups = short.locator("[data-figure]").all_text_contents()[:2]
    assert responses.endswith(" of 48")
    assert groups.endswith(" of 12")
    assert f"{responses} responses and {groups} groups were done" in short.locator("p").first.inner_text()


def test_figures_that_round_to_zero_have_no_ratio(open_report):
    tab = open_report("arms.html")
    rows = tab.locator("#side table").first.locator("tbody tr").all_inner_texts()
    zeros = [row for row in rows if re.search(r"\t0(\.0)?\t", row)]
    assert zeros
    assert all(row.split("\t")[1].strip("0.") or "x)" not in row for row in rows)


TICKS = """(place) => {
  const axes = echarts.getInstanceByDom(place).getModel().queryComponents({mainType: "xAxis"});
  return axes[axes.length - 1].axis.scale.getTicks().map((each) => each.value);
}"""


def test_ticks_of_lanes_and_of_chunks_are_round_also_zoomed(open_report):
    tab = open_report()
    for zoomed in (False, True):
        for place in tab.locator("#instances .chart").all()[:2]:
            inner = place.evaluate(TICKS)[1:-1]
            steps = {round(later - earlier, 6) for earlier, later in itertools.pairwise(inner)}
            assert len(inner) > 1
            (step,) = steps
            assert f"{step:.0e}"[0] in "125"
            assert all(abs(tick / step - round(tick / step)) < 1e-6 for tick in inner)
        if not zoomed:
            tab.get_by_role("button", name="zoom in").click()


def test_colours_of_runs_side_by_side_are_far_apart(open_report):
    tab = open_report("arms.html")
    palette = tab.locator("#side .chart").evaluate(
        "(place) => echarts.getInstanceByDom(place).getOption().color"
    )
    colours = [ImageColor.getrgb(each) for each in palette]
    for one, other in itertools.combinations(colours, 2):
        assert sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) ** 0.5 > 55, (one, other)


def test_it_prints_with_its_tables(open_report):
    tab = open_report()
    tab.emulate_media(media="print")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("nav").is_hidden()
    assert tab.locator("#short table").last.is_visible()
    assert len(tab.pdf()) > 100_000


VIEWS = {"light": ("light", 1280), "dark": ("dark", 1280), "narrow": ("light", 360)}


@pytest.fixture(params=VIEWS)
def picture(request, open_report, recorded):
    """A report of the stored trace, in each view, and its stored picture."""
    scheme, width = VIEWS[request.param]
    tab = open_report(recorded / "report.html", scheme, width)
    stored = STORED / f"{request.param}.png"
    if request.config.getoption("--renew-pictures"):
        thumbnails(tab).save(stored, optimize=True)
    return tab, Image.open(stored)


def restyle(tab, css):
    """Add rules to those of a page, instead of those that were added before."""
    tab.evaluate(
        "(css) => { let added = document.getElementById('added');"
        " if (!added) { added = document.createElement('style'); added.id = 'added';"
        " document.head.append(added); } added.textContent = css; }",
        css,
    )


def test_a_report_is_as_its_picture_has_it_in_another_font_too(picture):
    tab, stored = picture
    assert changed_parts(thumbnails(tab), stored) == []
    restyle(tab, "* { font-family: serif !important; }")
    assert changed_parts(thumbnails(tab), stored) == []


def test_a_part_that_is_empty_or_missing_and_inverted_colours_change_the_picture(picture):
    tab, stored = picture
    count = tab.locator(PARTS).count()
    assert stored.height == thumbnails(tab).height
    everywhere = {f"part {number} " for number in range(count)}
    restyle(tab, f":is({PARTS}) > * {{ opacity: 0; }}")
    assert {each[: each.index("has")] for each in changed_parts(thumbnails(tab), stored)} == everywhere
    restyle(tab, "html { filter: invert(1); }")
    assert {each[: each.index("has")] for each in changed_parts(thumbnails(tab), stored)} == everywhere
    restyle(tab, "#waits .chart { display: none; }")
    assert changed_parts(thumbnails(tab), stored) == [
        f"the page has {count - 1} parts, and the stored picture {count}"
    ]


LIVE = """
import sys, time
from seer_cli.report.dashboard import Dashboard
from seer_trace.records import read_trace
def control(command):
    print(command.do, command.what, flush=True)
    return f"did {command.do} {command.what}"
records = list(read_trace(sys.argv[1]))
with Dashboard("live", control=control) as dashboard:
    observer = dashboard.watch("mine")
    half = len(records) // 2
    for record in records[:half]:
        observer.observe(record.now, record.event, record.commands)
    print(dashboard.address, flush=True)
    sys.stdin.readline()
    for record in records[half:]:
        observer.observe(record.now, record.event, record.commands)
    sys.stdin.readline()
"""


def test_a_live_page_follows_its_run_keeps_what_was_chosen_and_commands_it(browser, made):
    command = [ROOT / ".venv/bin/python", "-c", LIVE, made / "run/trace.jsonl"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    with subprocess.Popen(command, text=True, **pipes) as process:
        try:
            address = process.stdout.readline().strip()
            tab, other = context.new_page(), context.new_page()
            for each in (tab, other):
                each.goto(address)
                each.locator("#main section").first.wait_for()
            count = "parseInt(document.querySelector('[data-figure=requests]').textContent)"
            before = tab.evaluate(count)
            assert 0 < before < 48
            assert_nothing_found(tab)
            tab.locator("#life").select_option(index=5)
            chosen = tab.locator("#life").input_value()
            tab.locator("#short summary").last.click()
            other.locator("#follow").uncheck()
            groups = tab.evaluate("[...document.getElementById('give-up').options].map((each) => each.value)")
            group = min(groups, key=len)
            tab.locator("#give-up").select_option(group)
            tab.get_by_role("button", name="give it up").click()
            tab.get_by_text(f"did give_up {group}").wait_for()
            assert process.stdout.readline() == f"give_up {group}\n"
            tab.get_by_role("button", name="pause").focus()
            process.stdin.write("\n")
            process.stdin.flush()
            tab.locator("[data-figure=requests]").get_by_text("48", exact=True).wait_for()
            assert tab.locator("#life").input_value() == chosen
            assert tab.locator("#short details").last.get_attribute("open") is not None
            assert tab.evaluate("document.activeElement.textContent") == "pause"
            assert other.evaluate(count) == before
            process.stdin.write("\n")
            process.stdin.flush()
            tab.get_by_text("the run has ended, or answers no more").wait_for()
            assert tab.evaluate(count) == 48
        finally:
            process.kill()
    context.close()


@pytest.fixture
def watched_run(browser, tmp_path):
    """A run that goes on until it is interrupted, its output directory, and its page in a browser."""
    config, prompts, out = tmp_path / "run.toml", tmp_path / "prompts.jsonl", tmp_path / "out"
    config.write_text(SETTINGS.replace("kill_at_s", "# kill_at_s"))
    prompts.write_text(20_000 * (json.dumps({"prompt_token_ids": [5] * 8, "n": 4}) + "\n"))
    command = [ROOT / ".venv/bin/seer", "run", config, "--prompts", prompts, "--out", out, "--dashboard"]
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    with subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            address = next(line for line in process.stderr if line.startswith("dashboard: ")).split()[1]
            reading = threading.Thread(target=process.stderr.read)
            reading.start()
            tab = context.new_page()
            tab.goto(address)
            tab.locator("#control").wait_for()
            yield process, out, tab
        finally:
            process.kill()
            reading.join()
    context.close()


def press_until(tab, name):
    """Press the tabulator until what has this id or this text is focused."""
    for _ in range(40):
        if tab.evaluate("document.activeElement.id || document.activeElement.textContent") == name:
            return
        tab.keyboard.press("Tab")
    pytest.fail(f"the keyboard does not reach {name}")


def test_an_instance_is_limited_by_keyboard_and_the_trace_has_who_asked(watched_run):
    process, out, tab = watched_run
    press_until(tab, "asker")
    tab.keyboard.type(MARKUP)
    press_until(tab, "drain")
    tab.keyboard.press("ArrowDown")
    press_until(tab, "limit")
    tab.keyboard.press("Control+a")
    tab.keyboard.type("2")
    press_until(tab, "limit it")
    tab.keyboard.press("Enter")
    tab.get_by_text("sim-1 gets no chunk while 2 run there", exact=True).wait_for()
    tab.locator("#follow").uncheck()
    assert_nothing_found(tab)
    assert_no_wider_than_its_window(tab)
    assert tab.evaluate("window.hacked") is None
    process.send_signal(signal.SIGINT)
    process.wait(600)
    records = [json.loads(line) for line in (out / "trace.jsonl").read_text().splitlines()]
    limits = [each["event"] for each in records if each.get("event", {}).get("type") == "InstanceLimited"]
    assert [(each["instance_id"], each["max_running"], each["by"]) for each in limits] == [
        ("sim-1", 2, f"{MARKUP} (dashboard)")
    ]


def test_new_figures_take_neither_the_focus_nor_what_is_typed(watched_run):
    _, _, tab = watched_run
    figures = "document.getElementById('short').textContent"
    tab.locator("#asker").focus()
    tab.keyboard.type("Ada")
    tab.evaluate("document.activeElement.dataset.mark = 'here'")
    before = tab.evaluate(figures)
    for _ in range(2):  # the page has taken the first answer in when it asks for the second
        with tab.expect_response("**/figures"):
            pass
    tab.keyboard.type(" Lovelace")
    assert tab.evaluate("document.activeElement.dataset.mark") == "here"
    assert tab.evaluate(figures) == before
    press_until(tab, "limit it")
    tab.locator("#asker:not([data-mark])").wait_for()
    assert tab.evaluate(figures) != before
    assert tab.evaluate("document.activeElement.textContent") == "limit it"
    assert tab.locator("#asker").input_value() == "Ada Lovelace"
