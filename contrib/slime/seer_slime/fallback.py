"""The way on where Seer fails: what is unfinished goes on through slime's own client of its servers."""

from __future__ import annotations

import copy
import queue
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import attrs
import structlog

from seer_core.errors import ConfigError, EngineError, PromptError, SeerError

if TYPE_CHECKING:
    from seer_session import Session, SessionRollout

    from seer_core import Completion

__all__ = ["Fallback", "Unfinished", "WatchedRollout", "go_on", "limits_of", "number_of"]

log = structlog.get_logger("seer")

MOST_FALLBACKS, STALL_S = 1024, 600.0
LOOK_S = 5.0
"""How often the tokens so far are asked for."""
NO_CUT = 1 << 29
"""The top k that Seer asks SGLang for where there is none: all requests of a step then draw in one order."""


@attrs.frozen
class Unfinished:
    """A response that Seer has not finished: its group's name, its place in there, and what it has.

    ``seed`` is Seer's for it, None where tokens need not follow from seeds.
    """

    group: str
    place: int
    token_ids: list[int]
    logprobs: list[float]
    seed: int | None = None


def limits_of(args: Namespace) -> tuple[int, float]:
    """Return how many responses of a run may be written without Seer, and after how many seconds it stalls.

    They are ``seer_most_fallbacks`` and ``seer_stall_s`` of slime's ``--custom-config-path``.

    Raises:
        ConfigError: they are no such numbers.
    """
    stall_s = getattr(args, "seer_stall_s", STALL_S)
    if isinstance(stall_s, bool) or not isinstance(stall_s, int | float) or not 0 < stall_s < 86400:
        raise ConfigError(f"seer_stall_s is {stall_s!r}; it must be seconds above 0")
    return number_of(args, "seer_most_fallbacks", MOST_FALLBACKS), stall_s


