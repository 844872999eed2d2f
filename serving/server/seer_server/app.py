"""The application: OpenAI's completions and chats over HTTP, on one open rollout."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import msgspec
import structlog
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from seer_cli.controls import RunControls
from seer_host.routed_experts import whole_attachments
from seer_prometheus.metrics import Metrics
from seer_session.journal import Journal
from seer_session.runtime import Runtime
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from seer_core.errors import ConfigError, EngineError, OverloadError, PromptError, SeerError, quote
from seer_core.model import Completion, PromptGroup, StructuredOutputs
from seer_core.ports.engine import Tokenizer
from seer_core.ports.policy import Observer
from seer_server.answers import Answer, Part, usage
from seer_server.batches import Batches
from seer_server.broker import Arrival, AsleepError, BusyUpdatingError, RolloutBroker, Subscription, Trust
from seer_server.choices import ChoiceReader, ParsedChoices, PlainChoices
from seer_server.control import Control
from seer_server.found_parsers import find_parsers
from seer_server.http import (
    REFUSALS,
    Door,
    Handler,
    Refused,
    Stream,
    by_names,
    from_this_machine,
    read_body,
    read_json,
    refusal,
    unless_disconnected,
)
from seer_server.parsing import ChatParsers, ParserNames, TokenizerOfFiles, decode_all_of, require_parser
from seer_server.protocol import (
    AbortIdsRequest,
    AbortOneRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    error_body,
    kind_of,
    parse,
    records,
    skipped_tokens,
)
from seer_server.reservations import Reservations
from seer_server.responses_api import ResponsesAnswer, parse_responses
from seer_server.servers import ABORTS, CONTROL_CALLS, ControlCalls, ControlRoute
from seer_server.sglang_api import SglangAnswer, parse_sglang
from seer_server.shadow_recorder import ShadowRecorder
from seer_server.structured_outputs import FormChecks, after_reasoning, refusal_of
from seer_server.tokens_api import TokensAnswer, parse_tokens
from seer_server.trajectories import IDLE_S, AgentTurn
from seer_server.turns import EndTrajectories, trajectory_in, turn_of
from seer_server.unsupported_fields import FieldError
from seer_server.updates import Piece

__all__ = ["make_app"]

log = structlog.get_logger("seer")

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def make_app(
    make_runtime: Callable[[Sequence[Observer]], Runtime],
    model: str = "",
    token: str | None = None,
    most_requests: int | None = None,
    *,
    open_completions: bool = False,
    weight_roots: Sequence[Path] | None = None,
    journal: Journal | None = None,
    observers: Sequence[Observer] = (),
    controls: RunControls | None = None,
    parsers: ParserNames | None = None,
    trajectory_idle_s: float = IDLE_S,
    trust: Trust | None = None,
    off: bool = False,
    recorder: ShadowRecorder | None = None,
) -> Starlette:
    """Return an ASGI application that starts a runtime with itself and ends it with itself.

    ``make_runtime`` makes it, with further observers.  Without a ``model`` its name is that of servers that
    are engines, or ``seer``.  Clients must send the ``token``, if any; with
    ``open_completions`` not for completions, chats and the name of the model.  Weights are loaded from
    directories below ``weight_roots``, or from any if that is None.  At most ``most_requests`` responses are
    unfinished at a time.  What the ``journal`` has of a group that comes again is not computed again.
    ``observers`` see the rollouts, and ``controls``, if any, may command them.  ``parsers`` read the answers
    of chats.  ``trust`` says what happens where the scheduler fails.  Trajectories are
    forgotten after ``trajectory_idle_s`` seconds without a turn.

    Where Seer is ``off``, requests are passed on to servers in turn, untouched, and nothing else of these
    counts but the ``token``.

    A ``recorder`` notes the requests that are passed on so.

    Raises:
        ConfigError: there are no such parsers, or no servers to pass requests on to.
    """
    metrics = Metrics()
    broker = RolloutBroker(
        make_runtime, most_requests, journal, [metrics, *observers], trajectory_idle_s, trust
    )
    trajectories = broker.trajectories
    metrics.read("unfinished_requests", "Responses that are not over", lambda: broker.unfinished)
    metrics.read("weight_version", "The weights that are loaded", lambda: broker.runtime.weight_version)
    metrics.read("trajectories", "Trajectories that are not forgotten", lambda: trajectories.kept)
    if trust is not None:
        metrics.read(
            "fallback_responses", "Responses written without the scheduler", lambda: broker.direct.replaced
        )
        metrics.read("canary_compared", "Responses written again to compare", lambda: broker.canary.compared)
        metrics.read("canary_different", "Those whose tokens differed", lambda: broker.canary.different)
    metrics.read("asleep", "Whether the instances sleep", lambda: broker.runtime.asleep)
    found = None if parsers is None or off else find_parsers(parsers, broker.runtime.tokenizer)
    forms = FormChecks()
    calls = ControlCalls(broker, off, recorder)
    if off and not calls.servers:
        raise ConfigError("SEER=off passes requests on to servers of [engine.remote], and engines are none")
    service = _Service(broker, model, found, forms, calls)
    batches, reservations = Batches(broker, forms), Reservations(broker, forms)
    control = Control(broker, weight_roots)
    ending = EndTrajectories(trajectories)

    health = Route("/health", service.health)
    open_routes: list[Route] = [health]

    def route(method: str, path: str, handler: Handler, *, completions: bool = False) -> Route:
        needs_token = token is not None and not (completions and open_completions)
        if needs_token:
            return Route(path, handler, methods=[method])
        open_routes.append(Route(path, from_this_machine(handler), methods=[method]))
        return open_routes[-1]

    handler = from_this_machine(calls.handle) if token is None else calls.handle
    controls_of_servers = [
        ControlRoute(path, handler, methods=[call.method]) for path, call in CONTROL_CALLS.items()
    ]
    if token is None:
        open_routes += controls_of_servers

    passed_on = [
        *(Route(path, calls.pass_to_all, methods=["POST"]) for path in ABORTS),
        Route("/{path:path}", calls.pass_on, methods=METHODS),
    ]

    @asynccontextmanager
    async def live(app: Starlette) -> AsyncIterator[None]:
        async with broker.runtime:
            trajectories.by_prompt = bool(calls.servers)
            if controls is not None:
                controls.attach(broker.runtime)
            async with broker.serving():
                yield

    @asynccontextmanager
    async def idle(app: Starlette) -> AsyncIterator[None]:
        log.warning("seer_is_off", servers=[each.address for each in calls.servers])
        try:
            yield
        finally:
            await calls.close()

    app = Starlette(
        lifespan=idle if off else live,
        routes=[health, *controls_of_servers, *passed_on]
        if off
        else [
            route("POST", "/v1/chat/completions", service.chat, completions=True),
            route("POST", "/v1/completions", service.completions, completions=True),
            route("GET", "/v1/models", service.models, completions=True),
            route("GET", "/v1/models/{model:path}", service.one_model, completions=True),
            route("POST", "/v1/responses", service.respond, completions=True),
            route("POST", "/inference/v1/generate", service.generate, completions=True),
            route("POST", "/generate", service.sglang_generate, completions=True),
            route("POST", "/abort_requests", service.abort_requests, completions=True),
            route("POST", "/inference/v1/abort_requests", service.abort_requests, completions=True),
            route("POST", "/abort_request", service.abort_request, completions=True),
            route("DELETE", "/v1/trajectories/{id:path}", ending.end, completions=True),
            route("DELETE", "/v1/groups/{id:path}", ending.end_group, completions=True),
            route("POST", "/programs/release", ending.release, completions=True),
            route("POST", "/finish_session", ending.finish, completions=True),
            route("GET", "/metrics", _exposing(metrics)),
            route("GET", "/targets", _naming_targets(metrics)),
            route("GET", "/version", service.version, completions=True),
            route("POST", "/tokenize", service.tokenize, completions=True),
            route("POST", "/detokenize", service.detokenize, completions=True),
            route("POST", "/v1/rollouts", batches.roll_out),
            route("POST", "/v1/abort", batches.abort),
            route("POST", "/v1/reservations", reservations.reserve),
            route("DELETE", "/v1/reservations/{id}", reservations.release),
            route("POST", "/v1/weights", control.update_weights),
            route("PUT", "/v1/weights", control.receive_weights),
            route("POST", "/v1/sleep", control.sleep),
            route("POST", "/v1/wake", control.wake),
            route("GET", "/v1/state", control.state),
            route("POST", "/v1/command", control.command),
            route("POST", "/v1/rows", reservations.stream_row),
            health,
            *controls_of_servers,
        ],
        middleware=[Middleware(Door, token=token, open_routes=open_routes)],
        exception_handlers=REFUSALS,
    )
    app.state.broker = broker
    return app


@attrs.define(eq=False)
class _Service:
    broker: RolloutBroker
    model: str
    parsers: ChatParsers | None
    forms: FormChecks
    calls: ControlCalls

    async def health(self, request: Request) -> Response:
        """Report whether requests are taken; this needs no token."""
        try:
            if not self.broker.without_scheduler:
                self.broker.require_working()
        except SeerError as error:
            raise Refused(503, str(error)) from error
        return Response()

    async def models(self, request: Request) -> Response:
        """List the one model that is served."""
        return JSONResponse({"object": "list", "data": [self._entry()]})

    async def one_model(self, request: Request) -> Response:
        """Describe the model of this name, if it is the one that is served."""
        self._require(request.path_params["model"])
        return JSONResponse(self._entry())

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens that a completion's prompt has, or a chat's messages."""
        body = await read_body(request)
        asked = parse(body, kind_of(body))
        self._require(asked.model)
        wanted = records(asked, "tokenize")
        if len(wanted) != 1:
            raise FieldError(f"{len(wanted)} prompts; give one", "prompt")
        [group] = await self.broker.read([{**wanted[0], "n": 1, "max_tokens": 1}], fitting=True)
        tokens = group.prompt_token_ids
        longest = self.broker.runtime.model.max_model_tokens
        return JSONResponse({"count": len(tokens), "max_model_len": longest, "tokens": list(tokens)})

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens, special ones too, as vLLM's server does."""
        asked = await read_json(request, DetokenizeRequest)
        self._require(asked.model)
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise PromptError("this engine has no tokenizer")
        decode = decode_all_of(tokenizer) or tokenizer.decode
        try:
            return JSONResponse({"prompt": decode(asked.tokens)})
        except OverflowError as error:
            raise FieldError("tokens holds a number that is no token", "tokens") from error

    async def completions(self, request: Request) -> Response:
        """Answer with completions, at their end or as a stream."""
        return await self._complete(request, CompletionRequest)

    async def chat(self, request: Request) -> Response:
        """Answer with the next message of a chat, at its end or as a stream."""
        return await self._complete(request, ChatRequest)

    async def generate(self, request: Request) -> Response:
        """Answer tokens with tokens, as vLLM's server does, at their end or as a stream."""
        asked = parse_tokens(await read_body(request), attaches=self.calls.attaches("vllm"))
        return await self._roll_out(
            request, asked.completion(), TokensAnswer(asked, self._model, self._tokenizer), "vllm"
        )

    async def sglang_generate(self, request: Request) -> Response:
        """Answer in the form of SGLang's server, at the end or as a stream."""
        asked = parse_sglang(await read_body(request), attaches=self.calls.attaches("sglang"))
        answer = SglangAnswer(asked, self._model, self._tokenizer)
        return await self._roll_out(request, asked.completion(), answer, "sglang")

    async def abort_requests(self, request: Request) -> Response:
        """Abort requests by their ids, or all without any, as at vLLM's server."""
        asked = await read_json(request, AbortIdsRequest)
        return JSONResponse({"status": "aborted", "aborted": self.broker.abort_named(asked.request_ids)})

    async def abort_request(self, request: Request) -> Response:
        """Abort a request by its id, or all, as at SGLang's server: they end with what they have."""
        asked = await read_json(request, AbortOneRequest)
        if asked.abort_all or asked.rid is not None:
            self.broker.abort_named([] if asked.abort_all else [str(asked.rid)])
        return Response()

    async def respond(self, request: Request) -> Response:
        """Answer with one response, in the form of OpenAI's Responses, at its end or as a stream."""
        asked = parse_responses(await read_body(request))
        chat = asked.chat()
        return await self._roll_out(request, chat, ResponsesAnswer(asked, chat, self._model, self._tokenizer))

    async def version(self, request: Request) -> Response:
        """Return the version of Seer."""
        return JSONResponse({"version": version("seer-server")})

    async def _complete(self, request: Request, kind: type[GenerationRequest]) -> Response:
        asked = parse(await read_body(request), kind)
        return await self._roll_out(request, asked, Answer(asked, self._model, self._tokenizer))

    async def _reader(
        self, asked: GenerationRequest, answer: Answer
    ) -> tuple[GenerationRequest, ChoiceReader]:
        """Return a request with the form that its answers have, and how they are read.

        Raises:
            FieldError: the form is none, or nothing reads the calls that are asked for.
        """
        form = asked.form
        field = "structured_outputs" if asked.response_format is None else "response_format"
        await self._require_form(form, field)
        reader: ChoiceReader = PlainChoices(self._tokenizer, answer.special_tokens)
        if isinstance(asked, ChatRequest):
            require_parser(self.parsers, asked.calls)
            if self.parsers is not None and isinstance(self._tokenizer, TokenizerOfFiles):
                reading = await asyncio.to_thread(self.parsers.begin, asked, form)
                if (form := reading.form) is not None:
                    prompt = {**asked.prompts()[0], "n": 1, "max_tokens": 1}
                    [group] = await self.broker.read([prompt], fitting=True)
                    end = reading.reasoning_end(group.prompt_token_ids)
                    form = after_reasoning(form, end)
                    await self._require_form(form, "tools")
                reader = ParsedChoices(asked, reading, self._tokenizer)
        if form is not None:
            asked = msgspec.structs.replace(asked, structured_outputs=form, response_format=None)
        return asked, reader

    async def _require_form(self, form: StructuredOutputs | None, field: str) -> None:
        """Raise FieldError if a form is none, on engines that have forms."""
        if form is not None and "structured_outputs" in self.broker.runtime.model.controls:
            await self.forms.require(form, field)

    async def _roll_out(
        self, request: Request, asked: GenerationRequest, answer: Answer, form: str = ""
    ) -> Response:
        try:
            return await self._answered(request, asked, answer, form)
        except PromptError as error:
            raise by_names(error, answer.names) from error

    async def _answered(
        self, request: Request, asked: GenerationRequest, answer: Answer, form: str
    ) -> Response:
        with self.broker.arriving(answer.id, asked.n) as arrival:
            reader, subscription, skip = await self._taken(request, asked, answer, form, arrival)
        subscription.name = answer.id
        answer.version = self.broker.runtime.weight_version
        if asked.stream:
            events = self._stream(subscription, answer, reader, skip)
            return Stream(events, partial(self.broker.unsubscribe, subscription))
        try:
            return await self._whole(request, subscription, answer, reader)
        finally:
            self.broker.unsubscribe(subscription)

    async def _taken(
        self, request: Request, asked: GenerationRequest, answer: Answer, form: str, arrival: Arrival
    ) -> tuple[ChoiceReader, Subscription, list[int]]:
        """Read a request and submit it; return how its choices are read, and what the client has of them."""
        asked = await self._with_adapter(asked)
        asked = _with_headers(asked, request.headers)
        asked, reader = await self._reader(asked, answer)
        turn = turn_of(asked.trajectory, asked.group, request.headers)
        name = answer.new_group() if turn is not None or not asked.group else asked.group
        wanted = records(asked, name, self.broker.runtime.model.controls)
        if asked.seed is not None and (seeds := self.calls.seeds(asked.seed, asked.n, form)) is not None:
            wanted = [{**each, "seed": None, "seeds": seeds} for each in wanted]
        skip = skipped_tokens(asked, len(wanted) * asked.n)
        arrival.prompts = len(wanted)
        while True:
            if self.calls.held:
                await unless_disconnected(request, self._free_or_over(arrival))
            try:
                return reader, await self._subscribe(wanted, bool(asked.stream), turn, arrival), skip
            except OverloadError as error:
                raise refusal(error, self.broker.retry_s(len(wanted) * asked.n)) from error
            except (AsleepError, BusyUpdatingError):
                if not self.calls.held:  # or else owners have begun to hold requests meanwhile
                    raise

    async def _free_or_over(self, arrival: Arrival) -> None:
        """Wait until owners let requests be taken, or the request is aborted."""
        waits = [asyncio.ensure_future(each) for each in (self.calls.free(), arrival.over.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _subscribe(
        self,
        wanted: Sequence[Mapping[str, Any]],
        stream: bool,
        turn: AgentTurn | None,
        arrival: Arrival,
    ) -> Subscription:
        """Submit a request to the scheduler, or prepare for doing without it."""
        if arrival.over.is_set():
            return await self.broker.aborted(wanted, stream)
        if self.broker.without_scheduler:
            await self.broker.recover()
        if not self.broker.without_scheduler:
            try:
                return await self.broker.submit_text(wanted, stream, fitting=True, turn=turn, arrival=arrival)
            except SeerError:
                if not self.broker.without_scheduler:
                    raise
        return await self.broker.detached(wanted, stream)

    async def _whole(
        self, request: Request, subscription: Subscription, answer: Answer, reader: ChoiceReader
    ) -> Response:
        """Wait for all responses, or for the client to disconnect."""
        try:
            found: dict[str, Completion] = {}
            marks = {}
            try:
                await unless_disconnected(request, _collect(subscription, found))
            except FieldError:
                raise
            except SeerError as error:
                more = await unless_disconnected(request, self.broker.go_on(subscription, found, error))
                found |= more
                marks = {FALLBACK: str(len(more))}
            completions = _in_order(subscription, found)
        except FieldError:
            raise
        except SeerError as error:
            raise Refused(503, str(error)) from error
        group_of = {group.id: group for group in subscription.groups}
        parts = []
        for number, each in enumerate(completions):
            group = group_of[each.group_id]
            reading = reader.whole(group, each)
            part = Part(
                number,
                reading.content or "",
                each.token_ids,
                each.logprobs,
                each.finish_reason,
                group.prompt_token_ids,
                each.stop_reason,
                each.top_logprobs,
                each.prompt_logprobs,
                reading if reader.parsed else None,
                attachments=whole_attachments(each, len(group.prompt_token_ids)),
            )
            parts.append(part)
        used = _usage(subscription, sum(len(each.token_ids) for each in completions))
        return JSONResponse(answer.whole(parts, used, completions[0].weight_version), headers=marks)

    async def _stream(
        self, subscription: Subscription, answer: Answer, reader: ChoiceReader, skip: Sequence[int]
    ) -> AsyncIterator[bytes]:
        """Yield the new tokens of each response, after those to ``skip``, as server-sent events."""
        places = _places(subscription)
        groups = {group.id: group for group in subscription.groups}
        group_of = {name: groups[name.rpartition("/")[0]] for name in places}
        prompts = {name: group.prompt_token_ids for name, group in group_of.items()}
        choices = {name: reader.stream(group) for name, group in group_of.items()}
        written: Counter[str] = Counter()
        over: dict[str, Completion] = {}
        rest: list[Completion] = []
        while choices:
            update = rest.pop() if rest else await subscription.updates.get()
            if isinstance(update, SeerError):
                try:
                    rest = list((await self.broker.go_on(subscription, over, update)).values())
                except SeerError as error:
                    yield _event(error_body(str(error), "server_error", 503))
                    return
                continue
            if isinstance(update, Completion):
                over[update.request_id] = update
            name = update.request_id
            start = written[name] if isinstance(update, Completion) else 0
            new, scores = update.token_ids[start:], update.logprobs[start:]
            tops = None if update.top_logprobs is None else update.top_logprobs[start:]
            had = max(0, skip[places[name]] - written[name])
            written[name] += len(new)
            if had:
                answer.skip(places[name], new[:had], choices[name].add(new[:had]))
                new, scores, tops = new[had:], scores[had:], tops and tops[had:]
            if isinstance(update, Completion):
                if (refused := refusal_of([update])) is not None:
                    refused = by_names(refused, answer.names)
                    yield _event(error_body(str(refused), "invalid_request_error", 400, refused.field))
                    return
                reading, reason = choices.pop(name).rest(new, update), update.finish_reason
            elif new:
                reading, reason = choices[name].add(new), None
            else:
                continue
            prompt = prompts.pop(name, None)
            part = Part(
                places[name],
                reading.content or "",
                new,
                scores,
                reason,
                prompt,
                update.stop_reason if isinstance(update, Completion) else None,
                tops,
                None if prompt is None else update.prompt_logprobs,
                reading=reading if reader.parsed else None,
                attachments=_attachments(update, group_of[name]),
            )
            for event in answer.events(part):
                yield _event(event)
        for event in answer.closing(_usage(subscription, written.total())):
            yield _event(event)
        yield b"data: [DONE]\n\n"

    async def _with_adapter(self, asked: GenerationRequest) -> GenerationRequest:
        """Return a request whose model is Seer's; a name that only the servers have goes to them."""
        name = asked.model
        if name in (None, self._model, self.model) or not await self.calls.serves(name or ""):
            self._require(name)
            return asked
        field = "lora_path" if self.calls.servers[0].kind == "sglang" else "model"
        more = {**(asked.attachments or {}), field: name}
        return msgspec.structs.replace(asked, attachments=more)

    def _require(self, model: str | None) -> None:
        """Refuse the name of another model; a request need not name one."""
        if model not in (None, self._model, self.model):
            raise Refused(404, f"there is no model {quote(model)}, but {quote(self._model)}", field="model")

    @property
    def _model(self) -> str:
        """The name of the model: that of the servers, where engines are servers and no other was given."""
        return self.model or self.calls.served_model or "seer"

    def _entry(self) -> dict[str, Any]:
        """Return the model as clients list it."""
        return {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "seer",
            "max_model_len": self.broker.runtime.model.max_model_tokens,
            "weight_version": self.broker.runtime.weight_version,
        }

    @property
    def _tokenizer(self) -> Tokenizer | None:
        return self.broker.runtime.tokenizer


FALLBACK = "X-Seer-Fallback"
"""The header with the number of an answer's responses that were written without the scheduler."""


def _with_headers(asked: GenerationRequest, headers: Mapping[str, str]) -> GenerationRequest:
    """Take trajectory, group, family and priority from headers, for clients that cannot add fields."""
    group, priority = headers.get("x-seer-group"), headers.get("x-seer-priority")
    family = headers.get("x-seer-family")
    trajectory = trajectory_in(headers)
    if group is not None and asked.group is None:
        asked = msgspec.structs.replace(asked, group=group)
    if family is not None and asked.family is None:
        asked = msgspec.structs.replace(asked, family=family)
    if trajectory is not None and asked.trajectory is None:
        asked = msgspec.structs.replace(asked, trajectory=trajectory)
    if priority is not None and asked.priority is None:
        try:
            asked = msgspec.structs.replace(asked, priority=int(priority))
        except ValueError:
            raise PromptError("X-Seer-Priority is no whole number") from None
    return asked


def _attachments(update: Completion | Piece, group: PromptGroup) -> Mapping[str, Any]:
    """Return the fields of the servers' answers that Seer does not have, with a response's last piece."""
    if not isinstance(update, Completion):
        return {}
    return whole_attachments(update, len(group.prompt_token_ids))


async def _collect(subscription: Subscription, found: dict[str, Completion]) -> None:
    """Put all responses into ``found``."""
    wanted = len(subscription.request_ids)
    while len(found) < wanted:
        update = await subscription.updates.get()
        if isinstance(update, SeerError):
            raise update
        if isinstance(update, Completion):
            found[update.request_id] = update


def _in_order(subscription: Subscription, found: Mapping[str, Completion]) -> list[Completion]:
    """Return responses in the order of prompts and indices."""
    completions = [found[name] for name in subscription.request_ids]
    if all(each.finish_reason == "error" for each in completions):
        reason = next((each.error for each in completions if each.error), "look into the server's log")
        raise refusal_of(completions) or EngineError(f"every response ended in an error: {reason}")
    return completions


def _places(subscription: Subscription) -> dict[str, int]:
    """Return the index of each request among the choices."""
    return {name: number for number, name in enumerate(subscription.request_ids)}


def _usage(subscription: Subscription, written: int) -> dict[str, int]:
    """Return the numbers of tokens; a prompt counts once for all its responses, as at vLLM's."""
    return usage(sum(len(group.prompt_token_ids) for group in subscription.groups), written)


def _event(value: dict[str, Any]) -> bytes:
    name = f"event: {value['type']}\n".encode() if "type" in value else b""
    return name + b"data: " + msgspec.json.encode(value) + b"\n\n"


def _exposing(metrics: Metrics) -> Handler:
    """Return the handler that answers Prometheus."""

    async def expose(request: Request) -> Response:
        """Return the server's figures in the text format of Prometheus."""
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return expose


def _naming_targets(metrics: Metrics) -> Handler:
    """Return the handler that answers where Prometheus finds the engines' own figures."""

    async def name_targets(request: Request) -> Response:
        """Return the addresses at which engines serve their own figures."""
        return Response(metrics.targets(), media_type="application/json")

    return name_targets
