"""The slot ``environment``, filled by a server of OpenEnv's: a session for each response."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from seer_session.environment import AnsweredTurn, Environment, EnvironmentAnswer, ModelTurn, Trajectory

from seer_core.errors import ConfigError, EngineError, printable, quote
from seer_openenv.episode import Episode, InvalidAction
from seer_openenv.wording import NoAction, action_of, content_of

__all__ = ["RESET", "OpenEnv", "socket_url"]

RESET = "openenv"
"""The key of a prompt's metadata whose value has the arguments of the environment's ``reset``."""
SCHEMA_S = 10.0
"""How long the server may take to answer for its schema."""
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


def socket_url(url: str) -> str:
    """Return the address of a server's WebSocket; raises ConfigError for one that is none."""
    scheme, _, rest = url.rstrip("/").partition("://")
    try:
        host = urlsplit(url).hostname
    except ValueError:  # half a bracket
        host = None
    if scheme not in SCHEMES or not host:
        raise ConfigError(f"the address of OpenEnv's server is {quote(url)}; write http://127.0.0.1:8000")
    return f"{SCHEMES[scheme]}://{rest}/ws"


class OpenEnv(Environment):
    """Sends turns as actions, and answers with observations; see ``action_of`` and ``content_of``.

    A response whose turn is no action and was not meant as one ends there, without a reward.  A model whose
    action is invalid reads the reason, and goes on.
    """

    def __init__(
        self,
        url: str,
        action_field: str | None = None,
        observation_field: str | None = None,
        role: str = "user",
    ) -> None:
        """Take the address of the server; raises ConfigError for one that is none."""
        self._url = socket_url(url)
        self._action_field = action_field
        self._observation_field = observation_field
        self._role = role
        self._episodes: dict[str, Episode] = {}

    async def start(self) -> None:
        """Compare the settings with the server's schema; raises SeerError where they differ."""
        schema = await asyncio.to_thread(self._schema)
        fields = schema.get("action", {}).get("properties", {})
        if self._action_field is not None and self._action_field not in fields:
            raise ConfigError(
                f"[plugin.openenv].action_field is {quote(self._action_field)}, and the actions of"
                f" {quote(self._url)} have {quote(sorted(fields))}; name one of them"
            )

    async def reset(self, trajectory: Trajectory, earlier: Sequence[AnsweredTurn]) -> None:
        """Begin an episode, and play the turns again that an earlier process has had answered."""
        given = trajectory.metadata.get(RESET, {})
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"metadata.{RESET} of a prompt is {quote(given)}; it is an object of reset's arguments"
            )
        episode = Episode(self._url, {"episode_id": trajectory.request_id, **given})
        self._episodes[trajectory.request_id] = episode
        await episode.begin()
        for each in earlier:
            await self._answer(episode, each.turn)

    async def step(self, trajectory: Trajectory, turn: ModelTurn) -> EnvironmentAnswer:
        """Return the observation that follows from a turn, and its reward."""
        return await self._answer(self._episodes[trajectory.request_id], turn)

    async def close(self, trajectory: Trajectory) -> None:
        """End an episode."""
        episode = self._episodes.pop(trajectory.request_id, None)
        if episode is not None:
            await episode.close()

    async def _answer(self, episode: Episode, turn: ModelTurn) -> EnvironmentAnswer:
        if turn.text is None:
            raise ConfigError("OpenEnv's actions are texts, and this engine has no tokenizer; give it one")
        try:
            action = action_of(turn.text, self._action_field)
            if action is None:
                return EnvironmentAnswer(done=True)
            answer = await episode.step(action)
        except (NoAction, InvalidAction) as error:
            return self._shown(msgspec.json.encode({"error": str(error)}).decode(), None)
        reward, observation = answer.get("reward"), answer.get("observation")
        if isinstance(reward, bool):  # OpenEnv's rewards may be true or false
            reward = float(reward)
        if answer.get("done"):
            return EnvironmentAnswer(done=True, reward=reward)
        if not isinstance(observation, Mapping):
            raise EngineError(f"OpenEnv's environment answered the observation {quote(observation)}")
        return self._shown(content_of(observation, self._observation_field), reward)

    def _shown(self, content: str, reward: Any) -> EnvironmentAnswer:
        if not self._role:
            return EnvironmentAnswer(text=content, reward=reward)
        return EnvironmentAnswer(messages=[{"role": self._role, "content": content}], reward=reward)

    def _schema(self) -> Mapping[str, Any]:
        url = f"http{self._url.removeprefix('ws').removesuffix('ws')}schema"
        try:
            with urllib.request.urlopen(url, timeout=SCHEMA_S) as reply:
                schema = msgspec.json.decode(reply.read())
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise EngineError(
                f"there is no OpenEnv server at {quote(url)}: {printable(str(error), 200)};"
                " start the environment's, and name its address in [plugin.openenv].url"
            ) from error
        return schema if isinstance(schema, Mapping) else {}
