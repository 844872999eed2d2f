"""Everything that reads files, arguments or messages from outside, each with good inputs to begin with.

A target tries one input, as bytes, and raises what the reader raises.  ``TARGETS`` lists all.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import string
from collections.abc import Callable, Sequence
from contextlib import ExitStack, chdir
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import seer_worker.wire
from click.testing import CliRunner
from seer_cli import main
from seer_cli.profiles import read_profile
from seer_grouped_spec.replay import load, replay
from seer_host.config_files import RolloutTable, load_config
from seer_host.frames import Frames, WireError, encode
from seer_lab.fit import fit
from seer_lab.traces import read_lengths
from seer_lab.twin import recorded_drafts
from seer_lab.workload_choice import choose_workload
from seer_rl.rewards import RewardPool
from seer_session.assembly import assemble
from seer_session.prompts import read_prompts
from seer_sim.tokens import ByteTokenizer
from seer_trace.records import read_trace
from seer_worker.client.fleet import read_model_info
from seer_worker.tokenizer import ModelTokenizer

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo, Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput, ChunkPiece, ModelInfo
from seer_core.ports.weights import directory

from .user_code import (
    ANSWERS,
    CHOICES,
    RAISED,
    REWARDS,
    reward_pool,
    try_answer,
    try_choice,
    try_raised,
    try_reward,
)

__all__ = ["TARGETS", "CommandError", "CommandRefused", "Target", "Workspace"]

CONFIG = """
[seer]
engine = "sim"
kv_pool = "sim_pool"
plugins = ["divided_rollout", "context_sched", "grouped_spec"]
seed = 7

[rollout]
n = 2
max_tokens = 40
temperature = 0.7
top_p = 0.9

[compare]
techniques = ["divided_rollout", "grouped_spec"]
oracle = []

[engine.sim]
instances = 2
kv_capacity_tokens = 2048
max_model_tokens = 1024
start_s = 0.5
cost = { overhead_s = 1e-3, request_s = 2e-5 }
kill_at_s = [{ instance = "sim-1", at_s = 1e6 }]

[engine.sim.lengths]
mean_tokens = 30.0
sigma = 0.8
cap_tokens = 60

[engine.sim.acceptance]
siblings = [0, 2]
mean_lengths = [1.5, 2.0]

[kv_pool.sim_pool]
dram_bytes = 1_000_000
latency_s = 1e-3

[plugin.divided_rollout]
chunk_tokens = 16
stay_kv_fraction = 0.25

