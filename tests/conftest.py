"""Config and prompts files, distributions made on the spot, and engines that a test plays by hand."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
import structlog
from click.testing import CliRunner

from seer_core.arrays import Logprobs, Tokens
from seer_core.cli import main
from seer_core.clock import RealClock
from seer_core.config import SeerTable
from seer_core.drafting import StepTimes
from seer_core.events import InstanceTroubled
from seer_core.model import InstanceInfo, PromptGroup
from seer_core.plugins import Assembly, Strategies
from seer_core.ports import ChunkOutput, ChunkPiece, ModelInfo
from seer_core.runtime import Runtime
from seer_core.scheduler import Policies

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _quiet_logs():
    """Logs go nowhere, unless a command configures them."""
    structlog.configure(processors=[lambda logger, method, event: _drop()])
    yield
    structlog.reset_defaults()


def _drop():
    raise structlog.DropEvent


@pytest.fixture
def write_config(tmp_path):
    """Return a function that writes a config for the sim engine, with more TOML below, and returns it."""

    def write(plugins=(), more="", *, engine="sim", seer=""):
        path = tmp_path / "seer.toml"
        path.write_text(
            f'[seer]\nplugins = {json.dumps(list(plugins))}\nengine = "{engine}"\n{seer}\n{more}\n'
        )
        return path

    return write


@pytest.fixture
def write_prompts(tmp_path):
    """Return a function that writes a prompts file: mappings as JSON, strings and bytes as they are."""

    def write(*lines, name="prompts.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(_line(line) + b"\n" for line in lines))
        return path

    return write


def _line(line):
    if isinstance(line, bytes):
        return line
    return (line if isinstance(line, str) else json.dumps(line)).encode()


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Return a function that installs a plug-in module as a distribution of its own.

    It becomes visible to this process and, by PYTHONPATH, to those that it starts.
    """
    modules = []

    def install(name, source, *, version="1.0", project=None, module=None):
        module = module or f"{name}_module"
        project = project or f"seer-{name.replace('_', '-')}"
        site = tmp_path / f"site-{project}"
        info = site / f"{project.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[seer]\n{name} = {module}\n")
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        importlib.invalidate_caches()
        modules.append(module)
        return site

    yield install
    for module in modules:
        sys.modules.pop(module, None)


@pytest.fixture
def local_plugin(distribution):
    """Return a function that installs one of the plug-ins in ``tests/distributions``."""

    def install(name):
        return distribution(name, (ROOT / "tests/distributions" / f"{name}.py").read_text())

    return install


@pytest.fixture
def seer():
    """Return a function that runs the command line in this process and returns click's result."""

    def run(*arguments):
        return CliRunner().invoke(main, [str(argument) for argument in arguments])

    return run


@pytest.fixture
def start_seer():
    """Return a function that starts the command line as a process; all are ended with the test."""
    processes = []

    def start(*arguments, **options):
        command = [
            sys.executable,
            "-W",
            "error",
            "-c",
            "from seer_main import main; main()",
            *map(str, arguments),
        ]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        process = subprocess.Popen(command, **options)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr, process.stdin):
            if pipe is not None:
                pipe.close()


@attrs.define(eq=False)
class Hands:
    engines: list
    clock: object = attrs.Factory(RealClock)
    model: ModelInfo = attrs.Factory(lambda: ModelInfo(vocab_size=1000, max_model_tokens=512))
    tokenizer: object = None


