"""Ways of drafting: what their drafts are worth, and what making them takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, Literal

import msgspec
from seer_host.json_files import describe_flaw

from seer_core.errors import SHOWN, ConfigError, printable
from seer_core.plugins.config_types import NotNegative
from seer_core.ports.drafting import SourceSpec
from seer_sim.acceptance import Acceptance
from seer_sim.cost import CostModel
from seer_sim.presets import PRESETS

__all__ = ["ENGINE", "METHODS", "Class", "Drafts", "make_methods", "method_of"]

ENGINE = "sim"
"""What the path of a draft source begins with where it names a method of this engine."""


class Class(msgspec.Struct, frozen=True, gc=False):
    """Decoding requests that get drafts of one length, and all their context.

    ``idle`` is the chance that a step verifies nothing for any of them.
    """

    requests: int
    draft_tokens: int
    context_tokens: float
    idle: float = 0.0


class Drafts(Acceptance, frozen=True, forbid_unknown_fields=True):
    """Keys of ``[engine.sim.acceptance]`` and ``[engine.sim.drafts.<method>]``.

    The emulation leaves out the time in which a draft model computes the context before its first draft, and
    the memory that it takes.
    """

    step_s: NotNegative = 0.0
    """The time that drafting adds to a step. With ``verified`` it counts as often as a step verifies
    something.
    """
    request_s: NotNegative = 12e-6
    """The time that drafting adds to a step for each request that drafts."""
    model: Literal["", "h800-qwen2-vl-7b-tp8", "h800-kimi-k2-mtp"] = ""
    """The cost preset of a model that drafts, of which a step takes as many passes as drafts have tokens;
    empty for none.
    """

    def seconds(self, classes: Iterable[Class]) -> tuple[float, float]:
        """Return D, the seconds of drafting in a step: those that stay, and those due to contexts."""
        drafting = [each for each in classes if each.draft_tokens and each.requests]
        if not drafting:
            return 0.0, 0.0
        fixed_s = self.step_s * (1 - prod(each.idle for each in drafting))
        fixed_s += self.request_s * sum(each.requests for each in drafting)
        if not self.model:
            return fixed_s, 0.0
        model: CostModel = PRESETS[self.model]
        for token in range(max(each.draft_tokens for each in drafting)):
            fixed_s += model.pass_s(sum(each.requests for each in drafting if each.draft_tokens > token))
        read = sum(each.draft_tokens * each.context_tokens for each in drafting)
        return fixed_s, read * model.attention_s(1)


METHODS: Mapping[str, Drafts] = {
    # The paper's vanilla methods (arXiv 2511.14617): mean lengths that it reports of whole runs.  Suffix
    # decoding takes 20 us per request: arctic-inference, docs/results/answered.md.
    "suffix": Drafts(siblings=(0,), mean_lengths=(1.67,), draft_tokens=16, request_s=20e-6),
    # A 7 B model, and one MTP token.
    "draft_model": Drafts(
        siblings=(0,), mean_lengths=(2.19,), draft_tokens=3, request_s=0, model="h800-qwen2-vl-7b-tp8"
    ),
    "mtp": Drafts(siblings=(0,), mean_lengths=(1.74,), draft_tokens=1, request_s=0, model="h800-kimi-k2-mtp"),
}
"""Ways of drafting that need a name; any other is group-aware, as ``[engine.sim.acceptance]`` says.

Its 12 us per request and step are what drafting takes of vLLM's steps in the demo, numpy included: 2.5 to
4.1 % of some 10 ms for some 25 requests (commit c04fa25).
"""


def make_methods(tables: Mapping[str, Mapping[str, Any]]) -> dict[str, Drafts]:
    """Return all methods by name: the presets, with what ``[engine.sim.drafts]`` changes and adds.

    Raises:
        ConfigError: a key or value is not what it must be.
    """
    methods = dict(METHODS)
    for name, table in tables.items():
        preset = msgspec.structs.asdict(methods[name]) if name in methods else {}
        try:
            methods[name] = msgspec.convert({**preset, **table}, Drafts)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"engine.sim.drafts.{printable(name, SHOWN)}: {describe_flaw(error)}"
            ) from error
    return methods


def method_of(source: SourceSpec, methods: Mapping[str, Drafts], default: Drafts) -> Drafts:
    """Return the method that a source's path names after its colon; ``default`` for a source of its own.

    Raises:
        ConfigError: the path names a method of this engine that there is not.
    """
    engine, _, method = source.path.partition(":")
    if engine == ENGINE and method not in methods:
        raise ConfigError(
            f"draft source {source.path!r}: there is no such method; there are {', '.join(methods)}."
            f" Describe yours in [engine.sim.drafts.{method}]"
        )
    return methods.get(method, default)
