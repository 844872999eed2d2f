"""Rollouts on paced vLLM: repeatable, the simulator's own tokens, and held to every byte that moves."""

import asyncio
import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from seer_host.config_files import make_config
from seer_session.assembly import assemble
from seer_session.runtime import Runtime

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo, PromptGroup, Sampling
from seer_core.model.events import Complete
from seer_core.ports.engine import ChunkJob
from tests.support.killer import Killer, kill_worker_of

pytestmark = pytest.mark.engine

INSTANCES = {"instances": 2, "kv_capacity_tokens": 1024, "max_model_tokens": 512, "max_running": 16}
GPU = {"preset": "h800-qwen2-vl-72b-tp8"}
LENGTHS = {"mean_tokens": 120, "cap_tokens": 400}


class Trace:
    def __init__(self):
        self.lines = []

    def observe(self, now, event, commands):
        self.lines.append(repr((now, event, commands)))


class Reader:
    """Reads each token that a running chunk has written, with its place."""

    rollout = None

    def __init__(self):
        self.read = []

    def observe(self, now, event, commands):
        pass

    def streamed(self, now, request_id):
        for token in enumerate(zip(*self.rollout.written(request_id), strict=True)):
            self.read.append((request_id, *token))

    def check(self, result):
        """Check that completions hold what was read, also of chunks that were lost and repeated."""
        found = {each.request_id: each for each in result.completions}
        for name, place, written in self.read:
            assert (found[name].token_ids[place], found[name].logprobs[place]) == written


def groups():
    return [
        PromptGroup(
            id=f"g{g}",
            prompt_token_ids=tuple(range(10 + g, 60 + g)),
            n=4,
            max_tokens=400,
            seed=g,
            streams=True,
        )
        for g in range(4)
    ]


def roll_out(engine="paced", observer=None, attempts=3, drafter=(), **settings):
    pytest.importorskip("vllm")
    tables = {
        "seer": {"engine": engine, "kv_pool": "none", "restarts": {"attempts": attempts}},
        "engine": {engine: {**INSTANCES, "lengths": LENGTHS, **settings}},
        "plugin": {"divided_rollout": {"chunk_tokens": 48}},
    }
    tables["seer"]["plugins"] = ["divided_rollout", "context_sched", *drafter]
    if engine == "paced":
        tables["seer"]["kv_pool"] = "local"
        tables["kv_pool"] = {"local": {"capacity_bytes": 1 << 24}}
    config = make_config(tables, base_dir=Path(), origin="test")
    reader = Reader()
    assembly = assemble(config).with_observer(reader, *([] if observer is None else [observer]))

    async def run():
        async with Runtime(assembly, config.seer, config.rollout) as runtime:
            rollout = reader.rollout = runtime.rollout(groups())
            if isinstance(observer, Killer):
                observer.kill = kill_worker_of(runtime)
            return await asyncio.wait_for(rollout.wait(), 120)

    result = asyncio.run(run())
    reader.check(result)
    assert (len(reader.read) > 0) == (engine == "paced")
    return result


@pytest.fixture(scope="module")
def plain():
    """A rollout in which nothing happens, on paced engines."""
    return roll_out()


def test_nothing_is_left_of_instances_that_have_ended(plain, monkeypatch):
    from seer_paced.vllm_instance import EmulatedVllm

    cores = []
    emulate = EmulatedVllm.emulate

    def note(self, start):
        emulate(self, start)
        cores.append(weakref.ref(self.engine.engine_core.engine_core))

    monkeypatch.setattr(EmulatedVllm, "emulate", note)
    roll_out(kill_at_s=[{"instance": "paced-0", "at_s": 0.2, "restart_after_s": 0.2}])
    gc.collect()
    assert len(cores) == 3  # one of them for the instance that was killed
    assert [core() for core in cores] == [None] * 3


def tokens_of(result):
    return {each.request_id: each.token_ids.tolist() for each in result.completions}


def test_the_same_run_has_the_same_trace_and_the_simulator_s_tokens():
    traces = Trace(), Trace()
    first, second = (roll_out(observer=trace) for trace in traces)
    assert traces[0].lines == traces[1].lines
    assert first.summary == second.summary
    assert first.summary.pool_tokens > 0
    simulated = roll_out("sim")
    assert tokens_of(first) == tokens_of(simulated) == tokens_of(second)


def test_a_killed_instance_costs_time_and_no_token(plain):
    result = roll_out(kill_at_s=[{"instance": "paced-0", "at_s": 0.2, "restart_after_s": 0.2}])
    assert result.summary.instances_lost == 1
    assert tokens_of(result) == tokens_of(plain)


def shifted(blocks):
    return np.roll(blocks, 1, 0) if len(blocks) > 1 else np.roll(blocks, 8, 1)


def corrupted(blocks):
    blocks = blocks.copy()
    blocks[-1, -1] ^= 1
    return blocks


