"""The tag ``{% generation %}`` of chat templates."""

from __future__ import annotations

from collections.abc import Callable

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

__all__ = ["Generation"]


class Generation(Extension):
    """Renders what stands between ``{% generation %}`` and ``{% endgeneration %}``.

    Templates mark with it what the model has written, which is of interest to losses alone.
    """

    tags = {"generation"}  # noqa: RUF012, Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the tag and its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own: what is set within stays within, as with transformers.
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Callable[[], str]) -> str:
        return caller()
