"""Whole responses on servers that share no KV: they are divided where another place or time is better.

A server of another program does not say how far its requests are.  So its KV in use is reckoned: what the
responses there began with, and a token of each for every step since, at the measured pace.  Each report of
the server's corrects the sum.  A response is sent whole.  Its chunk ends by command where KV runs short, for
the server would preempt one, and where a server at less than two thirds of the time for a step takes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import attrs

from seer_core.model import InstanceInfo, InstanceStatus, Request
from seer_core.model.events import ChunkFinished
from seer_core.ports.policy import Placement

__all__ = ["Servers", "keeps_whole"]

STEP_S = 20e-3
"""Taken for a step where none was measured."""
RECENT = 0.25
"""What the last chunk counts for in the measured time of a step."""
FEWEST_TOKENS = 8
"""A shorter chunk is not measured."""
MARGIN = 0.3
"""How much of the tokens that others miss by a prefill a newcomer has to write before KV runs short again.

Both estimates are coarse.  In the simulator 0.1 and 0.3 were alike, and 1 or 2 left too much free.
"""
ON_ITS_WAY_S = 0.02
"""A request that was sent so shortly before a report may not be in it."""
OLDEST_REPORT_S = 5.0
"""A response that has ended may be in reports for so long: SGLang's server measures every fifteen steps."""
MOST_GONE = 1024
"""So many of those are remembered, at most."""
SLOWER = 1.5
"""A response leaves for a server whose steps take so many times less time, at least."""
PAYS = 2.0
"""It has to save so many times as much time as its next chunk takes to begin, for both are estimates."""


def keeps_whole(info: InstanceInfo) -> bool:
    """Return whether responses stay whole there: it is a server that preempts, and shares no KV."""
    return info.overcommits and info.fetch_s_per_token is None


@attrs.frozen
class Sent:
    """A response on a server: when it was sent, with how many tokens, and how many steps there had been."""

    at_s: float
    tokens: int
    steps: float


