"""openai-agents, with its model of chats and with Responses, its default."""

import asyncio

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner

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

    whole, streamed, events = asyncio.run(asyncio.wait_for(ask(), 60))
    assert whole.final_output
    assert streamed.final_output == whole.final_output
    deltas = [event.data for event in events if event.type == "raw_response_event"]
    text = "".join(each.delta for each in deltas if each.type == "response.output_text.delta")
    assert text == whole.final_output
    assert streamed.context_wrapper.usage.output_tokens > 0