@pytest.mark.parametrize("damage", [shifted, corrupted, np.zeros_like], ids=["shifted", "corrupted", "empty"])
def test_a_load_that_is_not_what_was_computed_is_noticed(monkeypatch, damage):
    blocks = pytest.importorskip("seer_vllm.blocks")
    write = blocks.VllmLayers.write
    monkeypatch.setattr(
        blocks.VllmLayers, "write", lambda self, ids, rows, after: write(self, ids, damage(rows))
    )
    trace = Trace()
    with pytest.raises(EngineError, match="no instance is left"):
        roll_out(observer=trace, attempts=0)
    assert any("does not hold the KV of its text" in line for line in trace.lines)


def test_steps_go_on_while_a_request_waits_for_its_kv(plain):
    slow = {"moves": {"latency_s": 0.05, "bandwidth_bytes_per_s": 1e9}}
    stopping, waiting = roll_out(**slow), roll_out(**slow, awaited_kv_bytes=0)
    assert tokens_of(waiting) == tokens_of(stopping) == tokens_of(plain)
    assert waiting.summary.pool_tokens > 0
    assert waiting.summary.total_time_s < stopping.summary.total_time_s


def test_in_real_time_a_process_each_says_the_same_also_if_one_is_killed():
    killer = Killer(None, after=1, of=Complete, instance="paced-0")
    result = roll_out(clock="real", speed=0.5, observer=killer)
    assert result.summary.instances_lost == 1
    assert tokens_of(result) == tokens_of(roll_out("sim"))


def test_a_machine_that_cannot_keep_the_pace_says_that_the_times_are_not_valid():
    trace = Trace()
    result = roll_out(clock="real", speed=10_000.0, observer=trace)
    assert result.summary.degradations["pace"] == 2
    assert result.summary.overrun_share > 0.02
    assert any("too slow or too busy for the pace" in line for line in trace.lines)
    assert tokens_of(result) == tokens_of(roll_out("sim"))


@pytest.fixture
def script(tmp_path):
    """Responses of which siblings say nearly the same."""
    words = np.random.default_rng(0).integers(3, 1000, (4, 200))
    path = tmp_path / "completions.jsonl"
    with path.open("w") as file:
        for group in range(4):
            for index in range(4):
                text = words[group, : 120 + 20 * index].copy()
                text[10 + index :: 17] = 1000 + index
                line = {"request_id": f"g{group}/{index}", "token_ids": [*text.tolist(), 2]}
                file.write(json.dumps(line) + "\n")
    return path


def test_drafts_of_recorded_text_are_accepted_as_far_as_it_goes(script):
    traces = Trace(), Trace()
    first, second = (
        roll_out(**GPU, script=str(script), drafter=["grouped_spec"], observer=trace) for trace in traces
    )
    assert traces[0].lines == traces[1].lines
    plain = roll_out(**GPU, script=str(script))
    lines = map(json.loads, script.read_text().splitlines())
    recorded = {line["request_id"]: line["token_ids"] for line in lines}
    assert tokens_of(first) == tokens_of(second) == tokens_of(plain) == recorded
    assert first.summary.acceptance_length > plain.summary.acceptance_length == 1.0
    assert first.summary.total_time_s < plain.summary.total_time_s
    assert first.summary.drafting_share > 0


def steps_with_drafts(result, tokens):
    """The requests' steps that verified so many draft tokens or more."""
    chunks = [chunk for each in result.completions for chunk in each.chunks]
    return sum(chunk.drafted_at[tokens - 1] for chunk in chunks if len(chunk.drafted_at) >= tokens)


def test_drafts_of_one_length_change_no_token(script):
    settings = {**GPU, "script": str(script), "drafter": ["grouped_spec"]}
    ragged, uniform = roll_out(**settings), roll_out(**settings, uniform_drafts=True)
    assert tokens_of(uniform) == tokens_of(ragged)
    assert uniform.summary.acceptance_length > 1
    assert steps_with_drafts(ragged, 8) < 0.5 * steps_with_drafts(ragged, 1)
    assert steps_with_drafts(uniform, 8) > 0.8 * steps_with_drafts(uniform, 1) > 0


def test_a_drafter_on_made_up_text_is_refused():
    with pytest.raises(EngineError, match="drafts of made-up text mean nothing: name a recorded text"):
        roll_out(drafter=["grouped_spec"])
    with pytest.raises(EngineError, match="draft source 'vllm:ngram' cannot be imported"):
        roll_out(drafter=["vllm_ngram"])


def test_time_does_not_wait_for_what_comes_after_the_last_running_chunk_was_dropped():
    from seer_worker.process.worker import Worker
    from seer_worker.wire import AbortChunk, Start, Submit, Telemetry

    idles, dropped = [], []
    adapter = SimpleNamespace(
        info=InstanceInfo("0", 4096, 16, 8, 256),
        submit=lambda job, salt: None,
        abort=dropped.extend,
        idle=lambda: idles.append(True),
        telemetry=lambda: Telemetry(0, 0, 0.0),
    )
    worker = Worker(lambda *messages: None, adapter, Start("", "0", {}, ""))
    for name in "ab":
        worker.handle(Submit(ChunkJob(name, name, "g", [1], 1, 8, Sampling(), 5, 0)))
    worker.handle(AbortChunk("a"))
    assert not idles
    worker.handle(AbortChunk("b"))
    assert idles == [True]
    assert dropped == ["a", "b"]
