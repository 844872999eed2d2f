"""Fixtures of the tests of real engines: a random Qwen3 model made on the spot, and a started instance."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import msgspec
import numpy as np
import pytest
from seer_worker.client.engine import WorkerClient
from seer_worker.client.local import LocalWorker
from seer_worker.wire import Start

from seer_core.model import Sampling, StructuredOutputs
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.events import InstanceDegraded, InstanceReported
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.engine import ChunkJob, ChunkOutput, ChunkPiece
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import WeightSpec
from tests.support.virtual_time import SkippedTime

pytest.register_assert_rewrite("backends.tests")  # before any file imports a part of it

T = TypeVar("T")

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 128, 192, 4, 6, 2, 32, 512
EOS = 2
"""The tokenizer's end token, the one of each model: a generation's configuration without one is beside it."""
NO_END = 9
"""The end token of ``config.json``, which does not count then."""
CONTROLLED = {
    "min_p": Sampling(1.0, min_p=0.2),
    "repetition": Sampling(1.0, repetition_penalty=1.4),
    "presence and frequency": Sampling(1.0, presence_penalty=1.5, frequency_penalty=-0.5),
    "bias": Sampling(1.0, logit_bias={5: 6.0, 9: -100.0}),
    "allowed": Sampling(1.0, allowed_token_ids=tuple(range(2, 40))),
    "bad words": Sampling(1.0, logit_bias={5: 8.0, 6: 8.0}, bad_words=((5, 6), (6, 6, 5), (7,))),
    "regex": Sampling(1.0, structured_outputs=StructuredOutputs(regex="(w1[0-9]w[2-5]){4,12}")),
    "choice": Sampling(1.0, structured_outputs=StructuredOutputs(choice=("w5w6w7", "w10w11", "w9"))),
    "min_tokens": Sampling(1.0, logit_bias={EOS: 8.0}, min_tokens=30),
    "stop token": Sampling(1.0, stop_token_ids=(17, 50)),
    "ignore_eos": Sampling(1.0, logit_bias={EOS: 4.0}, ignore_eos=True),
    "stop": Sampling(1.0, stop=("3 w4", " w99 ", "w50"), min_tokens=12),
    "all, greedy": Sampling(
        0.0,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logit_bias={5: 2.0},
        bad_words=((5, 5),),
        min_tokens=20,
        stop=("0 w2",),
        stop_token_ids=(60,),
    ),
    "all, drawn": Sampling(
        0.9,
        top_p=0.95,
        top_k=40,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.4,
        logit_bias={5: 2.0, EOS: 1.0},
        bad_words=((5, 5),),
        min_tokens=25,
        stop=("1 w3", "w77"),
        stop_token_ids=(60,),
    ),
}
"""Samplings with each control, and with all."""
KV_BYTES_PER_TOKEN = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4


def write_model(directory: Path, seed: int, tied: bool = False, kv_heads: int = KV_HEADS) -> Path:
    """Write a random float32 Qwen3 with a word-level tokenizer; its logits are as spread as a real one's.

    ``tied``: its output head is its embeddings.
    """
    safetensors = pytest.importorskip("safetensors.numpy")
    tokenizers = pytest.importorskip("tokenizers")
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return random.normal(0, gain / math.sqrt(columns), (rows, columns)).astype(np.float32)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 2 if tied else 4),
        "model.norm.weight": ones(HIDDEN),
    }
    if not tied:
        weights["lm_head.weight"] = matrix(VOCAB, HIDDEN, 2)
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        weights |= {
            p + "input_layernorm.weight": ones(HIDDEN),
            p + "post_attention_layernorm.weight": ones(HIDDEN),
            p + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            p + "self_attn.k_proj.weight": matrix(kv_heads * HEAD_DIM, HIDDEN),
            p + "self_attn.v_proj.weight": matrix(kv_heads * HEAD_DIM, HIDDEN),
            p + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM, 2),
            p + "self_attn.q_norm.weight": ones(HEAD_DIM),
            p + "self_attn.k_norm.weight": ones(HEAD_DIM),
            p + "mlp.gate_proj.weight": matrix(FFN, HIDDEN),
            p + "mlp.up_proj.weight": matrix(FFN, HIDDEN),
            p + "mlp.down_proj.weight": matrix(HIDDEN, FFN, 2),
        }
    directory.mkdir(parents=True)
    safetensors.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 8192,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
        "eos_token_id": NO_END,
        "bos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text("{}")
    words = {
        word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", *(f"w{i}" for i in range(3, VOCAB))])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<pad>", "<bos>", "<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": {"__type": "AddedToken", "content": "<eos>"},
        "pad_token": "<pad>",
        "chat_template": "{{ bos_token }} {% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that differ in their weights only."""
    root = tmp_path_factory.mktemp("models")
    return write_model(root / "a", 1), write_model(root / "b", 2)