[plugin.grouped_spec]
share = false
draft_tokens = 4
group_ttl_s = 60.0
"""

SETS = (
    "rollout.n=3",
    "rollout.temperature=0.5",
    'seer.plugins=["divided_rollout"]',
    "engine.sim.instances=3",
    "engine.sim.lengths={sigma = 0.1, mean_tokens = 9}",
    "engine.sim.cost.overhead_s=1e-3",
    "plugin.divided_rollout.growth_headroom=0.5",
    "plugin.grouped_spec.group_ttl_s=0.1",
    "kv_pool.sim_pool.bandwidth_bytes_per_s=1e9",
    "seer.kv_pool=none",
)

PROMPTS = (
    {"prompt": "show me", "n": 2, "max_tokens": 40},
    {"prompt_token_ids": [3, 4, 5], "temperature": 0.0, "top_p": 0.5, "top_k": 5, "seed": 9},
    {
        "messages": [{"role": "user", "content": "hi"}],
        "group_id": "chat",
        "metadata": {"a": [1, {"b": None}]},
    },
)

LENGTHS = [
    {"group": group, "prompt_tokens": 3, "output_tokens": [5, 9], "max_tokens": 20, "iteration": group % 2}
    for group in range(4)
]
TRAJECTORIES = [
    {
        "group": 1,
        "index": index,
        "prompt_tokens": 3,
        "turns": [[5, 0.5, 9], [4, None, 0]],
        "iteration": index % 2,
    }
    for index in range(4)
]
LOGS = (
    [{"input": "a", "output": "b" * each, "gts": None, "score": 1.0, "step": 1} for each in range(3)],
    [{"timestamp": each, "input_length": 9, "output_length": each, "hash_ids": [1]} for each in range(3)],
)
"""Of verl, and of requests."""
RECORDED = [{"group": "a", "prompt_token_ids": [1, 2], "responses": [[3, 4, 5], [3, 4]]}] + [
    {"group_id": "b", "index": index, "token_ids": [7, 8, index]} for index in range(3)
]
DRAWN = "groups=4\ngroup_size=2\nmean_tokens=9.5\ncap_tokens=40\nsigma=0.9\ngroup_share=0.5\nprompt_tokens=7"
MODEL = {"text_config": {"vocab_size": 300, "max_position_embeddings": 512}, "model_type": "llava"}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] | tojson }} {% endfor %}"
TOKENIZER_CONFIG = {
    "bos_token": "a",
    "eos_token": {"__type": "AddedToken", "content": "b"},
    "chat_template": TEMPLATE,
}

COMMANDS = (
    "config c.toml --set rollout.n=3 -p no:grouped_spec --json out/config.json",
    "plugins c.toml --json out/plugins.json",
    "doctor c.toml",
    "run c.toml --prompts p.jsonl --out out/run --overwrite --skip-bad --json out/summary.json",
    "compare c.toml --prompts p.jsonl --repeat 1 --json out/compare.json --log-level error",
    "profile c.toml --batch 2 --draft-tokens 1 --context 64 --together --out out/profile.json",
    "sim synthetic --lengths groups=2 --lengths group_size=2 --instances 1 --on moonlight --pressure 2.5",
    "sim l.jsonl --policy verl --policy mine=divided_rollout --oracle o=oracle_longest_first --repeat 2",
    "sim moonlight --scale 0.01 --lengths groups=4 --lengths mean_tokens=50 --lengths cap_tokens=90 --seed 3",
    "sim run --where iteration=0 --set engine.sim.instances=2 --json out/sim.json",
    "twin c.toml --profile profile.json --lengths run --calibrate --compare compare.json",
    "replay r.jsonl --siblings 0,1,live --draft-tokens 4 --min-probability 0.1 --json out/rows.json",
    "replay r.npz --tree-nodes 4 --control --limit 2 --siblings 0",
    "new-plugin my_plugin --slot placer --path out/plugin",
)


LONGEST_ARGUMENT = 1000


class CommandError(Exception):
    """A command ended in another way than with success, or one sentence and exit status 2."""


class Workspace:
    """A directory with a config and every file that Seer itself writes and reads again, small and good."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.runner = CliRunner()
        (path / "c.toml").write_text(CONFIG)
        (path / "p.jsonl").write_text(_lines(PROMPTS))
        (path / "l.jsonl").write_text(_lines(LENGTHS))
        (path / "r.jsonl").write_text(_lines(RECORDED))
        (path / "r.npz").write_bytes(npz())
        for command in (
            "run c.toml --prompts p.jsonl --out run",
            "profile c.toml --batch 1 --batch 4 --draft-tokens 2 --context 64 --context 512",
            "compare c.toml --prompts p.jsonl --json compare.json",
        ):
            self.seer(*command.split())
        self._model()
        self._processes = ExitStack()
        self.good = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}

    def _model(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        model = self.path / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        (model / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
        words = {letter: number for number, letter in enumerate(string.ascii_letters)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(model / "tokenizer.json"))

    @cached_property
    def rewards(self) -> RewardPool:
        """A process of rewards, from the first use to ``close``."""
        return self._processes.enter_context(reward_pool(self.path))

    def close(self) -> None:
        """End what it has started."""
        self._processes.close()

    def restore(self) -> None:
        """Undo what a command wrote."""
        shutil.rmtree(self.path / "out", ignore_errors=True)
        for file, content in self.good.items():
            if not file.is_file() or file.read_bytes() != content:
                file.write_bytes(content)

    def seer(self, *arguments: str) -> None:
        """Run a command in this process, in this directory.

        Raises:
            CommandRefused: it ended with exit status 2 and a reason.
            CommandError: it ended in any other way but success.
        """
        with chdir(self.path):
            result = self.runner.invoke(main, list(arguments))
        if "\x1b" in result.output or "Traceback" in result.output:
            raise CommandError(f"an escape or a traceback is on the screen: {result.output[-2000:]!r}")
        if result.exit_code == 2 and result.stderr.startswith("Usage:"):
            return  # click's own message
        if result.exit_code == 2:
            raise CommandRefused(result.stderr.rpartition("error: ")[2])
        engine = isinstance(getattr(result.exception, "__context__", None), EngineError)
        found = arguments[:1] == ("doctor",) and isinstance(result.exception, SystemExit)
        if result.exit_code and not engine and not found:
            raise CommandError(
                f"exit status {result.exit_code}, {result.stderr[-500:]}"
            ) from result.exception


class CommandRefused(Exception):
    """A command refused its input with a reason and exit status 2."""


@attrs.frozen
class Target:
    """A reader under test: its good inputs, and a function that tries one.

    ``slow`` ones run whole commands.  ``refusals`` are errors of its own, beside ``SeerError``.
    """

    name: str
    good: Callable[[Workspace], list[bytes]]
    attempt: Callable[[Workspace, bytes], object]
    slow: bool = False
    refusals: tuple[type[Exception], ...] = ()


def _lines(records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def npz(**changes: Any) -> bytes:
    """Return recorded responses as an .npz, with some arrays changed, or left out where None."""
    arrays: dict[str, Any] = {
        "tokens": np.arange(9),
        "offsets": np.array([0, 2, 5, 9]),
        "group": np.array(["a", "a", "b"]),
        "response": np.array([-1, 0, 0]),
    }
    file = io.BytesIO()
    np.savez(file, **{name: array for name, array in (arrays | changes).items() if array is not None})
    return file.getvalue()


def _npz_inputs(workspace: Workspace) -> list[bytes]:
    odd = (
        np.array(3),
        np.zeros((2, 2), int),
        np.zeros(3),
        np.zeros(0, int),
        np.array([0, 2**63 + 5, 7, 9], np.uint64),
        np.array([{"a": 1}], object),
        np.array([("x", 1)], [("f", "U1"), ("g", "i4")]),
        np.array(["2020-01-01"], "datetime64[D]"),
        None,
    )
    names = ("tokens", "offsets", "group", "response")
    return [npz(), *(npz(**{name: array}) for name in names for array in odd)]


def _file(name: str, read: Callable[[Path], object]) -> Callable[[Workspace, bytes], object]:
    """Return an attempt that writes the input to a file of the workspace, and restores it afterwards."""

    def attempt(workspace: Workspace, data: bytes) -> object:
        path = workspace.path / name
        path.write_bytes(data)
        try:
            return read(path)
        finally:
            if path in workspace.good:
                path.write_bytes(workspace.good[path])

    return attempt


def _there(name: str) -> Callable[[Workspace], list[bytes]]:
    return lambda workspace: [workspace.good[workspace.path / name]]


def _try_config(path: Path) -> None:
    assemble(load_config(path))


def _try_set(workspace: Workspace, data: bytes) -> None:
    assemble(load_config(workspace.path / "c.toml", [os.fsdecode(data)]))


def _try_prompts(path: Path) -> None:
    for skip_bad in (False, True):
        read_prompts(path, RolloutTable(), ModelInfo(512, 8192), ByteTokenizer(), skip_bad=skip_bad)


def _try_lengths(path: Path) -> None:
    choose_workload(str(path), where=["iteration=1"])
    choose_workload(str(path))


def _try_log(path: Path) -> None:
    choose_workload(str(path))


def _try_drawn(workspace: Workspace, data: bytes) -> None:
    workload = choose_workload("synthetic", lengths=os.fsdecode(data).split("\n"))
    workload.groups(0)


def _try_trace(path: Path) -> None:
    list(read_trace(path))
    read_lengths(path.parent)


def _try_recording(path: Path) -> None:
    recordings = load(path)
    if sum(len(text) for recording in recordings for text in recording.responses) < 1000:
        replay(recordings, ("live",), 4)


def _try_model(path: Path) -> None:
    tokenizer = ModelTokenizer(path.parent)
    read_model_info(path.parent, 0, "engine.vllm")
    tokenizer.encode("a b")
    tokenizer.decode([1, 2])


class _Chat:
    """Reads a chat through the template, as a line of a prompts file."""

    @cached_property
    def line(self) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": "a b"}]}).encode()

    def __call__(self, path: Path) -> None:
        prompts = path.parent / "chat.jsonl"
        prompts.write_bytes(self.line)
        read_prompts(prompts, RolloutTable(max_tokens=5), ModelInfo(99, 512), ModelTokenizer(path.parent))


def _try_command(workspace: Workspace, data: bytes) -> None:
    arguments = [os.fsdecode(argument) for argument in data.split(b"\0")]
    if any(argument.startswith("/") or ".." in argument or "=/" in argument for argument in arguments):
        return  # it would leave the workspace
    if "reproduce" in arguments or max(map(len, arguments)) > LONGEST_ARGUMENT:
        return  # minutes; or an argument that messages quote in full
    try:
        workspace.seer(*arguments)
    finally:
        workspace.restore()


def _try_twin(path: Path) -> None:
    run = path.parent if path.parent.name == "run" else path.parent / "run"
    files = "--profile", "profile.json", "--lengths", "run", "--compare", "compare.json"
    workspace = Workspace.__new__(Workspace)
    workspace.path, workspace.runner = run.parent, CliRunner()
    workspace.seer("twin", "c.toml", *files, "--calibrate")


def _one_of(reads: Sequence[Callable[[], object]], refusal: type[Exception]) -> None:
    """Raise the last refusal if no reader took the input."""
    refused = []
    for read in reads:
        try:
            read()
        except refusal as error:
            refused.append(error)
    if len(refused) == len(reads):
        raise refused[-1]


JOB = ChunkJob("j", "g/0", "g", [1, 2, 3], 3, 8, Sampling(), 5, 0)
TIMES = StepTimes((1, 2), (0, 2), ((1e-3, 2e-3), (2e-3, 3e-3)), 64)


def _worker_frames(workspace: Workspace) -> list[bytes]:
    w = seer_worker.wire
    source = SourceSpec("a.b:C", {"x": [1, {"y": 2.5}]}, 8, TIMES)
    to_worker = [
        w.Start("p.m:I", "i", {"model": "m"}, "here", source),
        w.Submit(JOB),
        w.AbortChunk("j"),
        w.UpdateWeights(directory("w"), 3),
        w.Sleep(),
        w.PoolMessage({"epoch": 3}),
        w.Shutdown(),
    ]
    output = ChunkOutput("j", [4, 5], [-0.5, -1.5], False, 0, 3, 3, 0, 0)
    from_worker = [
        w.Ready(InstanceInfo("i", 1024, 16, 8, 512)),
        w.Finished(output),
        w.Streamed(ChunkPiece("j", 0, [4, 5], [-0.5, -1.5])),
        w.Telemetry(1, 2, 0.5),
        w.Failed("j", "no"),
    ]
    start_body = encode(w.Start("p.m:I", "i", {"model": "deep"}, "here"))[4:]
    deep = start_body.replace(msgspec.msgpack.encode("deep"), b"\x91" * 5000 + b"\xc0")
    return [
        *(encode(message) for message in (*to_worker, *from_worker)),
        len(deep).to_bytes(4, "big") + deep,
    ]


def _try_worker_frames(workspace: Workspace, data: bytes) -> None:
    wire = seer_worker.wire
    kinds = wire.ToWorker, wire.FromWorker
    _one_of([lambda kind=kind: list(Frames(kind).feed(data)) for kind in kinds], WireError)


def _twin(name: str) -> Target:
    return Target(f"twin-{Path(name).stem}", _there(name), _file(name, _try_twin), slow=True)


def _documents(given: Sequence[Any]) -> Callable[[Workspace], list[bytes]]:
    return lambda workspace: [json.dumps(each).encode() for each in given]


TARGETS = (
    Target("config", _there("c.toml"), _file("f.toml", _try_config)),
    Target("set", lambda workspace: [text.encode() for text in SETS], _try_set),
    Target("prompts", lambda workspace: [_lines(PROMPTS).encode()], _file("f.jsonl", _try_prompts)),
    Target(
        "lengths",
        lambda workspace: [_lines(each).encode() for each in (LENGTHS, TRAJECTORIES)],
        _file("f.jsonl", _try_lengths),
    ),
    Target("logs", lambda workspace: [_lines(each).encode() for each in LOGS], _file("f.jsonl", _try_log)),
    Target("drawn-lengths", lambda workspace: [DRAWN.encode()], _try_drawn),
    Target("trace", _there("run/trace.jsonl"), _file("run/trace.jsonl", _try_trace)),
    Target(
        "completions",
        _there("run/completions.jsonl"),
        _file("run/completions.jsonl", lambda path: recorded_drafts(path.parent, selective=True)),
    ),
    Target("profile", _there("profile.json"), _file("f.json", lambda path: fit(read_profile(path)))),
    Target("npz", _npz_inputs, _file("f.npz", _try_recording)),
    Target("recorded", lambda workspace: [_lines(RECORDED).encode()], _file("f.jsonl", _try_recording)),
    Target("model-config", _there("model/config.json"), _file("model/config.json", _try_model)),
    Target("tokenizer", _there("model/tokenizer.json"), _file("model/tokenizer.json", _try_model)),
    Target(
        "tokenizer-config",
        _there("model/tokenizer_config.json"),
        _file("model/tokenizer_config.json", _Chat()),
    ),
    Target("environment-answer", _documents(ANSWERS), try_answer),
    Target("strategy-choice", _documents(CHOICES), try_choice),
    Target("raised", _documents(RAISED), try_raised),
    Target("reward", _documents(REWARDS), try_reward),
    Target("worker-wire", _worker_frames, _try_worker_frames, refusals=(WireError,)),
    Target(
        "command",
        lambda workspace: [command.replace(" ", "\0").encode() for command in COMMANDS],
        _try_command,
        slow=True,
    ),
    *(
        _twin(name)
        for name in (
            "profile.json",
            "compare.json",
            "run/trace.jsonl",
            "run/completions.jsonl",
            "run/summary.json",
        )
    ),
)
