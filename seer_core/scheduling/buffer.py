"""The request buffer: every unfinished request, and the only place where its state changes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from seer_core.errors import TransitionError
from seer_core.model import GroupContext, Request, RequestState
from seer_core.model.requests import NOT_IN_FLIGHT

__all__ = ["ACTING", "FINISHED", "RUNNING", "WAITING", "RequestBuffer"]

WAITING, RUNNING, ACTING, FINISHED = RequestState
"""The states by themselves: reading one off its Enum costs 0.1 us in Python 3.11."""

HISTORY = 4096
"""Transitions remembered over all requests, for the error message of an illegal one."""


class RequestBuffer:
    """Holds the unfinished requests and walks each through waiting, running, acting, finished.

    ``on_instance`` lists, per instance, the requests whose chunk is in flight there.  Only requests that
    were sent have an entry by their id; the others are found by their group.
    """

    def __init__(self) -> None:
        self._groups: dict[str, list[Request | None]] = {}
        self._sent: dict[str, Request] = {}
        self.get_sent = self._sent.get
        """Return an unfinished request that was sent before, by its id, or None: each event asks."""
        self._history: deque[tuple[str, int, str, str]] = deque(maxlen=HISTORY)
        self._note = self._history.append
        self._seq = 0
        self.on_instance: defaultdict[str, dict[Request, None]] = defaultdict(dict)
        self.waiting = 0
        self.acting = 0
        self.unfinished = 0

    @property
    def running(self) -> int:
        """Requests whose chunk is in flight."""
        return self.unfinished - self.waiting - self.acting

    def add_group(
        self, group: GroupContext, written: Sequence[int] = (), home: str | None = None
    ) -> list[Request]:
        """Create the group's requests, all waiting, with so many tokens ``written`` before, if any.

        Their ids are ``<group id>/<index>``.  The KV of their prompt is on the instance ``home``, if given.
        """
        group.first_seq = self._seq
        requests = [Request(group, index) for index in range(group.size)]
        for request, tokens in zip(requests, written, strict=False):
            request.generated_tokens = tokens
        if home is not None:
            for request in requests:
                request.instance = home
                self._sent[request.id] = request
        self._groups[group.id] = [*requests]
        self._seq += group.size
        self.waiting += group.size
        self.unfinished += group.size
        return requests

    def get(self, request_id: str) -> Request | None:
        """Return an unfinished request, or None."""
        found = self._sent.get(request_id)
        group_id, _, index = request_id.rpartition("/")
        group = self._groups.get(group_id)
        if found is None and group is not None and index.isdecimal() and int(index) < len(group):
            found = group[int(index)]
        return found if found is not None and found.id == request_id else None

    def run(self, request: Request, instance_id: str, chunk_tokens: int, kv_tokens: int) -> bool:
        """Mark a chunk as sent; return whether the request moved away from an earlier instance."""
        if request.state is not WAITING:
            raise self._illegal(request, WAITING, f"run on {instance_id}")
        group, before = request.group, request.instance
        self._note((group.id, request.index, "run on ", instance_id))
        request.state = RUNNING
        request.chunk_tokens = chunk_tokens
        request.chunk_kv_tokens = kv_tokens
        self.on_instance[instance_id][request] = None
        in_flight = group.in_flight
        if in_flight is NOT_IN_FLIGHT:
            in_flight = group.in_flight = {}
        in_flight[instance_id] = in_flight.get(instance_id, 0) + 1
        self.waiting -= 1
        if before == instance_id:
            return False
        request.instance = instance_id
        if before is None:
            self._sent[request.id] = request
            return False
        request.migrations += 1
        return True

    def absorb(self, request: Request, tokens: int) -> None:
        """Count a finished chunk's new tokens; the request waits again."""
        if not 0 <= tokens <= request.chunk_tokens:
            raise TransitionError(
                f"request {request.id!r} got {tokens} tokens for a chunk of {request.chunk_tokens};"
                f" its engine broke the contract. {self.story(request)}"
            )
        self._back(request, "absorb")
        request.generated_tokens += tokens
        request.chunks += 1

    def give_back(self, request: Request) -> None:
        """Void the chunk in flight; the request waits as it was before that chunk."""
        self._back(request, "give back")

    def lose_instance(self, instance_id: str) -> list[Request]:
        """Void the chunks in flight on an instance and return their requests; their KV is lost."""
        lost = list(self.on_instance.get(instance_id, ()))
        for request in lost:
            self.give_back(request)
        self.forget_instance(instance_id)
        return lost

    def forget_instance(self, instance_id: str) -> None:
        """Count the KV of waiting and acting requests on an instance as lost."""
        for request in self._sent.values():
            if request.instance == instance_id and request.state is not RUNNING:
                request.instance = None

    def act(self, request: Request) -> None:
        """Leave a waiting request to its environment."""
        if request.state is not WAITING:
            raise self._illegal(request, WAITING, "act")
        self._note((request.group.id, request.index, "act", ""))
        request.state = ACTING
        self.waiting -= 1
        self.acting += 1

    def answer(self, request: Request, tokens: int) -> None:
        """Count the tokens of the environment's answer, 0 for none; the request waits again."""
        if request.state is not ACTING:
            raise self._illegal(request, ACTING, "answer")
        if not 0 <= tokens <= request.remaining_tokens:
            raise TransitionError(
                f"request {request.id!r} got an answer of {tokens} tokens where {request.remaining_tokens}"
                f" have room. {self.story(request)}"
            )
        self._note((request.group.id, request.index, "answer", ""))
        request.state = WAITING
        request.generated_tokens += tokens
        self.acting -= 1
        self.waiting += 1

    def finish(self, request: Request) -> None:
        """End a waiting request and forget it."""
        if request.state is not WAITING:
            raise self._illegal(request, WAITING, "finish")
        group, index = request.group, request.index
        self._note((group.id, index, "finish", ""))
        request.state = FINISHED
        self.waiting -= 1
        self.unfinished -= 1
        self._sent.pop(request.id, None)
        self._groups[group.id][index] = None

    def forget_group(self, group: GroupContext) -> None:
        """Forget a group, all requests of which are over."""
        del self._groups[group.id]

    def _back(self, request: Request, what: str) -> None:
        if request.state is not RUNNING:
            raise self._illegal(request, RUNNING, what)
        group, instance_id = request.group, request.instance
        assert instance_id is not None
        self._note((group.id, request.index, what, ""))
        del self.on_instance[instance_id][request]
        in_flight = group.in_flight
        if in_flight[instance_id] == 1:
            del in_flight[instance_id]
        else:
            in_flight[instance_id] -= 1
        request.state = WAITING
        self.waiting += 1

    def _illegal(self, request: Request, state: RequestState, what: str) -> TransitionError:
        return TransitionError(
            f"request {request.id!r} cannot {what}: it is {request.state.value}, not"
            f" {state.value}. {self.story(request)}"
        )

    def story(self, request: Request) -> str:
        """Return the remembered transitions of a request, for error messages."""
        here = request.group.id, request.index
        steps = [what + where for group, index, what, where in self._history if (group, index) == here]
        return (
            f"{request.generated_tokens} of {request.group.max_tokens} tokens in {request.chunks} chunks,"
            f" last on {request.instance}; its last transitions: {', '.join(steps[-12:]) or 'none'}"
        )

    def oldest_waiting(self) -> Request:
        """Return the waiting request that arrived first; there must be one."""
        return next(request for request in self if request.state is WAITING)

    def __iter__(self) -> Iterator[Request]:
        return (request for group in self._groups.values() for request in group if request is not None)

    def __len__(self) -> int:
        return self.unfinished