@pytest.fixture(scope="session")
def tied_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models whose output heads are their embeddings, and that differ in their weights only."""
    root = tmp_path_factory.mktemp("tied")
    return write_model(root / "a", 1, tied=True), write_model(root / "b", 2, tied=True)


@pytest.fixture(scope="session")
def one_head_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a single head of keys and values."""
    return write_model(tmp_path_factory.mktemp("models") / "one-head", 1, kv_heads=1)


@pytest.fixture(scope="session")
def loop() -> Iterator[SkippedTime]:
    """The one event loop on which all engines of the session live."""
    loop = SkippedTime()
    yield loop
    loop.close()


class BareDrafter:
    """Has a source, and nothing else."""

    def __init__(self, spec: SourceSpec) -> None:
        self.spec = spec

    def source(self) -> SourceSpec:
        return self.spec

    def shares(self):
        return False

    def policy(self, step_times: StepTimes) -> None:
        return None


class Harness:
    """One instance, and the sink it reports to.

    A test that leaves it unfit for others sets ``used_up``; the next test that has it gets it as new.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        engine: WorkerClient,
        drafter: BareDrafter | None = None,
        kv_pool: KVPool | None = None,
    ) -> None:
        self.loop = loop
        self.engine = engine
        self.engine.set_drafter(drafter)
        self.engine.set_kv_pool(kv_pool)
        self.group = "group"
        self.reports: list[InstanceReported] = []
        self.degradations: list[InstanceDegraded] = []
        self.losses: list[str] = []
        self.failures: dict[str, str] = {}
        self.outputs: dict[str, ChunkOutput] = {}
        self.pieces: dict[str, list[ChunkPiece]] = {}
        self.answers: dict[str, int] = defaultdict(int)
        self._happened = asyncio.Event()
        self._ids = iter(range(1 << 30))
        self.weight_version = 0
        self.used_up = False
        self._first_group: str | None = None
        self.info = self.run(engine.start(self))

    def prepare(self) -> None:
        """Make ready for a test: where an earlier one has used the instance up, start it anew."""
        if self._first_group is None:
            self._first_group = self.group
        if not self.used_up:
            return
        self.run(self.engine.stop())
        for kept in (self.reports, self.degradations, self.losses, self.failures, self.outputs, self.pieces):
            kept.clear()
        self.answers.clear()
        self.group, self.weight_version, self.used_up = self._first_group, 0, False
        self.info = self.run(self.engine.start(self))

    @property
    def pid(self) -> int | None:
        """The worker's process; None while it is down."""
        worker = self.engine.worker
        assert worker is None or isinstance(worker, LocalWorker)
        return None if worker is None else worker.pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the session's loop; a test that waits for good ends by its own limit."""
        return self.loop.run_until_complete(work)

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        self.outputs[output.job_id] = output
        self._answered(output.job_id)

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        self.failures[job_id] = reason
        self._answered(job_id)

    def chunk_streamed(self, instance_id: str, piece: ChunkPiece) -> None:
        self.pieces.setdefault(piece.job_id, []).append(piece)

    def reported(self, report: InstanceReported) -> None:
        self.reports.append(report)
        self._happened.set()

    def degraded(self, degradation: InstanceDegraded) -> None:
        self.degradations.append(degradation)
        self._happened.set()

    def lost(self, instance_id: str, reason: str) -> None:
        self.losses.append(reason)
        self._happened.set()

    def leaving(self, instance_id: str, reason: str) -> None:
        self._happened.set()

    def _answered(self, job_id: str) -> None:
        self.answers[job_id] += 1
        self._happened.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()`` holds; it is evaluated again after every message of the engine."""
        while not condition():
            self._happened.clear()
            await self._happened.wait()

    def job(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        seed: int,
        sampling: Sampling,
        prompt_tokens: int | None = None,
    ) -> ChunkJob:
        """Return a chunk with an id of its own; every second one streams.  All tokens are the prompt's, or so
        many."""
        number = next(self._ids)
        return ChunkJob(
            id=f"job-{number}",
            request_id=f"job-{number}",
            group_id=self.group,
            token_ids=list(tokens),
            prompt_tokens=len(tokens) if prompt_tokens is None else prompt_tokens,
            max_tokens=max_tokens,
            sampling=sampling,
            seed=seed,
            weight_version=self.weight_version,
            streams=number % 2 == 1,
        )

    async def chunks(self, jobs: Sequence[ChunkJob]) -> list[ChunkOutput]:
        """Submit chunks together and wait for all."""
        for job in jobs:
            self.engine.submit(job)
        await self.until(lambda: all(job.id in self.answers for job in jobs))
        outputs = [self.outputs[job.id] for job in jobs]
        for job, output in zip(jobs, outputs, strict=True):
            token_ids, logprobs = self.streamed(job)
            sent = len(token_ids)
            assert sent < len(output.token_ids) if job.streams else sent == 0
            assert token_ids == output.token_ids[:sent]
            assert logprobs == output.logprobs[:sent]
            if width := job.sampling.top_logprobs:
                assert output.top_logprobs is not None
                assert output.top_logprobs.fits(width, len(output.token_ids))
                pieces = [piece.top_logprobs for piece in self.pieces.get(job.id, ())]
                assert [top for piece in pieces if piece for top in piece] == list(output.top_logprobs[:sent])
        return outputs

    def streamed(self, job: ChunkJob) -> tuple[Tokens, Logprobs]:
        """Return what the instance has streamed of a chunk while it ran."""
        token_ids, logprobs = Tokens(), Logprobs()
        for piece in self.pieces.get(job.id, []):
            assert piece.start == len(token_ids)
            token_ids.extend(piece.token_ids)
            logprobs.extend(piece.logprobs)
        return token_ids, logprobs

    def whole(self, prompts: Sequence[Sequence[int]], sampling: Sampling, tokens: int) -> list[list[int]]:
        """Return the responses to all prompts, undivided, in one batch; prompt i has seed i."""
        jobs = [self.job(prompt, tokens, seed, sampling) for seed, prompt in enumerate(prompts)]
        return [output.token_ids for output in self.run(self.chunks(jobs))]

    def alone(self, prompts: Sequence[Sequence[int]], sampling: Sampling, tokens: int) -> list[list[int]]:
        """Return the same, one response after the other."""
        jobs = [self.job(prompt, tokens, seed, sampling) for seed, prompt in enumerate(prompts)]
        return [self.run(self.chunks([job]))[0].token_ids for job in jobs]

    def expect_preemptions(self) -> None:
        """Check that chunks were preempted, and that these have computed tokens again and no others have."""
        outputs = self.outputs.values()
        assert any(output.preemptions for output in outputs)
        for output in outputs:
            once = output.prefilled_tokens + len(output.token_ids) - 1
            assert (output.computed_tokens > once) == (output.preemptions > 0)

    def ended_early(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, tokens: int
    ) -> tuple[list[list[int]], int]:
        """Return the same in chunks that may end early, and how many did; none was preempted."""
        responses: list[list[int]] = [[] for _ in prompts]
        going, ended = list(range(len(prompts))), 0
        while going:
            jobs = []
            for number in going:
                context, left = [*prompts[number], *responses[number]], tokens - len(responses[number])
                job = self.job(context, left, number, sampling, len(prompts[number]))
                jobs.append(msgspec.structs.replace(job, streams=False, may_end_early=True))
            for job, output in zip(jobs, self.run(self.chunks(jobs)), strict=True):
                assert output.preemptions == 0
                assert output.computed_tokens == output.prefilled_tokens + len(output.token_ids) - 1
                assert output.token_ids
                responses[job.seed] += output.token_ids
                if output.stopped or len(output.token_ids) == job.max_tokens:
                    going.remove(job.seed)
                else:
                    ended += 1
        return responses, ended

    def divided(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, tokens: int, chunk_tokens: int
    ) -> list[list[int]]:
        """Return the same, in chunks."""

        async def respond(prompt: Sequence[int], seed: int) -> list[int]:
            response: list[int] = []
            while len(response) < tokens:
                wanted = min(chunk_tokens, tokens - len(response))
                job = self.job([*prompt, *response], wanted, seed, sampling, len(prompt))
                [output] = await self.chunks([job])
                response += output.token_ids
                if output.stopped:
                    break
                assert len(output.token_ids) == wanted
            return response

        async def respond_all() -> list[list[int]]:
            return await asyncio.gather(*(respond(prompt, seed) for seed, prompt in enumerate(prompts)))

        return self.run(respond_all())

    def report_while_busy(self, prompts: Sequence[Sequence[int]], tokens: int) -> None:
        """Let chunks run until a report counts some of them, end them, and wait for the report of none."""
        self.reports.clear()
        while not self._reported_running():  # all may end before the next one is due
            endless = Sampling(0.0, ignore_eos=True)
            jobs = [self.job(prompt, tokens, seed, endless) for seed, prompt in enumerate(prompts)]
            for job in jobs:
                self.engine.submit(job)
            ids = {job.id for job in jobs}
            self.run(self.until(lambda ids=ids: ids <= self.answers.keys() or self._reported_running()))
            for job in jobs:
                self.engine.end_chunk(job.id)
            self.run(self.until(lambda ids=ids: ids <= self.answers.keys()))
        self.run(self.until(lambda: self.reports[-1].running == 0))

    def _reported_running(self) -> bool:
        return any(report.running for report in self.reports)

    def kill(self) -> None:
        """Kill the worker, as the kernel would when memory runs out."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)