@attrs.define(eq=False)
class Server:
    """The responses on a server, and how many steps it has made, as far as that is known."""

    status: InstanceStatus
    step_s: float
    now_s: float
    steps: float = 0.0
    begun_tokens: float = 0.0
    """KV tokens in use, less one for each response and step so far."""
    sent: dict[Request, Sent] = attrs.Factory(dict)
    prompts: dict[int, int] = attrs.Factory(dict)
    """How many responses of each group are here, by its number: they share their prompt."""
    ending: dict[Request, None] = attrs.Factory(dict)
    report: tuple[int, int, float] = (0, 0, 0.0)
    alone: bool = True
    """Whether the last report had no requests of other clients."""
    gone: deque[tuple[float, float]] = attrs.Factory(lambda: deque(maxlen=MOST_GONE))
    """When responses have ended here lately, and with how much KV."""
    chosen: int = 0
    timed: bool = False
    """Whether the time of its steps is that under load, by reports or by a chunk."""
    by_chunk: bool = False
    """Whether it has been timed by a chunk, which is more exact than by reports."""
    measured: bool = True
    """Whether its steps have been timed since a response was sent away from here for their sake."""
    taken_s: float = 0.0
    """When responses were last ended elsewhere for the sake of this server."""
    settled: bool = True
    """Whether its steps have been timed by a response that was sent here since."""
    begun_s: float = 0.0
    """When the first response was sent here."""
    leaving: dict[Request, Server] = attrs.Factory(dict)
    """The responses that were last to end here for the sake of another server, and that one."""

    @property
    def free_tokens(self) -> float:
        """KV tokens that nothing uses; negative where the server preempts, or is about to."""
        return self.status.info.kv_capacity_tokens - self.begun_tokens - len(self.sent) * self.steps

    def move(self, now_s: float) -> None:
        """Take in the steps up to now; before they have been timed, reports alone add some."""
        if self.timed:
            self.steps += (now_s - self.now_s) / self.step_s
        self.now_s = now_s

    def prompt_tokens(self, request: Request) -> int:
        """Return what siblings hold here of a request's prompt."""
        group = request.group
        siblings = self.prompts.get(group.seq, 0) - (request in self.sent)
        return self.status.prompt_kv_tokens(group) if siblings else 0

    def needed(self, request: Request) -> int:
        """Return the KV tokens that a request takes when it comes here; its last block is half full."""
        return request.context_tokens + self.status.info.block_tokens // 2 - self.prompt_tokens(request)

    def add(self, request: Request) -> None:
        """Take in a request that is sent here now."""
        group = request.group
        if not self.sent and not self.steps:
            self.begun_s = self.now_s
        self.begun_tokens += self.needed(request) - self.steps
        self.sent[request] = Sent(self.now_s, self._own_tokens(request), self.steps)
        self.prompts[group.seq] = self.prompts.get(group.seq, 0) + 1

    def drop(self, request: Request, finished: ChunkFinished | None) -> None:
        """Forget a request whose chunk is over, and time the steps by it."""
        written = self.written(request)
        self.gone.append((self.now_s, self.own_kv(request)))
        sent, seq = self.sent.pop(request), request.group.seq
        self.begun_tokens -= sent.tokens - sent.steps
        if finished is not None and self.report[2]:  # what is in use is true, so what comes free has to be
            self.begun_tokens -= finished.tokens - written
        self.prompts[seq] -= 1
        if not self.prompts[seq]:
            del self.prompts[seq]
            self.begun_tokens -= self.status.prompt_kv_tokens(request.group)
        self.ending.pop(request, None)
        if self.alone and not self.sent:
            self.begun_tokens = 0.0  # what is left of estimates
        if finished is not None and finished.tokens >= FEWEST_TOKENS:
            share = RECENT if self.by_chunk else 1.0
            self.step_s += share * ((self.now_s - sent.at_s) / finished.tokens - self.step_s)
            self.measured = self.timed = self.by_chunk = True
            self.settled = self.settled or sent.at_s >= self.taken_s

    def correct(self, running: int, waiting: int, usage: float) -> None:
        """Take in a report: what is in use, by other clients too, and how many the server has stopped."""
        if not (self.sent or usage):
            self.begun_tokens = 0.0  # what is left of sums that reports have corrected
        if not usage:
            self.alone = True
        if (running, waiting, usage) == self.report or not usage:
            return
        self.report = running, waiting, usage
        gone = self._still_in(running + waiting)
        self.alone = running + waiting <= len(self.sent) + len(gone)
        used = max(0.0, usage * self.status.info.kv_capacity_tokens - sum(gone))
        newest = list(reversed(self.sent))
        stopped, others = newest[:waiting], newest[waiting:]
        missing = len(others) - running if running < len(others) / 2 else 0  # it is older than they are
        if others and not (missing or self.by_chunk) and self._has_begun(others[0]):
            self._time(used, stopped)
        used += sum(map(self.own_kv, stopped))
        for number, request in enumerate(others):
            if number >= missing and self._has_begun(request):
                break
            used += self.sent[request].tokens
        self.begun_tokens = used - len(self.sent) * self.steps

    def _still_in(self, reported: int) -> list[float]:
        """Return the KV of responses that are over, and that a report of so many seems to have yet."""
        while self.gone and self.gone[0][0] < self.now_s - OLDEST_REPORT_S:
            self.gone.popleft()
        surplus = max(0, reported - len(self.sent))
        return [kv for _, kv in reversed(self.gone)][:surplus]

    def _has_begun(self, request: Request) -> bool:
        """Return whether a report of now has a request for sure."""
        return self.sent[request].at_s <= self.now_s - ON_ITS_WAY_S

    def _time(self, used: float, stopped: Sequence[Request]) -> None:
        """Time the steps since the first response by the KV tokens that those use which are not stopped."""
        reckoned = self.begun_tokens + len(self.sent) * self.steps - sum(map(self.own_kv, stopped))
        self.steps += (used - reckoned) / (len(self.sent) - len(stopped))
        if self.steps >= FEWEST_TOKENS:
            self.step_s = (self.now_s - self.begun_s) / self.steps
            self.timed = True

    def written(self, request: Request) -> float:
        """Return how many tokens a request has written here, about."""
        return self.steps - self.sent[request].steps

    def own_kv(self, request: Request) -> float:
        """Return the KV that comes free if a request leaves, but for a prompt that siblings hold as well."""
        return self.sent[request].tokens + self.written(request)

    def left(self, request: Request) -> float:
        """Return how many tokens a request has still to write: up to the longest of its group so far.

        One that is longer already has as many to come as it has, for such lengths have a heavy tail.
        """
        tokens = request.generated_tokens + self.written(request)
        left = request.group.estimate_tokens - tokens
        return min(left if left > 0 else tokens, request.group.max_tokens - tokens)

    def cost_s(self, request: Request, tokens: float) -> float:
        """Return how long the next chunk of a request with so many tokens of context takes to begin here."""
        info = self.status.info
        return info.chunk_gap_s + (tokens - self.prompt_tokens(request)) * info.prefill_s_per_token

    def frees(self, request: Request) -> bool:
        """Return whether a request's end frees KV for longer than it takes to compute that again."""
        tokens = request.context_tokens + self.written(request)
        return self.left(request) * self.step_s > PAYS * self.cost_s(request, tokens)

    def divisible(self, oldest: bool = False) -> Iterator[Request]:
        """Iterate over those that may be ended, the newest first, and over the ``oldest`` if asked to.

        A response whose seed goes by its chunks would be another one if it ended at another token.
        """
        if self.status.info.exactness == "reproducible":
            return
        kept = None if oldest else next(iter(self.sent), None)
        for request in reversed(self.sent):
            if request is not kept and request not in self.ending and not request.group.whole:
                yield request

    def _own_tokens(self, request: Request) -> int:
        block = self.status.info.block_tokens
        return request.context_tokens + block // 2 - self.status.prompt_kv_tokens(request.group)


