"""The cases, by the question that a reader of the results has first: each is a question and its parts."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from bench.harness import CasePart

__all__ = ["CASES", "SECTIONS", "Case", "chosen", "part_of", "today"]


class Case(NamedTuple):
    """A question, and the parts that answer it: on another engine, load or side of it."""

    question: str
    parts: Mapping[str, str]
    """Modules of this package by the part's name; the first part is what runs without a name."""
    decides: tuple[str, ...]
    """The stored results whose answers stand on the first page."""
    page: str = ""
    """The file under ``docs``, if it is not one of ``docs/results``."""


SECTIONS: Mapping[str, Mapping[str, Case]] = {
    "Does it pay?": {
        "techniques": Case(
            "How much time do Seer's techniques save over veRL's policy?",
            {"demo": "demo", "paced": "paced"},
            ("demo-vllm", "paced-h100"),
        ),
        "pays": Case(
            "When does Seer pay: how short must KV be, and how heavy the tail of the lengths?",
            {"pays": "pays"},
            ("pays-h100",),
        ),
        "rivals": Case(
            "Which scheduling is fastest: Seer's, or what others have published?",
            {"lengths": "rivals", "agents": "agents"},
            ("rivals-h100", "agents"),
        ),
        "servers": Case(
            "How much does Seer save in front of servers that run already?",
            {
                "emulated": "remote_emulated",
                "verl": "remote_verl",
                "real": "remote_real",
                "clients": "remote_clients",
                "drafts": "served_drafts",
            },
            ("remote-paced", "remote-verl", "remote-real", "clients-slime", "clients-skyrl", "clients-trl"),
        ),
        "predictions": Case(
            "How well does the simulator predict step times and drafts?",
            {"costs": "cost_models", "drafts": "unseen_drafts"},
            ("cost_models", "unseen_drafts"),
        ),
    },
    "Are the tokens the same?": {
        "equality": Case(
            "Are responses the same token for token, however they are scheduled?",
            {"equality": "equality"},
            ("equality",),
        ),
        "models": Case(
            "Which families of models roll out exactly, which are refused, and what does a move cost them?",
            {"families": "models", "costs": "family_costs"},
            ("models",),
            "reference/models.md",
        ),
        "learning": Case(
            "Does a model learn by `seer train`?",
            {"learning": "learning"},
            ("learning",),
        ),
    },
    "What happens when something dies?": {
        "faults": Case(
            "What do faults of a cluster, of servers, of the driver, of user code and of checkpoints cost?",
            {
                "cluster": "cluster_faults",
                "servers": "remote_faults",
                "driver": "driver_deaths",
                "processes": "process_deaths",
                "code": "user_code_errors",
                "checkpoints": "checkpoint_damage",
                "viewers": "slow_viewers",
            },
            (
                "cluster_faults",
                "remote-faults-vllm",
                "remote-faults-sglang",
                "driver_deaths",
                "process_deaths",
                "user_code_errors",
                "checkpoint_damage",
            ),
        ),
    },
    "What does it cost?": {
        "driver": Case(
            "How much can one driver carry?",
            {
                "instances": "driver_scale",
                "scheduler": "scheduler",
                "requests": "remote_scale",
                "images": "image_prompts",
                "agents": "server_agents",
            },
            ("driver_scale", "image_prompts", "server_agents"),
        ),
        "steps": Case(
            "What does Seer add to a step of an engine?",
            {"host": "draft_step", "device": "device_steps"},
            ("draft_step", "device_steps"),
        ),
        "weights": Case(
            "What does a weight update cost, whole and as an adapter?",
            {"weights": "adapters"},
            ("adapters",),
        ),
        "tree": Case(
            "What has the restructuring of the tree changed: lines, settings, commands, start-up, decisions?",
            {"tree": "tree"},
            ("tree",),
        ),
    },
    "What has run on a GPU?": {
        "gpu": Case(
            "What has `scripts/gpu-check` found on a GPU?",
            {"gpu": "gpu_reports"},
            ("gpu-h100",),
        ),
    },
}
CASES = {name: case for cases in SECTIONS.values() for name, case in cases.items()}

FORMER = {
    **{
        f"remote --part {former}": now
        for former, now in {
            "paced": "servers emulated",
            "verl": "servers verl",
            "real": "servers real",
            "faults": "faults servers",
            "scale": "driver requests",
        }.items()
    },
    **{
        module: name if len(case.parts) == 1 else f"{name} {part}"
        for name, case in CASES.items()
        for part, module in case.parts.items()
        if module not in CASES
    },
}
"""Names that stored commands have, and those of today."""
COMMAND = re.compile(rf"(?<=python -m bench )({'|'.join(map(re.escape, FORMER))})(?![\w-])")


def today(text: str) -> str:
    """Return a text with its commands of `python -m bench` as they run today."""
    return COMMAND.sub(lambda found: FORMER[found[1]], text)


def chosen(words: Sequence[str]) -> tuple[str, str, list[str]]:
    """Return the case, the part and the options that the words of a command name."""
    name, *options = words
    first, *_ = parts = CASES[name].parts
    if options and options[0] in parts:
        first, *options = options
    return name, first, options


def part_of(name: str, part: str) -> CasePart:
    """Import a part of a case."""
    return cast("CasePart", importlib.import_module(f"bench.{CASES[name].parts[part]}"))
