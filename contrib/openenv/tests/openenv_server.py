"""Environments of OpenEnv's, served by OpenEnv: for its interpreter, which has nothing of Seer's.

``python openenv_server.py letters|tools PORT NOTES MOST``: the port may be 0, and is printed.  A line for
each session that begins or ends is appended to the file NOTES.
"""

import os
import socket
import sys
import threading

import letters
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

KIND, PORT, NOTES, MOST = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])


def note(line):
    with open(NOTES, "a") as file:
        file.write(f"{line}\n")


class Noted:
    """Notes the beginning and the end of each episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    _state = State()

    def begin(self, episode_id):
        self._state = State(episode_id=episode_id)
        note(f"begin {episode_id}")

    @property
    def state(self):
        return self._state

    def close(self):
        note(f"end {self._state.episode_id}")
        super().close()


class Message(Action):
    message: str
    count: int = 0


class Reply(Observation):
    reply: str


class Letters(Noted, Environment):
    """The game of letters; some episodes hang, fail or kill the process, as reset's arguments say."""

    def reset(self, seed=0, episode_id=None, hang=None, crash=None, **kwargs):
        self.begin(episode_id)
        self._hang, self._crash = hang, crash
        self._letters, self._steps = letters.begin(seed), 0
        return Reply(reply=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        if self._state.episode_id == self._hang:
            threading.Event().wait()
        if action.message == "die":
            os._exit(1)
        if self._state.episode_id == self._crash:
            raise RuntimeError("no \x1b[31mcrash")
        self._steps += 1
        self._letters, reply, reward, done = letters.answer(self._letters, self._steps, action.message)
        if action.message == "true":
            reward = True
        return Reply(reply=reply, reward=reward, done=done, metadata={"secret": self._letters})


class Tools(Noted, MCPEnvironment):
    """A calculator, whose tools are called by MCP."""

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def spell(number: int) -> str:
            """Write a number from 0 to 2 in letters."""
            return ["zero", "one", "two"][number]

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.begin(episode_id)
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("a tool, please")


if KIND == "letters":
    app = create_app(Letters, Message, Reply, max_concurrent_envs=MOST)
else:
    app = create_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=MOST)

listening = socket.create_server(("127.0.0.1", PORT))
print(listening.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
os._exit(0)  # without a wait for threads that hang
