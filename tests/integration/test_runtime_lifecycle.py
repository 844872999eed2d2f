"""A runtime from its start to its end, and what it refuses in between."""

import asyncio
import re
import subprocess
import sys

import msgspec
import pytest
import structlog
from seer_divided_rollout import AffordableChunks
from seer_session.session import rollout
from seer_trace.records import TraceWriter, replay

from seer_core.errors import (
    ConfigError,
    EngineError,
    PromptError,
    SeerError,
)
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    InstanceLost,
)
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot
from tests.support.patience import PATIENCE_S

from .helpers import Recorder, divided, outputs, play, policies, turns


def test_engines_start_together_and_if_one_cannot_all_are_stopped(by_hand, hand):
    class Broken(hand):
        async def start(self, sink):
            raise EngineError("instance 'y' found no GPU; free one")

    x, y = hand("x"), Broken("y")
    with pytest.raises(EngineError, match="found no GPU"):
        play(by_hand(x, y).start())
    assert (x.starts, x.stops, y.stops) == (1, 1, 1)


@pytest.mark.parametrize(
    ("answer", "fact"),
    [
        (RuntimeError("libcuda is gone"), "instance 'x' did not start: RuntimeError: libcuda is gone"),
        (None, "instance 'x' answered its start with None"),
        (InstanceInfo("z", 64, 16, 4, 64), "instance 'x' answered its start with InstanceInfo(id='z'"),
    ],
)
def test_an_engine_that_breaks_the_contract_of_its_start_is_named(by_hand, hand, answer, fact):
    class Odd(hand):
        async def start(self, sink):
            if isinstance(answer, Exception):
                raise answer
            return answer

    engine = Odd("x")
    with pytest.raises(EngineError) as caught:
        play(by_hand(engine).start())
    assert fact in str(caught.value)
    assert engine.stops == 1


def test_a_start_that_is_interrupted_stops_what_is_up_already(by_hand, hand):
    class Slow(hand):
        async def start(self, sink):
            await asyncio.Event().wait()

    x, y = hand("x"), Slow("y")

    async def run():
        start = asyncio.ensure_future(by_hand(x, y).start())
        await turns()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    play(run())
    assert (x.starts, x.stops, y.stops) == (1, 1, 1)


def test_an_instance_that_dies_while_others_start_is_started_again(by_hand, hand):
    class Dying(hand):
        async def start(self, sink):
            info = await super().start(sink)
            if self.starts == 1:
                asyncio.get_running_loop().call_soon(self.die)
            return info

    class Slow(hand):
        async def start(self, sink):
            await turns()
            return await super().start(sink)

    x, y = Dying("x"), Slow("y")
    recorder = Recorder()

    async def run():
        async with by_hand(x, y, observers=[Slot("observer", "recorder", recorder)]) as runtime:
            await turns()
            assert set(runtime.alive) == {"x", "y"}

    play(run())
    assert x.starts == 2
    assert InstanceLost("x", "the test killed it") in recorder.seen


def test_a_runtime_can_be_entered_again_and_goes_on_where_it_was(simulated, some_groups, tmp_path):
    trace = TraceWriter(tmp_path / "trace.jsonl")
    runtime = simulated(divided(), [Slot("observer", "trace", trace)])

    async def run():
        results = []
        for version in range(3):
            async with runtime:
                results.append(await runtime.rollout(some_groups(6, 4, 600)).wait())
                assert await runtime.update_weights(f"step {version}") == version + 1
        return results

    first, *others = play(run())
    trace.close()
    for version, result in enumerate(others, 1):
        assert outputs(result) == outputs(first)
        assert result.summary.weight_version == version
    assert replay(tmp_path / "trace.jsonl", Scheduler(divided())) > 0