class Hand:
    """An engine that does nothing by itself: the test reads ``jobs`` and answers them."""

    def __init__(self, id="hand-0", kv_capacity_tokens=512, max_running=8):
        self.id = id
        self.info = InstanceInfo(id, kv_capacity_tokens, 16, max_running, 512)
        self.sink = None
        self.jobs = {}
        self.aborted = []
        self.weights = []
        self.specs = []
        self.starts = self.stops = self.resets = self.slept = self.woken = 0
        self.drafter = self.kv_pool = None
        self.shares_kv = True
        self.forgotten = []
        self.taught = []

    def draft_with(self, drafter):
        self.drafter = drafter
        return drafter is not None and drafter.shares()

    def share_kv(self, pool):
        self.kv_pool = pool
        return self.shares_kv and pool is not None

    def teach(self, text):
        self.taught.append(text)

    def forget_group(self, group_id):
        self.forgotten.append(group_id)

    async def measure_steps(self, batch, draft_tokens, context_tokens=None):
        return StepTimes((1,), (0,), ((0.001,),))

    async def start(self, sink):
        self.sink = sink
        self.starts += 1
        return self.info

    def submit(self, job):
        self.jobs[job.id] = job

    def abort(self, job_id):
        self.aborted.append(job_id)
        del self.jobs[job_id]

    async def reset_cache(self):
        self.resets += 1

    async def update_weights(self, source, version):
        self.weights.append((str(source), version))
        self.specs.append(source)

    async def sleep(self):
        self.slept += 1
        return 1000

    async def wake(self):
        self.woken += 1

    async def stop(self):
        self.stops += 1

    def finish(
        self,
        job_id=None,
        tokens=1,
        *,
        stopped=True,
        logprobs=None,
        version=None,
        drafts=(),
        pool=0,
        logprob=-0.5,
    ):
        """Answer a job, by default the oldest, with ``tokens`` tokens that count up from 5."""
        job = self.jobs.pop(job_id or next(iter(self.jobs)))
        start = len(job.token_ids) - job.prompt_tokens
        self.sink.chunk_finished(
            self.id,
            ChunkOutput(
                job_id=job.id,
                token_ids=[5 + start + number for number in range(tokens)],
                logprobs=[logprob] * (tokens if logprobs is None else logprobs),
                stopped=stopped,
                cached_tokens=0,
                prefilled_tokens=len(job.token_ids),
                computed_tokens=len(job.token_ids) + tokens - 1,
                preemptions=0,
                weight_version=job.weight_version if version is None else version,
                pool_tokens=pool,
                **dict(zip(("steps", "drafted_at", "accepted_at"), drafts, strict=False)),
            ),
        )

    def grow(self, job_id=None, tokens=1, *, start=0, logprob=-0.5):
        """Tell of so many tokens of a running job, by default the oldest, as ``finish`` will have them."""
        job = self.jobs[job_id or next(iter(self.jobs))]
        first = 5 + len(job.token_ids) - job.prompt_tokens + start
        told = Tokens(range(first, first + tokens)), Logprobs([logprob] * tokens)
        self.sink.chunk_grew(self.id, ChunkPiece(job.id, start, *told))

    def fail(self, job_id=None):
        job = self.jobs.pop(job_id or next(iter(self.jobs)))
        self.sink.chunk_failed(self.id, job.id, "out of luck")

    def complain(self, reason):
        self.sink.troubled(InstanceTroubled(self.id, "drafting", reason, "hand.log"))

    def die(self):
        self.jobs.clear()
        self.sink.lost(self.id, "the test killed it")


@pytest.fixture(scope="session")
def hand():
    """Return the class of engines that are played by hand."""
    return Hand


@pytest.fixture(scope="session")
def by_hand():
    """Return a function that makes a runtime over engines that are played by hand."""

    def make(*engines, policies=None, observers=(), drafter=None, kv_pool=None, **seer):
        assembly = Assembly(
            Hands(list(engines)), Strategies(policies or Policies(), tuple(observers), drafter), kv_pool
        )
        return Runtime(assembly, SeerTable(**seer))

    return make


@pytest.fixture(scope="session")
def simulated():
    """Return a function that makes a runtime over simulated engines, on a clock of its own."""
    from seer_sim.plugin import Settings, make_fleet  # the core's own tests do without it

    def make(policies=None, observers=(), drafter=None, kv_pool=None, seer=None, **settings):
        assembly = Assembly(
            make_fleet(Settings(**settings)),
            Strategies(policies or Policies(), tuple(observers), drafter),
            kv_pool,
        )
        return Runtime(assembly, seer or SeerTable())

    return make


@pytest.fixture(scope="session")
def some_groups():
    """Return a function that makes prompt groups ``a``, ``b``, ... with prompts of different length."""

    def make(count=2, n=2, max_tokens=64):
        return [
            PromptGroup(
                id=f"{chr(97 + number % 26)}{number // 26 or ''}",
                prompt_token_ids=tuple(range(10, 14 + number % 7)),
                n=n,
                max_tokens=max_tokens,
                seed=number,
            )
            for number in range(count)
        ]

    return make