class Servers:
    """Places whole responses on servers, and says which are to end there.

    A request goes where most KV is free, what siblings hold of its prompt included.  It is let in if it can
    write more tokens, until KV runs short, than all others there miss by its prefill, in part (``MARGIN``).
    Where KV runs short, those end which have the least to write.
    """

    def __init__(self, now_s: float = 0.0) -> None:
        self._servers: dict[int, Server] = {}
        self._now_s = now_s
        self._choices = 0
        self._refused = False
        """Whether a request waits because no server lets it in."""
        self._placed: Request | None = None

    def follow(self, instances: Iterable[InstanceStatus]) -> None:
        """Take these for all servers."""
        known, self._servers = self._servers, {}
        for each in instances:
            server = known.get(each.seq)
            self._servers[each.seq] = server or Server(each, each.info.step_s or STEP_S, self._now_s)

    def tick(self, now_s: float) -> None:
        """Take the time of an event."""
        self._now_s = now_s
        self._refused = False

    def changed(self, instance: InstanceStatus) -> None:
        """Take in a request that has been sent to a server, or its report."""
        server = self._servers[instance.seq]
        server.move(self._now_s)
        placed, self._placed = self._placed, None
        if placed is not None:
            server.add(placed)
        else:
            reported = instance.reported_running, instance.reported_waiting
            server.correct(*reported, instance.reported_kv_usage)

    def ended(self, request: Request, instance: InstanceStatus, finished: ChunkFinished | None) -> None:
        """Take in a chunk that is over."""
        server = self._servers[instance.seq]
        if request in server.sent:
            server.move(self._now_s)
            server.drop(request, finished)

    def place(self, request: Request) -> Placement | None:
        """Return the server for a request, or None while none lets it in."""
        best = self._faster_for(request)
        if best is None:
            best = self._emptiest(request)
            if best is None or not self._admits(best, request):
                self._refused = True
                return None
        self._choices += 1
        best.chosen = self._choices
        self._placed = request
        why = "home" if request.instance == best.status.id else "apart" if request.instance else "new"
        return Placement(best.status, "only" if len(self._servers) == 1 else why, 1)

    def _emptiest(self, request: Request) -> Server | None:
        """Return the server with a free slot and most free KV, the least recently chosen of equals."""
        best, most = None, (0.0, 0)
        for server in self._servers.values():
            if server.status.free_slots > 0:
                server.move(self._now_s)
                worth = server.free_tokens + server.prompt_tokens(request), -server.chosen
                if best is None or worth > most:
                    best, most = server, worth
        return best

    def _faster_for(self, request: Request) -> Server | None:
        """Return the server for which a response has been ended, if it still has a place."""
        for server in self._servers.values():
            if (faster := server.leaving.pop(request, None)) is not None:
                has_place = faster.status.free_slots > 0 and faster in self._servers.values()
                return faster if has_place and self._admits(faster, request) else None
        return None

    def _admits(self, server: Server, request: Request) -> bool:
        needed, running, info = server.needed(request), server.status.running, server.status.info
        missed = running * needed * info.prefill_s_per_token / server.step_s
        gap = info.chunk_gap_s / server.step_s if request.generated_tokens else 0.0
        return not running or server.free_tokens - needed >= running * (MARGIN * missed + gap)

    def to_end(self) -> Iterable[Request]:
        """Return the requests whose chunks are to end now."""
        found: list[Request] = []
        for server in self._servers.values():
            server.move(self._now_s)
            missing = -server.free_tokens - sum(map(server.own_kv, server.ending))
            if missing <= 0:
                continue
            for request in sorted(filter(server.frees, server.divisible()), key=server.left):
                server.ending[request] = None
                found.append(request)
                missing -= server.own_kv(request)
                if missing <= 0:
                    break
        if not (found or self._refused):
            found += self._to_faster()
        return found

    def _to_faster(self) -> Sequence[Request]:
        """Return the requests that save most time on a server with shorter steps, while none waits.

        They are so few that its steps stay shorter even if they grow in proportion to the requests.  Where
        so long steps follow from more requests alone, so many leave that both servers' would be alike.  The
        next ones leave for that server once its steps with these have been timed.
        """
        for server in self._servers.values():
            if not (server.timed and server.measured) or server.ending:
                continue
            others = self._servers.values()
            settled = [each for each in others if each.timed and each.settled]
            faster = [each for each in settled if each.step_s * SLOWER < server.step_s]
            if not faster:
                continue
            best = max(faster, key=lambda each: each.free_tokens)
            server.leaving = dict.fromkeys(self._leaving(server, best), best)
            if server.leaving:
                server.ending |= dict.fromkeys(server.leaving)
                server.measured = best.settled = False
                best.taken_s = self._now_s
                return list(server.leaving)
        return []

    def _leaving(self, server: Server, best: Server) -> Iterator[Request]:
        """Iterate over those that have a place on a faster server, and save more time than the move costs."""
        free, here, there = best.free_tokens, len(server.sent), max(1, len(best.sent))
        slowness = server.step_s / best.step_s
        if slowness < SLOWER * here / there:  # it may be slower for no other reason than its many responses
            most = int((slowness - 1) / (slowness / here + 1 / there))
        else:
            most = int(there * slowness) - len(best.sent)
        most = min(max(1, most), best.status.free_slots)
        for request in sorted(server.divisible(oldest=True), key=server.left, reverse=True)[:most]:
            tokens = request.context_tokens + server.written(request)
            free -= tokens - best.prompt_tokens(request)
            saved_s = server.left(request) * (server.step_s - best.step_s)
            if free <= 0 or saved_s <= PAYS * best.cost_s(request, tokens):
                return
            yield request
