"""docs/reference/files.md: the files that runs read and write, and the schema of their lines."""

from __future__ import annotations

import attrs
from seer_cli.finished_arms import ArmOutcome
from seer_cli.profiles import Profile
from seer_cli.status import STATUS, Status
from seer_journal.records import Aborted, Begun, Opened, WrittenChunk
from seer_rl.checkpoints import TrainingState
from seer_rl.metrics import FIELDS, METRICS
from seer_session.prompts import BadPrompt, PromptRecord
from seer_session.results import Summary
from seer_trace.records import TraceRecord

from reference.page import Page, markdown
from seer_core.model import ChunkRecord, Completion
from seer_core.ports.kv import PoolStats

__all__ = ["SUMMARY", "page"]

INTRODUCTION = """\
The name of a directory ends in a slash. A key whose default is "required" is in every line; "none" is `null`
in JSON."""

SUMMARY = {
    "ended": "`finished`, `interrupted` or `failed`",
    "error": "the error of a run that failed, else `null`",
    "requested": "how many responses were asked for",
    "iteration": "the iteration, as `--iteration` gave it",
    "engine": "`[seer].engine`",
    "kv_pool": "the pool's `name` and its figures, which are below",
    "plugins": "the enabled plug-ins, each with the distribution and the version that it is from",
    "seed": "`[seer].seed`",
    "prompts_digest": "stands for the groups: prompts, sizes, seeds and sampling",
    "skipped_prompts": "the lines that `--skip-bad` left out, as below",
}
"""Keys of a run's summary beside those of ``Summary``."""


@attrs.frozen
class File:
    """A file: where it lies, what it has in it, and the structs of its lines."""

    name: str
    about: str
    structs: tuple[type, ...] = ()
    keys: dict[str, str] = attrs.Factory(dict)
    """Keys that no struct has."""


FILES = {
    "Read by `seer run`": (
        File("prompts.jsonl", "A prompt on each line, as JSON. The file of `--prompts`.", (PromptRecord,)),
    ),
    "Written by `seer run --out DIR`": (
        File(
            "completions.jsonl",
            "A response on each line, as JSON, in order of their finish.",
            (Completion, ChunkRecord),
        ),
        File(
            "trace.jsonl",
            "An event on each line, as JSON, with the commands that answer it; they are in"
            " [events](events.md). The trace replays to the same commands.",
            (TraceRecord,),
        ),
        File(
            "summary.json",
            "The run's figures and how it ended. `--json FILE` writes the same.",
            (Summary, PoolStats, BadPrompt),
            SUMMARY,
        ),
        File(
            STATUS,
            "The run's present work, while it goes on; `seer status DIR` reads it. A run that ends in order"
            " removes it. A training that fails or is interrupted leaves it, with the reason.",
            (Status,),
        ),
        File(
            "journal/",
            "The tokens so far, with which `--resume` goes on; a run that finishes removes it. Each record of"
            " its files is a frame: four bytes that mark its beginning, its length and its CRC-32, and the"
            " record as a msgpack list of its tag (`o`, `b`, `c`, `a`) and of the fields below, in order.",
            (Opened, Begun, WrittenChunk, Aborted),
        ),
    ),
    "Written by `seer compare --out DIR`": (
        File("*.arm", "One repeat of an arm, as msgpack; `--resume` reads it.", (ArmOutcome,)),
    ),
    "Written by `seer profile`": (
        File(
            "profile.json",
            "Times of an engine's steps; `[plugin.grouped_spec].profile` names it.",
            (Profile,),
        ),
    ),
    "Written by `seer train --out DIR`": (
        File(
            METRICS,
            "An iteration on each line, as JSON. Digests are SHA-256, that of weights over a checksum of each"
            " tensor. Phases that a run does not have lack their keys, and a trainer of another kind may add"
            " its own.",
            keys=dict(FIELDS),
        ),
        File(
            "checkpoints/NNNNNN/",
            "A whole model in the form of Hugging Face, with the optimizer's state, after so many iterations."
            " Its `training.json` has the run's state, and [settings](settings.md) the two tables in it."
            " `digests.json` has the size and a digest of each file, and `--resume` compares them.",
            (TrainingState,),
        ),
        File("weights/", "The weights that the engines loaded last, unless they go by shared memory."),
        File("tensorboard/", "Event files of TensorBoard, with `[train.tracking].tensorboard`."),
        File("training.png", "Reward and seconds of each phase, drawn at the end, where matplotlib is."),
    ),
}


def page() -> Page:
    """Return the page."""
    found = Page("files.md", "Files of a run", INTRODUCTION)
    for title, files in FILES.items():
        found.heading(2, title)
        for file in files:
            found.heading(3, f"`{file.name}`")
            found.add(file.about)
            found.table(["key", "meaning"], [(f"`{name}`", text) for name, text in file.keys.items()])
            for struct in file.structs:
                if len(file.structs) > 1 or file.keys:
                    found.add(f"`{struct.__name__}`: {markdown(struct.__doc__ or '')}")
                found.fields(struct)
    return found
