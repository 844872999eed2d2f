"""TRL's tools and environments as the environment of a rollout: what its own loop does, response by response.

TRL's loop waits for the turns of all responses before it calls a tool.  Here each response goes on as soon as
its own tools have answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from seer_session.contained import contain_tasks
from seer_session.environment import AnsweredTurn, EnvironmentAnswer, ModelTurn, Trajectory

from seer_core import Completion
from seer_core.error_origin import describe_error, is_interruption
from seer_core.errors import PromptError, text_by

if TYPE_CHECKING:
    from trl import GRPOTrainer

__all__ = ["ToolTurns"]


@attrs.define(eq=False)
class _Conversation:
    """The turns and calls of one row of TRL's batch; ``ids`` has the tokens of the prompt too."""

    row: int
    ids: list[int]
    messages: list[dict[str, Any]] = attrs.Factory(list)
    turns: int = 0
    calls: int = 0
    failures: int = 0


class ToolTurns:
    """Answers the turns of one rollout by the tools that TRL's trainer has for each row of its batch.

    ``rows`` are the rows by group and index, and ``prompt_ids`` the prompts by row.  Its methods are plain
    ones, so they run in threads: the tools of several responses work at the same time.  ``results`` may call
    tools, too; call it in a thread, where nothing that they raise is Ctrl-C.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        prompt_ids: Sequence[Sequence[int]],
        rows: Mapping[tuple[str, int], int],
    ) -> None:
        self._trainer = trainer
        self._prompt_ids, self._rows = prompt_ids, rows
        self._longest: int = trainer.accelerator.unwrap_model(trainer.model).config.max_position_embeddings
        self._conversations: dict[tuple[str, int], _Conversation] = {}

    def reset(self, trajectory: Trajectory, earlier: Sequence[AnsweredTurn]) -> None:
        """Begin a row; turns that an earlier process has answered are played again."""
        conversation = self._begin(trajectory.group_id, trajectory.index)
        for each in earlier:
            self._call(conversation, self._read(conversation, each.turn.token_ids))
            conversation.ids += each.answer_token_ids

    def step(self, trajectory: Trajectory, turn: ModelTurn) -> EnvironmentAnswer:
        """Call what the turn asks for, and return the results as TRL's chat template has them.

        The response ends where the turn calls nothing, where TRL's ``max_tool_calling_iterations`` are used
        up, and where the results have no room; those are dropped then, as in TRL.
        """
        conversation = self._conversations[trajectory.group_id, trajectory.index]
        calls = self._read(conversation, turn.token_ids)
        if not calls or turn.number >= self._trainer.max_tool_calling_iterations:
            return EnvironmentAnswer(done=True)
        before = len(conversation.messages)
        results = self._call(conversation, calls)
        answer = self._trainer._get_tool_suffix_ids(results)
        longest = self._longest
        if len(answer) > turn.left_tokens or len(conversation.ids) + len(answer) >= longest:
            del conversation.messages[before:]
            return EnvironmentAnswer(done=True)
        conversation.ids += answer
        return EnvironmentAnswer(token_ids=answer)

    def results(self, completions: Sequence[Completion]) -> tuple[Any, ...]:
        """Return what TRL's ``_tool_call_loop`` would, of the completions in the order of the rows.

        These are masks, conversations, tokens and log-probs, then how many tools were called and failed, and
        images, of which there are none.
        """
        found = [self._conversation(each) for each in completions]
        return (
            [each.loss_mask for each in completions],
            [conversation.messages for conversation in found],
            [each.token_ids.tolist() for each in completions],
            [each.logprobs.tolist() for each in completions],
            sum(conversation.calls for conversation in found),
            sum(conversation.failures for conversation in found),
            [[] for _ in found],
        )

    def _conversation(self, completion: Completion) -> _Conversation:
        """Return a response's conversation, with the last turn where its limit has cut that short.

        TRL calls the tools of that turn, too, and drops their results.
        """
        place = completion.group_id, completion.index
        conversation = self._conversations.get(place) or self._begin(*place)
        unread = completion.turns[conversation.turns :]
        if unread:
            calls = self._read(conversation, completion.token_ids.tolist()[-unread[0].tokens :])
            if calls and conversation.turns <= self._trainer.max_tool_calling_iterations:
                before = len(conversation.messages)
                self._call(conversation, calls)
                del conversation.messages[before:]
        return conversation

    def _begin(self, group_id: str, index: int) -> _Conversation:
        row = self._rows[group_id, index]
        begun = self._conversations[group_id, index] = _Conversation(row, list(self._prompt_ids[row]))
        return begun

    def _read(self, conversation: _Conversation, token_ids: list[int]) -> list[dict[str, Any]]:
        """Append a turn to a conversation, and return its tool calls."""
        from trl.chat_template_utils import parse_response

        trainer, row = self._trainer, conversation.row
        tools = trainer.tools
        if trainer.environment_factories is not None:
            tools = trainer._env_tools[trainer._batch_environments[row]]
        message = parse_response(trainer.processing_class, token_ids, prefix=conversation.ids, tools=tools)
        conversation.messages.append(message)
        conversation.ids += token_ids
        conversation.turns += 1
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        return calls

    def _call(self, conversation: _Conversation, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Call tools and return their results as messages, which are appended to the conversation.

        As in TRL, a tool that raises has an error as its result, and results of coroutines come last.

        Raises:
            PromptError: a tool raised something that is no ``Exception``, or returned a list.
        """
        trainer, row = self._trainer, conversation.row
        plain, coroutines = trainer._sync_tool_dicts[row], trainer._async_tool_dicts[row]
        results: list[tuple[str, Any]] = []
        begun: list[tuple[str, Any]] = []
        conversation.calls += len(calls)
        for call in calls:
            if call["type"] != "function":
                name = call.get("name", "unknown")
                results.append((name, {"error": f"Unsupported tool call type: {call['type']}"}))
                conversation.failures += 1
                continue
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                if name in plain:
                    results.append((name, plain[name](**arguments)))
                elif name in coroutines:
                    begun.append((name, coroutines[name](**arguments)))
                else:
                    raise ValueError(f"Tool {name} not found.")
            except BaseException as error:
                results.append((name, _failure(name, plain.get(name), error)))
                conversation.failures += 1
        if begun:
            awaited = _together([coroutine for _, coroutine in begun])
            ended = asyncio.run_coroutine_threadsafe(awaited, trainer.async_loop).result()
            for (name, _), result in zip(begun, ended, strict=True):
                failed = issubclass(type(result), BaseException)
                results.append((name, _failure(name, coroutines[name], result) if failed else result))
                conversation.failures += failed
        messages = []
        for name, result in results:
            if isinstance(result, list):
                raise PromptError(
                    f"the tool {name} returned a list, which TRL takes for text and images; Seer rolls out"
                    " text alone, so let it return text"
                )
            messages.append({"role": "tool", "name": name, "content": _text(result)})
        conversation.messages += messages
        return messages


async def _together(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results of coroutines, or what they raised; none of them ends the event loop."""
    contain_tasks()
    return await asyncio.gather(*map(_outcome, coroutines))


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await coroutine
    except BaseException as error:  # a task would keep neither text nor place of a CancelledError
        if is_interruption(error):
            raise
        return error


def _failure(name: str, tool: object, error: BaseException) -> dict[str, str]:
    """Return the result of a tool that raised, as TRL has it.

    Raises:
        PromptError: what it raised is no ``Exception``; TRL's own loop would end by it.
        BaseException: it is Ctrl-C, or a cancellation of this thread's task.
    """
    if is_interruption(error):
        raise error
    if not issubclass(type(error), Exception):
        raise PromptError(f"the tool {name} raised {describe_error(error, tool)}") from error
    return {"error": _text(error)}


def _text(value: object) -> str:
    """Return a value of a tool as text that a tokenizer takes; lone surrogates are written as escapes."""
    return text_by(str, value).encode("utf-8", "backslashreplace").decode()
