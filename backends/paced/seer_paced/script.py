"""The tokens of an emulated instance: made up, of given or drawn lengths, or of texts that were recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from seer_host.json_files import UNREADABLE, describe_flaw
from seer_sim.lengths import Lengths
from seer_sim.tokens import EOS_TOKEN_ID, generate
from seer_worker.process.adapter import ScriptedTokens

from seer_core.errors import ConfigError, quote
from seer_core.ports.engine import ChunkJob

__all__ = ["Recorded", "Script", "ScriptError", "TokenScript", "read_script"]

NAME_A_SCRIPT = "name the completions.jsonl of a finished `seer run`"


class ScriptError(Exception):
    """A chunk asks for what the script does not have."""


class Recorded(msgspec.Struct, frozen=True):
    """A line of a script: a response as `seer run` writes it to ``completions.jsonl``.

    One whose ``finish_reason`` is not "stop" was cut, and how it goes on is not recorded.
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: str = "stop"


class TokenScript(Protocol):
    """Looks up the tokens of chunks."""

    has_text: bool
    """Whether the tokens are text, from which drafts can be made."""

    def tokens_of(self, job: ChunkJob) -> ScriptedTokens:
        """Return what a chunk writes, ``max_tokens`` at most.

        Raises:
            ScriptError: the script lacks it.
        """
        ...


class Script:
    """Responses by request id; one that was not recorded is made up, as the simulator would."""

    def __init__(
        self, vocab_size: int, lengths: Lengths, recorded: Mapping[str, Recorded] | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._lengths = lengths
        self._recorded = recorded
        self.has_text = recorded is not None

    def tokens_of(self, job: ChunkJob) -> ScriptedTokens:
        """Return what a chunk writes, ``max_tokens`` at most.

        Raises:
            ScriptError: the response is not in the script, or over, or longer than the script, or what it
                has written so far is something else.
        """
        if self._recorded is None:
            return self._make_up(job)
        text = self._recorded.get(job.request_id)
        if text is None:
            raise ScriptError(
                f"the script has no response {quote(job.request_id)}; {NAME_A_SCRIPT} of these prompts"
            )
        before = len(job.token_ids) - job.prompt_tokens
        end = before + job.max_tokens
        stops = text.finish_reason == "stop"
        if before >= len(text.token_ids) or (end > len(text.token_ids) and not stops):
            how = "it stopped there" if stops else "it was cut there; lower max_tokens, or record it anew"
            raise ScriptError(
                f"the script of {quote(job.request_id)} has {len(text.token_ids)} tokens, of which the chunk"
                f" wants those up to number {end}: {how}"
            )
        if tuple(job.token_ids[job.prompt_tokens :]) != text.token_ids[:before]:
            raise ScriptError(f"{quote(job.request_id)} has come back with other tokens than it was given")
        last = text.token_ids[-1] if stops and end >= len(text.token_ids) else None
        return ScriptedTokens(text.token_ids[before:end], last)

    def _make_up(self, job: ChunkJob) -> ScriptedTokens:
        start = len(job.token_ids)
        # Where an environment answers, lengths are those of turns.
        left = self._lengths.of(job) - (start - job.context_tokens)
        if left <= 0:
            raise ScriptError(f"{quote(job.request_id)} was over before this chunk")
        stopped = left <= job.max_tokens
        token_ids, _ = generate(job.seed, start, min(left, job.max_tokens), stopped, self._vocab_size)
        return ScriptedTokens(token_ids.tolist(), EOS_TOKEN_ID if stopped else None)


def read_script(path: Path, vocab_size: int) -> dict[str, Recorded]:
    """Read the responses of a ``completions.jsonl``, by request id.

    Raises:
        ConfigError: it cannot be read, a response stands in it twice or has its last token before its end,
            or a token is none of the vocabulary.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"engine.paced.script: {path} cannot be read: {describe_flaw(error)}; {NAME_A_SCRIPT}"
        ) from error
    found: dict[str, Recorded] = {}
    decoder = msgspec.json.Decoder(Recorded)
    for number, line in enumerate(raw.splitlines(), 1):
        try:
            text = decoder.decode(line)
        except UNREADABLE as error:
            raise ConfigError(
                f"engine.paced.script: {path}, line {number}: {describe_flaw(error)}; {NAME_A_SCRIPT}"
            ) from error
        for wrong in _flaws(text, found, vocab_size):
            raise ConfigError(f"engine.paced.script: {path}, line {number}: {wrong}")
        found[text.request_id] = text
    if not found:
        raise ConfigError(f"engine.paced.script: {path} is empty; {NAME_A_SCRIPT}")
    return found


def _flaws(text: Recorded, found: Mapping[str, Recorded], vocab_size: int) -> Iterable[str]:
    name = quote(text.request_id)
    if text.request_id in found:
        yield f"{name} stands there twice; drop one"
    if not text.token_ids:
        yield f"{name} is empty; drop it"
    elif not 0 <= min(text.token_ids) <= max(text.token_ids) < vocab_size:
        yield f"{name} has tokens that are not below vocab_size = {vocab_size}; raise it"
    elif text.finish_reason == "stop" and text.token_ids[-1] in text.token_ids[:-1]:
        yield f"{name} has its last token, which would end it, in its midst; end it with one of its own"
