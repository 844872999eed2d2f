"""How a program of a user ends after code of users has run text that raises KeyboardInterrupt."""

import signal
import subprocess
import sys

import pytest

from tests.support.patience import PATIENCE_S

PROGRAM = """
import asyncio
import os
import signal
import sys

from seer_core.errors import SeerError
from seer_session import Session
from seer_session.environment import EnvironmentAnswer

DONE = EnvironmentAnswer(done=True)


def interrupt(self=None, trajectory=None, *_):
    if getattr(trajectory, "index", 1):
        exec("raise KeyboardInterrupt")
    return DONE


async def ainterrupt(*given):
    return interrupt(*given)


class Plain:
    step = interrupt


class Coroutine:
    step = ainterrupt


class Task:
    async def step(self, *given):
        return (await asyncio.gather(ainterrupt(self, *given), asyncio.sleep(0)))[0]


class Reset:
    reset = step = interrupt


class Close:
    async def step(self, trajectory, turn):
        return DONE

    close = ainterrupt


class Caught:
    def step(self, trajectory, turn):
        try:
            return interrupt(self, trajectory)
        except KeyboardInterrupt:
            return DONE


class Odd:
    __repr__ = interrupt


class OddAnswer:
    def step(self, trajectory, turn):
        return Odd() if trajectory.index else DONE


class CtrlC:
    async def step(self, trajectory, turn):
        if trajectory.index:
            interrupt()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()


class Observer:
    observe = interrupt


kind = sys.argv[2]
observers = [Observer()] if kind == "Observer" else []
tool = None if kind in ("Observer", "placer") else globals()[kind]()
with Session(sys.argv[1], observers) as session:
    try:
        result = session.rollout([{"prompt": "a", "n": 2, "max_tokens": 400}], environment=tool)
        print("ended", sorted({each.finish_reason for each in result.completions}))
    except SeerError as error:
        print("refused", "KeyboardInterrupt" in str(error))
"""

PLACER = """
from seer_core.plugins.hookspecs import hookimpl


class Interrupting:
    def place(self, request, tokens, instances):
        exec("raise KeyboardInterrupt")


@hookimpl
def seer_make_placer():
    return Interrupting()
"""


@pytest.fixture
def ends(tmp_path, config):
    """Return a function that runs the program with an environment, and returns its exit status and output."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(kind):
        command = [sys.executable, program, config, kind]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        return done.returncode, done.stdout.strip(), done.stderr

    return run


@pytest.mark.parametrize(
    ("kind", "printed"),
    [
        ("Plain", "ended ['error', 'stop']"),
        ("Coroutine", "ended ['error', 'stop']"),
        ("Task", "ended ['error', 'stop']"),
        ("Reset", "ended ['error', 'stop']"),
        ("Close", "ended ['stop']"),
        ("Caught", "ended ['stop']"),
        ("OddAnswer", "ended ['error', 'stop']"),
        ("Observer", "ended ['stop']"),
    ],
)
def test_a_program_ends_in_order_after_an_interrupt_that_was_contained(ends, kind, printed):
    assert ends(kind)[:2] == (0, printed)


def test_a_program_ends_in_order_after_an_interrupt_of_a_placer_that_it_caught(
    ends, distribution, write_config
):
    distribution("interrupting", PLACER)
    write_config(["interrupting"])
    assert ends("placer")[:2] == (0, "refused True")


def test_ctrl_c_still_ends_such_a_program_as_an_interrupted_one(ends):
    status, _, stderr = ends("CtrlC")
    assert status == -signal.SIGINT
    assert "KeyboardInterrupt" in stderr
