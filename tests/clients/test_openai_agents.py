"""openai-agents, with its model of chats and with Responses, its default."""

import asyncio

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
)

QUESTION = "ring 92 hop 15 from 62 to 60 ?"


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_an_agent_answers_the_same_whole_and_streamed(server, kind):
    async def ask():
        async with openai.AsyncOpenAI(base_url=server.url, api_key=server.token, max_retries=0) as client:
            agent = Agent(
                name="walker",
                instructions="go on",
                model=kind(model="seer", openai_client=client),
                model_settings=ModelSettings(include_usage=True, extra_body={"seed": 5, "stop": ["e", "a"]}),
            )
            whole = await Runner.run(agent, QUESTION)
            streamed = Runner.run_streamed(agent, QUESTION)
            events = [event async for event in streamed.stream_events()]
            return whole, streamed, events

    whole, streamed, events = asyncio.run(asyncio.wait_for(ask(), 600))
    assert whole.final_output
    assert streamed.final_output == whole.final_output
    deltas = [event.data for event in events if event.type == "raw_response_event"]
    text = "".join(each.delta for each in deltas if each.type == "response.output_text.delta")
    assert text == whole.final_output
    assert streamed.context_wrapper.usage.output_tokens > 0


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_an_agent_calls_a_tool_and_goes_on_with_its_answer(server, kind):
    calls = []

    @function_tool
    def look(far: bool) -> str:
        """Look around."""
        calls.append(far)
        return "nothing"

    async def ask(streamed):
        async with openai.AsyncOpenAI(base_url=server.url, api_key=server.token, max_retries=0) as client:
            agent = Agent(
                name="walker",
                model=kind(model="seer", openai_client=client),
                tools=[look],
                model_settings=ModelSettings(tool_choice="required", extra_body={"seed": 5}),
                tool_use_behavior="stop_on_first_tool",
            )
            if not streamed:
                return await Runner.run(agent, QUESTION)
            found = Runner.run_streamed(agent, QUESTION)
            async for _ in found.stream_events():
                pass
            return found

    for streamed in (False, True):
        found = asyncio.run(asyncio.wait_for(ask(streamed), 600))
        assert found.final_output == "nothing"
    assert len(calls) >= 2
    assert set(map(type, calls)) == {bool}
