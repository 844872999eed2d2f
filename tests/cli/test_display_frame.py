"""Frames of the display: they fit every terminal, and show first the instances that matter."""

import pytest
from rich.console import Console
from seer_cli.display_frame import frame_of, line_of
from seer_cli.progress import RunProgress

from seer_core.model import InstanceInfo
from seer_core.model.events import (
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceFailed,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceWaiting,
)

HOSTILE = ["[red]x[/red]", "\x1b[2J\x9b31m", "a" * 10_000, "語" * 200, "two\nlines", "a b " * 30]


def progress_of(names, finished=58):
    """Return the progress of 64 requests of 8 groups, of which so many are over, on these instances."""
    progress = RunProgress()
    for name in names:
        progress.observe(0.0, InstanceStarted(InstanceInfo(name, 8192, 16, 8, 64)), [])
    requests = [f"g{number}/{index}" for number in range(8) for index in range(8)]
    groups = tuple(GroupSpec(f"g{number}", 100, 8, 4000) for number in range(8))
    places = [names[number % len(names)] for number in range(64)] if names else []
    sent = [Dispatch(*each, 480, 592, False) for each in zip(requests, places, strict=False)]
    progress.observe(0.0, GroupsSubmitted(groups), sent)
    for number, (request, place) in enumerate(zip(requests[:finished], places, strict=False)):
        event = ChunkFinished(request, place, 400, True, steps=300, drafted=200, accepted=100)
        progress.observe(10.0 + number, event, [Complete(request, "stop")])
    for number, name in enumerate(names):
        progress.observe(70.0, InstanceReported(name, 8, number, number / len(names), 9.0, 3.0), [])
    return progress


def texts(progress, width, height=24):
    return [line.plain for line in frame_of("run", progress, 83.0, width, height)]


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("height", [3, 12, 24])
@pytest.mark.parametrize("count", [0, 1, 4, 64])
def test_a_frame_is_never_wider_or_higher_than_the_terminal(width, height, count):
    progress = progress_of([f"sim-{number}" for number in range(count)])
    lines = frame_of("run", progress, 83.0, width, height)
    assert max(line.cell_len for line in lines) <= width
    assert len(lines) <= height
    console = Console(width=width, height=height, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(*lines, sep="\n")
    assert capture.get().splitlines() == [line.plain for line in lines]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_all_figures_of_a_run_are_whole_on_every_usual_width(width):
    shown = " ".join(texts(progress_of([f"sim-{number}" for number in range(4)]), width))
    for figure in (
        *("groups 7/8", "requests 58/64", "tokens 23,200", "1.33 tok/step", "left 1:23"),
        *("tail: the last 6 of 64 responses,", "for 0:03 so far,", "the longest about 507 tokens", "(g7/2)"),
        *("75%", "14%", "8/8"),
    ):
        assert figure in shown


def test_columns_go_by_importance_as_a_terminal_gets_narrower():
    progress = progress_of(["instance-with-a-name-1", "instance-with-a-name-2"])
    titles = {width: _titles(progress, width) for width in (90, 75, 58, 48, 40, 34, 24, 18)}
    assert titles[90] == "instance KV KV used reserved running queued drafting"
    assert titles[75] == "instance KV used reserved running queued drafting"
    assert titles[58] == "instance KV used reserved running queued"
    assert titles[48] == titles[40] == titles[58]
    assert titles[34] == "instance KV used reserved running"
    assert titles[24] == "instance KV used running"
    assert titles[18] == "instance KV used"
    assert _row(progress, 40).startswith("ins…me-1 ")


def _titles(progress, width):
    titles = next(line for line in texts(progress, width) if line.startswith("instance "))
    return " ".join(titles.split())


def _row(progress, width):
    lines = texts(progress, width)
    return lines[[line.startswith("instance ") for line in lines].index(True) + 1]


def test_of_many_instances_those_that_are_down_come_first_then_the_fullest_and_the_rest_is_summed_up():
    progress = progress_of([f"sim-{number}" for number in range(64)])
    progress.observe(71.0, InstanceLost("sim-3", "gone"), [])
    progress.observe(71.0, InstanceFailed("sim-4", "lost too often"), [])
    progress.observe(71.0, InstanceWaiting("sim-5", "1 GPU wanted"), [])
    lines = texts(progress, 80)
    assert len(lines) == 24
    assert lines[-23:][lines[-23:].index("sim-3  lost, restarting") + 1 :][:2] == [
        "sim-4  given up",
        "sim-5  waits: 1 GPU wanted",
    ]
    rows = [line.split()[0] for line in lines if line.startswith("sim-") and "%" in line]
    assert rows == [f"sim-{number}" for number in range(64 - len(rows), 64)]
    assert lines[-1].startswith(f"and {64 - 3 - len(rows)} more: KV ")
    assert "queued" in lines[-1]


def test_all_instances_are_shown_in_their_own_order_where_there_is_room():
    lines = texts(progress_of([f"sim-{number}" for number in range(6)]), 80)
    assert [line.split()[0] for line in lines if line.startswith("sim-")] == [f"sim-{n}" for n in range(6)]
    assert "more:" not in "".join(lines)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("width", [20, 40, 80])
def test_ids_from_elsewhere_neither_break_lines_nor_reach_the_terminal_as_escapes(name, width):
    progress = progress_of([name, "other"])
    progress.observe(71.0, GroupsSubmitted((GroupSpec(name, 10, 1, 4000),)), [])
    sent = [Dispatch(f"{name}/0", "other", 480, 496, False)]
    progress.observe(71.0, ChunkFinished("g7/2", name, 300, False), sent)
    progress.observe(72.0, InstanceWaiting("other", name * 5), [])
    lines = frame_of(name, progress, None, width, 24)
    assert max(line.cell_len for line in lines) <= width
    assert len(lines) <= 24
    assert all(line.plain.isprintable() for line in lines)
    line = line_of(name, progress, None)
    assert line.isprintable()
    assert len(line) < 1500


def test_a_line_names_few_instances_and_sums_up_many():
    few = line_of("run", progress_of(["a", "b"]), 83.0)
    assert few.endswith(
        "  a: KV 0% used, 22% reserved, running 8/8, queued 0"
        "  b: KV 50% used, 22% reserved, running 8/8, queued 1"
    )
    progress = progress_of([f"sim-{number}" for number in range(1000)])
    progress.observe(71.0, InstanceLost("sim-3", "gone"), [])
    many = line_of("run", progress, 83.0)
    assert "  999 of 1,000 instances: KV 50% used, 0% reserved, running 7,992/7,992, queued " in many
    assert "  sim-3 lost, restarting  sim-999: KV 100% used" in many
    assert "  tail: the last 6 of 64 responses, for 0:04 so far, the longest about " in many
    assert len(many) < 600


def test_terminals_without_unicode_get_bars_of_ascii():
    lines = frame_of("run", progress_of(["a", "b"]), 83.0, 80, 24, ascii_only=True)
    assert "".join(line.plain for line in lines).isascii()