def test_a_runtime_that_is_up_is_not_started_twice(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            with pytest.raises(SeerError, match="started already; stop it before it can start again"):
                await runtime.start()
            under_way = runtime.rollout(some_groups(1, 1))
            engine.finish()
            await under_way.wait()

    play(run())
    assert (engine.starts, engine.stops) == (1, 1)


def test_a_runtime_left_in_mid_rollout_is_refused_before_its_engines_start(by_hand, hand, some_groups):
    engine = hand()
    runtime = by_hand(engine)

    async def run():
        async with runtime:
            runtime.rollout(some_groups(1, 1))
        with pytest.raises(SeerError, match=r"fresh strategies with use\(\)"):
            await runtime.start()
        assert engine.starts == 1
        await runtime.use(Strategies(Policies()))
        async with runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.finish()
            await under_way.wait()

    play(run())
    assert engine.starts == 2


def test_a_start_that_failed_can_be_tried_again(by_hand, hand, some_groups):
    class Late(hand):
        async def start(self, sink):
            info = await super().start(sink)
            if self.starts == 1:
                raise EngineError("no memory yet")
            return info

    x, y = hand("x"), Late("y")
    runtime = by_hand(x, y)

    async def run():
        with pytest.raises(EngineError, match="no memory yet"):
            await runtime.start()
        async with runtime:
            assert set(runtime.alive) == {"x", "y"}

    play(run())


def test_the_short_form_is_refused_where_a_loop_runs_before_anything_is_made(write_config):
    path = write_config()

    async def run():
        rollout(path, [{"prompt": "hi"}])

    with pytest.raises(SeerError, match="one is running here already; use `async with Runtime"):
        play(run())


def test_a_pool_without_engines_is_refused(by_hand):
    with pytest.raises(EngineError, match="made no engines; set its `instances` to 1 or more"):
        play(by_hand().start())


def test_leaving_ends_a_rollout_that_is_under_way_and_all_engines(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            x.finish()
        assert (await anext(under_way)).request_id == "a/0"
        with pytest.raises(EngineError, match="stopped before the rollout had finished"):
            await anext(under_way)
        await runtime.stop()

    play(run())
    assert (x.stops, y.stops) == (2, 2)
    assert y.aborted == ["a/1#1@y"]


def test_an_instance_lost_while_others_are_stopped_is_not_started_again(by_hand, hand, some_groups):
    class Last(hand):
        async def stop(self):
            await super().stop()
            x.die()

    x, y = hand("x"), Last("y")

    async def run():
        async with by_hand(x, y):
            pass
        await turns()

    play(run())
    assert (x.starts, y.starts) == (1, 1)


def test_a_runtime_that_has_not_started_rolls_nothing_out(by_hand, hand, some_groups):
    async def run():
        with pytest.raises(EngineError, match="no instance is alive; enter the runtime before rolling out"):
            by_hand(hand()).rollout(some_groups(1, 1))

    play(run())


def test_groups_that_do_not_fit_are_refused_before_anything_runs(by_hand, hand, some_groups):
    engine = hand(kv_capacity_tokens=128)
    good, other = some_groups(2)
    bad = {
        "'a': this id occurs twice": [good, good],
        "'b': the prompt is empty": [good, msgspec.structs.replace(other, prompt_token_ids=())],
        "'b': n is 0": [good, msgspec.structs.replace(other, n=0)],
        "'b': token id 1000 is outside": [good, msgspec.structs.replace(other, prompt_token_ids=(1000,))],
        "'b': prompt and max_tokens make 205 tokens, the largest instance's KV holds 128": [
            good,
            msgspec.structs.replace(other, max_tokens=200),
        ],
        "'b': prompt (5) and max_tokens (512) exceed the model's 512": [
            good,
            msgspec.structs.replace(other, max_tokens=512),
        ],
    }

    async def run():
        async with by_hand(engine) as runtime:
            for fact, groups in bad.items():
                with pytest.raises(PromptError) as caught:
                    runtime.rollout(groups)
                assert f"group {fact}" in str(caught.value)
            assert not engine.jobs
            good_one = runtime.rollout([good])
            assert len(engine.jobs) == 2
            await good_one.abort()

    play(run())


def test_the_chosen_lengths_of_chunks_are_logged(by_hand, hand):
    async def run():
        runtime = by_hand(hand(), policies=policies(splitter=AffordableChunks()))
        with structlog.testing.capture_logs() as logs:
            await runtime.start()
            await runtime.use(Strategies(divided(32)))
        await runtime.stop()
        return [each for each in logs if each["event"] == "chunk_tokens"]

    chosen, given = play(run())
    assert re.match(r"\d+ after 0, \d+ after 1024, .* by what a chunk's end costs", chosen["why"])
    assert given["why"] == "32 tokens, as configured"


def test_a_chunk_larger_than_an_instance_s_kv_is_refused_at_the_start(by_hand, hand):
    engine = hand(kv_capacity_tokens=128)
    with pytest.raises(ConfigError) as caught:
        play(by_hand(engine, policies=divided(256)).start())
    assert engine.stops == 1
    for fact in ("[plugin.divided_rollout].chunk_tokens is 256", "'hand-0' holds 128", "smaller"):
        assert fact in str(caught.value)


def test_a_library_logs_on_standard_error_unless_its_program_says_otherwise(tmp_path):
    (tmp_path / "seer.toml").write_text('[seer]\nengine = "sim"\n')
    prompts = [{"prompt": "a", "n": 1}]
    script = f"from seer_session import rollout; rollout({str(tmp_path / 'seer.toml')!r}, {prompts})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout == ""
    assert "instance_started" in done.stderr
    own = f"import structlog; structlog.configure(processors=[structlog.processors.JSONRenderer()]); {script}"
    done = subprocess.run(
        [sys.executable, "-c", own], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert '"event": "instance_started"' in done.stdout
