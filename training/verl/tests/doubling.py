"""A tool for verl, and a parser that finds calls of it in tokens at random."""

import json

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@function_tool
def double(number: int) -> str:
    """Return twice a number.

    Args:
        number: The number.
    """
    return str(2 * number)


@ToolParser.register("even")
class EvenTurns(ToolParser):
    """A turn whose first token is even calls the tool with it."""

    async def extract_tool_calls(self, responses_ids, tools=None):
        first = responses_ids[0]
        arguments = json.dumps({"number": first})
        return "", [FunctionCall(name="double", arguments=arguments)] if first % 2 == 0 else []