_instances: dict[str, tuple[Harness, ...]] = {}
"""The instances that tests of the last file have had, by the names of their fixtures."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Start those instances of a test anew that an earlier one has used up."""
    _instances.update(_instances_of(item))
    _prepare(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Do so before the fixtures of the next test in the file, which may need its instances."""
    if nextitem is not None and nextitem.path == item.path:
        _prepare(nextitem)
    else:
        _instances.clear()


def _instances_of(item: pytest.Item) -> Iterator[tuple[str, tuple[Harness, ...]]]:
    for name, value in getattr(item, "funcargs", {}).items():
        values = value if isinstance(value, tuple) else (value,)
        yield name, tuple(each for each in values if isinstance(each, Harness))


def _prepare(item: pytest.Item) -> None:
    for name in getattr(item, "fixturenames", ()):
        together = _instances.get(name, ())
        if any(each.used_up for each in together) and any(each.weight_version for each in together):
            for each in together:  # a new one has the first weights, and shares no KV with later ones
                each.used_up = True
        for each in together:
            each.prepare()


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[list[int]]]:
    """Return a function that makes distinct prompts of slightly different lengths."""

    def make(count: int, tokens: int = 40) -> list[list[int]]:
        return [
            [1, *(3 + (i * 31 + j * (7 + i)) % (VOCAB - 3) for j in range(tokens - 1 + i % 5))]
            for i in range(count)
        ]

    return make


@pytest.fixture(params=["regex", "min_tokens", "bad words", "stop", "all, greedy", "all, drawn"])
def most_controlled(request: pytest.FixtureRequest) -> Sampling:
    """A sampling of those whose controls look at earlier tokens, one after the other."""
    return CONTROLLED[request.param]


@pytest.fixture(params=CONTROLLED)
def controlled(request: pytest.FixtureRequest) -> Sampling:
    """A sampling with controls, one after the other."""
    return CONTROLLED[request.param]


@pytest.fixture(scope="session")
def moved() -> Callable[..., tuple[list[list[int]], list[list[ChunkOutput]]]]:
    """Return a function that lets every chunk run on the next instance.

    It returns the responses, and all outputs by round.  ``cold``: nothing but a pool may help.
    """

    def moved(
        instances: Sequence[Harness],
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        tokens: int,
        chunk_tokens: int,
        cold: bool = True,
    ) -> tuple[list[list[int]], list[list[ChunkOutput]]]:
        responses: list[list[int]] = [[] for _ in prompts]
        rounds: list[list[ChunkOutput]] = []
        going = set(range(len(prompts)))
        while going:
            here = instances[len(rounds) % len(instances)]
            if cold:
                here.run(here.engine.reset_cache())
            jobs = {
                seed: here.job(
                    [*prompts[seed], *responses[seed]],
                    min(chunk_tokens, tokens - len(responses[seed])),
                    seed,
                    sampling,
                    len(prompts[seed]),
                )
                for seed in sorted(going)
            }
            rounds.append(here.run(here.chunks(list(jobs.values()))))
            for (seed, job), output in zip(jobs.items(), rounds[-1], strict=True):
                found = output.cached_tokens + output.pool_tokens + output.prefilled_tokens
                assert found == len(job.token_ids)
                responses[seed] += output.token_ids
                if output.stopped or len(responses[seed]) == tokens:
                    going.discard(seed)
        return responses, rounds

    return moved


class StartedEngines:
    """Starts engines: those that a file starts end with it, those that are shared with the run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._own: list[Harness] = []
        self._shared: list[Harness] = []

    def __call__(
        self, engine: WorkerClient, source: SourceSpec | None = None, kv_pool: KVPool | None = None
    ) -> Harness:
        """Start an engine, perhaps with a draft source or a pool."""
        drafter = None if source is None else BareDrafter(source)
        self._own.append(Harness(self._loop, engine, drafter, kv_pool))
        return self._own[-1]

    def share(self, harness: Harness) -> Harness:
        """Keep an engine for the files that follow."""
        self._own.remove(harness)
        self._shared.append(harness)
        return harness

    def end_own(self) -> None:
        """Stop those of the file that is over."""
        while self._own:
            harness = self._own.pop()
            harness.run(harness.engine.stop())

    def end(self) -> None:
        """Stop all."""
        self._own += self._shared
        self.end_own()


_STARTED = pytest.StashKey[StartedEngines]()


@pytest.fixture(scope="session")
def run_engine(loop: asyncio.AbstractEventLoop, request: pytest.FixtureRequest) -> Iterator[StartedEngines]:
    """Return what starts engines."""
    started = request.session.stash[_STARTED] = StartedEngines(loop)
    yield started
    started.end()


@pytest.fixture(scope="module", autouse=True)
def _end_engines_of_the_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give memory back: an idle engine has hundreds of MiB, and a run starts dozens."""
    yield
    if (started := request.session.stash.get(_STARTED, None)) is not None:
        started.end_own()


@pytest.fixture(scope="session")
def run_in_fork(
    loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[str]]:
    """Return a function that runs a script where an instance would run, and returns the lines that it prints.

    It runs in a fork of a process that has imported the engine, which takes ten seconds.
    """

    def run(engine: WorkerClient, script: str, *arguments: str) -> list[str]:
        launch, folder = engine.spec, tmp_path_factory.mktemp("script")
        settings = {"script": script, "arguments": arguments, "output": str(folder / "output")}
        modules = str(Path(__file__).parent / "tests" / "forked")

        async def ended() -> str:
            worker = await launch.launcher.launch(
                "script",
                launch.interpreter,
                {**launch.environment, "PYTHONPATH": modules},
                folder / "log",
                True,
            )
            worker.send(Start("engine_script:Script", "script", settings, str(folder)))
            with suppress(EOFError):
                await worker.receive()
            return await worker.end()

        reason = loop.run_until_complete(ended())
        output = folder / "output"
        printed = output.read_text("utf-8") if output.exists() else f"{reason}, before it began"
        assert reason == "exited with status 0", f"{reason}: {printed}"
        return printed.splitlines()

    return run


DOOMED = """
import json, os, signal, sys
from pathlib import Path
from safetensors.torch import load_file
from seer_host.shared_weights import SharedWeights
from seer_worker.weights import broadcast

weights = load_file(Path(sys.argv[1]) / "model.safetensors")
passes, left = int(sys.argv[2]), None
original = broadcast.SharedMemory.bytes_between

def bytes_between(memory, begin, end):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(memory, begin, end)

broadcast.SharedMemory.bytes_between = bytes_between
with (
    SharedWeights() as shared,
    broadcast.BroadcastWeights(piece_bytes=1 << 10) as sender,
    shared.offer(weights.items()) as held,
    sender.offer(held) as source,
):
    size = len(list(broadcast._pieces(source.settings)))
    left = passes * size + size // 2
    print(json.dumps([source.path, dict(source.settings)]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def killed_trainer() -> Iterator[Callable[[Path, int], WeightSpec]]:
    """Return a function that starts a trainer, which broadcasts a model so many times and a half.

    Then SIGKILL ends it.
    """
    started: list[subprocess.Popen[str]] = []

    def start(model: Path, passes: int) -> WeightSpec:
        command = [sys.executable, "-c", DOOMED, str(model), str(passes)]
        trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(trainer)
        assert trainer.stdout is not None
        path, settings = json.loads(trainer.stdout.readline())
        return WeightSpec(path, settings)

    yield start
    for trainer in started:
        trainer.kill()
        trainer.communicate()


@pytest.fixture(scope="session")
def private_names() -> Callable[[ModuleType], set[str]]:
    """Return a function that finds the private names that modules of a package use and do not define."""

    def find(package: ModuleType) -> set[str]:
        assert package.__file__ is not None
        trees = [ast.parse(path.read_text("utf-8")) for path in Path(package.__file__).parent.glob("*.py")]
        used = {
            node.attr
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
        }
        return used - {name for tree in trees for name in defined_in(tree)}

    return find


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines: functions, classes and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
