"""The application: OpenAI's completions and chats over HTTP, on one open rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import attrs
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from seer_core.errors import EngineError, OverloadError, PromptError, SeerError
from seer_core.model import Completion
from seer_core.policy import Observer
from seer_core.ports import Tokenizer
from seer_core.runtime import Runtime
from seer_server.announcements import Announcements
from seer_server.answers import Answer, Part, usage
from seer_server.batches import Batches
from seer_server.control import Control
from seer_server.desk import Desk, Ticket
from seer_server.http import REFUSALS, Refused, Stream, check_token, departure, read_body, refusal
from seer_server.protocol import Asked, ChatRequest, CompletionRequest, error_body, parse, records
from seer_server.text import GrowingText

__all__ = ["make_app"]


def make_app(
    make_runtime: Callable[[Sequence[Observer]], Runtime],
    model: str = "seer",
    token: str | None = None,
    most_requests: int | None = None,
) -> Starlette:
    """Return an ASGI application that starts a runtime with itself and ends it with itself.

    ``make_runtime`` makes it, with further observers.  ``token`` is what clients must bring.  At most
    ``most_requests`` responses are unfinished at a time.
    """
    desk = Desk(make_runtime, most_requests)
    service = _Service(desk, model, token)
    batches, announcements, control = Batches(desk, token), Announcements(desk, token), Control(desk, token)

    @asynccontextmanager
    async def live(app: Starlette) -> AsyncIterator[None]:
        async with desk.runtime:
            serving = asyncio.create_task(desk.serve())
            try:
                yield
            finally:
                serving.cancel()
                with suppress(asyncio.CancelledError):
                    await serving

    return Starlette(
        lifespan=live,
        routes=[
            Route("/v1/chat/completions", service.chat, methods=["POST"]),
            Route("/v1/completions", service.completions, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/rollouts", batches.roll_out, methods=["POST"]),
            Route("/v1/abort", batches.abort, methods=["POST"]),
            Route("/v1/announcements", announcements.announce, methods=["POST"]),
            Route("/v1/announcements/{id}", announcements.leave, methods=["DELETE"]),
            Route("/v1/weights", control.update_weights, methods=["POST"]),
            Route("/v1/weights", control.take_weights, methods=["PUT"]),
            Route("/v1/sleep", control.sleep, methods=["POST"]),
            Route("/v1/wake", control.wake, methods=["POST"]),
            Route("/v1/state", control.state),
            Route("/v1/claims", announcements.claim, methods=["POST"]),
            Route("/health", service.health),
        ],
        exception_handlers=REFUSALS,
    )


@attrs.define(eq=False)
class _Service:
    desk: Desk
    model: str
    token: str | None

    async def health(self, request: Request) -> Response:
        """Say whether requests are taken; no token is asked for."""
        try:
            self.desk.expect_working()
        except SeerError as error:
            raise Refused(503, str(error)) from error
        return Response()

    async def models(self, request: Request) -> Response:
        """Say what is served."""
        check_token(request, self.token)
        entry = {
            "id": self.model,
            "object": "model",
            "created": 0,
            "owned_by": "seer",
            "max_model_len": self.desk.runtime.fleet.model.max_model_tokens,
            "weight_version": self.desk.runtime.weight_version,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def completions(self, request: Request) -> Response:
        """Go on with prompts: all of it at the end, or what is new, as it comes."""
        return await self._roll_out(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        """Go on with a chat, in the same ways."""
        return await self._roll_out(request, ChatRequest)

    async def _roll_out(self, request: Request, kind: type[Asked]) -> Response:
        check_token(request, self.token)
        try:
            asked = parse(await read_body(request), kind)
            if asked.model not in (None, self.model):
                raise Refused(404, f"there is no model {asked.model!r}, but {self.model!r}")
            asked = _with_headers(asked, request.headers)
            answer = Answer(asked, self.model, self._tokenizer)
            wanted = records(asked, asked.group or answer.id)
            ticket = self.desk.ask(wanted, bool(asked.stream), fitting=True)
        except OverloadError as error:
            raise refusal(error, self.desk.retry_s(len(wanted) * asked.n)) from error
        except SeerError as error:
            raise refusal(error) from error
        if asked.stream:
            return Stream(self._stream(ticket, answer), partial(self.desk.leave, ticket))
        try:
            return await self._whole(request, ticket, answer)
        finally:
            self.desk.leave(ticket)

    async def _whole(self, request: Request, ticket: Ticket, answer: Answer) -> Response:
        """Wait for all responses, or for the client to go."""
        collecting = asyncio.ensure_future(_collect(ticket))
        gone = asyncio.ensure_future(departure(request))
        try:
            await asyncio.wait((collecting, gone), return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=499)  # nobody reads it
            completions = collecting.result()
        except SeerError as error:
            raise Refused(503, str(error)) from error
        finally:
            collecting.cancel()
            gone.cancel()
        prompt_of = {group.id: group.prompt_token_ids for group in ticket.groups}
        parts = [
            Part(
                number,
                each.text or "",
                each.token_ids,
                each.logprobs,
                each.finish_reason,
                prompt_of[each.group_id],
            )
            for number, each in enumerate(completions)
        ]
        used = _usage(ticket, sum(len(each.token_ids) for each in completions))
        return JSONResponse(answer.whole(parts, used, completions[0].weight_version))

    async def _stream(self, ticket: Ticket, answer: Answer) -> AsyncIterator[bytes]:
        """Yield what is new of each response, as server-sent events."""
        places = _places(ticket)
        prompt_of = {group.id: group.prompt_token_ids for group in ticket.groups}
        prompts = {name: prompt_of[name.rpartition("/")[0]] for name in places}
        texts = {name: GrowingText(self._tokenizer) for name in places}
        written: Counter[str] = Counter()
        while texts:
            news = await ticket.news.get()
            if isinstance(news, SeerError):
                yield _event(error_body(str(news), "server_error", 503))
                return
            name = news.request_id
            if isinstance(news, Completion):
                start = written[name]
                new, scores, reason = news.token_ids[start:], news.logprobs[start:], news.finish_reason
                text = texts.pop(name).rest(news.text or "")
            else:
                new, scores, reason = news.token_ids, news.logprobs, None
                text = texts[name].add(new)
            written[name] += len(new)
            part = Part(places[name], text, new, scores, reason, prompts.pop(name, None))
            yield _event(answer.piece(part))
        if answer.counts:
            yield _event(answer.last(_usage(ticket, written.total())))
        yield b"data: [DONE]\n\n"

    @property
    def _tokenizer(self) -> Tokenizer | None:
        return self.desk.runtime.fleet.tokenizer


def _with_headers(asked: Asked, headers: Mapping[str, str]) -> Asked:
    """Take group and priority from headers, for clients that cannot add fields."""
    group, priority = headers.get("x-seer-group"), headers.get("x-seer-priority")
    if group is not None and asked.group is None:
        asked = msgspec.structs.replace(asked, group=group)
    if priority is not None and asked.priority is None:
        try:
            asked = msgspec.structs.replace(asked, priority=int(priority))
        except ValueError:
            raise PromptError("X-Seer-Priority is no whole number") from None
    return asked


async def _collect(ticket: Ticket) -> list[Completion]:
    """Return all responses, in the order of prompts and indices."""
    places = _places(ticket)
    found: dict[int, Completion] = {}
    while len(found) < len(places):
        news = await ticket.news.get()
        if isinstance(news, SeerError):
            raise news
        if isinstance(news, Completion):
            found[places[news.request_id]] = news
    if all(each.finish_reason == "error" for each in found.values()):
        raise EngineError("every response ended in an error; look into the server's log")
    return [found[number] for number in sorted(found)]


def _places(ticket: Ticket) -> dict[str, int]:
    """Return the index of each request among the choices."""
    names = (f"{group.id}/{index}" for group in ticket.groups for index in range(group.n))
    return {name: number for number, name in enumerate(names)}


def _usage(ticket: Ticket, written: int) -> dict[str, int]:
    """Return the numbers of tokens; a prompt counts once for all its responses, as at vLLM's."""
    return usage(sum(len(group.prompt_token_ids) for group in ticket.groups), written)


def _event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
