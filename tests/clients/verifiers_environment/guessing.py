"""An environment written against verifiers: a conversation of several turns, and a reward for its letters."""

import openai
import verifiers.v1 as vf

__all__ = ["ChatHarness", "GuessingEnv", "GuessingTaskset"]

TURNS = 3


class GuessingData(vf.TaskData):
    letter: str


class GuessingTask(vf.Task[GuessingData]):
    @vf.reward
    async def letters(self, trace: vf.Trace) -> float:
        return float(sum(reply.count(self.data.letter) for reply in replies(trace)))


class GuessingConfig(vf.TasksetConfig):
    pass


class GuessingTaskset(vf.Taskset[GuessingTask, GuessingConfig]):
    def load(self):
        for letter in "aeiou":
            yield GuessingTask(GuessingData(prompt=f"write {letter}", letter=letter), self.config.task)


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A program that sends the conversation once, in this process: verifiers' own need uv and its index."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        _, prompt = self.resolve_prompt(data)
        asked = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [{"role": each.role, "content": each.content or ""} for each in prompt]
        )
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=asked)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class GuessingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(runtime=vf.SubprocessConfig(), network_notice=False)


class GuessingEnv(vf.Env[GuessingEnvConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(TURNS - 1):
                if segment.terminated:
                    break
                segment = await interaction.turn(f" {len(segment.last_reply)} more ")


def replies(trace):
    """Return the texts that the model wrote."""
    return [node.message.content or "" for node in trace.nodes if node.sampled]