def number_of(args: Namespace, name: str, default: int) -> int:
    """Return a count of slime's ``--custom-config-path``.

    Raises:
        ConfigError: it is none.
    """
    found = getattr(args, name, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 0:
        raise ConfigError(f"{name} is {found!r}; it must be a number, 0 or more")
    return found


@attrs.define(eq=False)
class Fallback:
    """Counts what a run has written without Seer; ``worked`` is set once a rollout has begun with it."""

    taken: int = 0
    worked: bool = False

    def take(self, responses: int, most: int, reason: str) -> None:
        """Note that so many responses go on without Seer.

        Raises:
            EngineError: there were too many.
        """
        if self.taken + responses > most:
            raise EngineError(
                f"Seer has failed, and {most} responses of a run may be written without it"
                f" (seer_most_fallbacks): {reason}"
            )
        self.taken += responses
        log.error("written_without_seer", responses=responses, reason=reason, of_run=self.taken, most=most)


class WatchedRollout:
    """Completions of records; ``left`` are those that Seer has not finished when it fails, ``reason`` why.

    It fails where it raises, and where for ``stall_s`` seconds no response ends and none gets a token.
    Without a session all are left.
    """

    def __init__(
        self, session: Session | None, records: Sequence[Mapping[str, Any]], iteration: int, stall_s: float
    ) -> None:
        self._session, self._records, self._iteration = session, records, iteration
        self._stall_s = stall_s
        self._found: queue.Queue[Any] = queue.Queue()
        self._rollout: SessionRollout | None = None
        self._asking = threading.Lock()
        self._so_far: dict[str, tuple[str, int, list[tuple[int, float]]]] = {
            f"{record['group_id']}/{place}": (record["group_id"], place, [])
            for record in records
            for place in range(record["n"])
        }
        self.reason = ""

    @property
    def left(self) -> list[Unfinished]:
        """The responses that are unfinished, with the tokens that they have."""
        found = []
        for group, place, pairs in self._so_far.values():
            has = list(pairs)
            found.append(Unfinished(group, place, [each[0] for each in has], [each[1] for each in has]))
        return found

    def __iter__(self) -> Iterator[Completion]:
        reader = self._later(self._read)
        try:
            yield from self._completions()
        finally:
            if not self.reason:
                if (rollout := self._rollout) is not None:
                    for group in dict.fromkeys(each.group for each in self.left):  # its reader has failed
                        rollout.abort_group(group)
                reader.join()

    def _completions(self) -> Iterator[Completion]:
        """Yield what comes, and look in between whether it still goes on."""
        wait_s = min(LOOK_S, self._stall_s)
        last_s = looked_s = time.monotonic()
        looking: threading.Thread | None = None
        while self._so_far:
            before = self._tokens()
            try:
                found = self._found.get(timeout=wait_s)
            except queue.Empty:
                found = None
            if isinstance(found, BaseException):
                if isinstance(found, PromptError | ConfigError) or not isinstance(found, Exception):
                    raise found
                self.reason = str(found) if isinstance(found, SeerError) else repr(found)
                return
            now_s = time.monotonic()
            if found is not None:
                self._so_far.pop(found.request_id, None)
                yield found
                now_s = last_s = time.monotonic()
            elif self._tokens() != before:
                last_s = now_s
            elif now_s - last_s > self._stall_s:
                self.reason = f"no response has got a token for {self._stall_s:g} s"
                return
            if looking is None or not looking.is_alive():
                if now_s - looked_s >= wait_s:
                    looking, looked_s = self._later(self._ask), now_s
            elif now_s - looked_s > self._stall_s:
                self.reason = f"it does not answer within {self._stall_s:g} s"
                return

    def _read(self) -> None:
        """Pass completions on, in a thread of its own: a session that hangs holds that up alone."""
        try:
            assert self._session is not None
            with self._session.open(keep=False) as rollout:
                self._rollout = rollout
                rollout.add(self._records, self._iteration)
                rollout.close()
                try:
                    for completion in rollout:
                        self._found.put(completion)
                except Exception:
                    self._ask()
                    raise
        except BaseException as error:
            self._found.put(error)

    def _ask(self) -> None:
        """Ask for the tokens so far."""
        rollout = self._rollout
        if rollout is None:
            return
        with self._asking, suppress(SeerError):
            places = {name: len(pairs) for name, (_, _, pairs) in list(self._so_far.items())}
            for name, (tokens, logprobs) in rollout.written(places).items():
                if (known := self._so_far.get(name)) is not None:
                    known[2].extend(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    def _tokens(self) -> int:
        return sum(len(pairs) for _, _, pairs in list(self._so_far.values()))

    @staticmethod
    def _later(work: Any) -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread


async def go_on(
    args: Namespace, sample: Any, prompt_ids: Sequence[int], has: Unfinished, sampling: Mapping[str, Any]
) -> tuple[list[int], list[float], Any]:
    """Have slime's own client write the rest of a response, behind its prompt and the tokens it has.

    Returns the tokens and log-probs of the whole response, and slime's sample of the rest.  ``sampling`` is
    that of the prompt's record.
    """
    from slime.rollout.sglang_rollout import GenerateState, generate

    rest = copy.deepcopy(sample)
    context = [*prompt_ids, *has.token_ids]
    rest.tokens = list(context)
    rest.response, rest.response_length, rest.loss_mask, rest.rollout_log_probs = "", 0, None, None
    how = {
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "top_k": sampling["top_k"] or -1,
        "max_new_tokens": sampling["max_tokens"] - len(has.token_ids),
        "min_new_tokens": max(0, (sampling.get("min_tokens") or 0) - len(has.token_ids)),
        "stop": list(sampling.get("stop") or ()) or None,
        "stop_token_ids": list(sampling.get("stop_token_ids") or ()) or None,
        "repetition_penalty": sampling.get("repetition_penalty") or 1.0,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    if "custom_params" in sampling:
        how["custom_params"] = sampling["custom_params"]
    state = GenerateState(args)
    if has.seed is not None:
        how["sampling_seed"], how["top_k"] = has.seed, sampling["top_k"] or NO_CUT
    elif getattr(args, "sglang_enable_deterministic_inference", False):
        seeds = state.group_sampling_seeds
        how["sampling_seed"] = seeds[has.place % len(seeds)]
    async with state.semaphore:
        rest = await generate(args, rest, how)
    tokens = [*has.token_ids, *rest.tokens[len(context) :]]
    return tokens, [*has.logprobs, *(rest.rollout_log_probs or [])], rest
