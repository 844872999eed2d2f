"""``python -m seer_openenv URL < episodes.jsonl > prompts.jsonl``: prompts of the first observations.

A line of ``episodes.jsonl`` has the arguments of the environment's ``reset`` for one prompt.  The prompt is
the observation that it answers, and its metadata keep the arguments, so that each response of the group
plays the same episode.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from seer_core.errors import InputError, SeerError, quote
from seer_openenv.environment import RESET, socket_url
from seer_openenv.episode import Episode
from seer_openenv.wording import content_of


async def prompts(url: str, episodes: Iterable[str], field: str | None, role: str) -> AsyncIterator[Any]:
    """Yield a prompt for each line; raises SeerError for a line that is no object, or without a server."""
    for number, line in enumerate(episodes, start=1):
        try:
            arguments = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InputError(f"line {number} is no JSON, {error}; write reset's arguments there") from error
        if not isinstance(arguments, dict):
            raise InputError(f"line {number} is {quote(arguments)}; write an object of reset's arguments")
        episode = Episode(socket_url(url), arguments)
        try:
            first = await episode.begin()
        finally:
            await episode.close()
        content = content_of(first.get("observation") or {}, field)
        made = {"messages": [{"role": role, "content": content}]} if role else {"prompt": content}
        yield {**made, "metadata": {RESET: arguments}}


async def main() -> None:
    """Write a line for each that is read."""
    parser = argparse.ArgumentParser(prog="python -m seer_openenv", description=__doc__)
    parser.add_argument("url", help="the environment's server, as [plugin.openenv].url")
    parser.add_argument("--observation-field", metavar="NAME", help="as [plugin.openenv].observation_field")
    parser.add_argument("--role", default="user", help="of the message; empty for a prompt of plain text")
    given = parser.parse_args()
    lines = (line for line in sys.stdin if line.strip())
    async for prompt in prompts(given.url, lines, given.observation_field, given.role):
        print(msgspec.json.encode(prompt).decode())


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except SeerError as error:
        sys.exit(f"Error: {error}")
