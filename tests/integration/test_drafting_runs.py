"""Drafters: started before the engines, sent to them, restarted with a change, counted."""

import asyncio

import msgspec
import pytest
from seer_cli.comparison import compare
from seer_host.config_files import load_config
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime
from seer_trace.records import TraceWriter, replay

from seer_core.errors import EngineError, PluginError
from seer_core.model.events import InstanceReported
from seer_core.plugins.slots import Strategies
from seer_core.ports.drafting import Drafter, StepTimes
from seer_core.scheduling.scheduler import Policies, Slot

from .helpers import Noted, Remembering

STEADY = """
from seer_core.ports.drafting import SourceSpec
from seer_core.plugins.hookspecs import hookimpl


class Steady:
    def lengths(self, probes, others):
        return (4, 4) if probes + others <= 8 else (0, 0)

    def record_acceptance(self, drafted_at, accepted_at):
        pass


class Drafter:
    def source(self):
        return SourceSpec("steady:Source", {}, 4)

    def shares(self):
        return False

    def policy(self, step_times):
        return Steady()


@hookimpl
def seer_make_drafter():
    return Drafter()
"""


def slot(strategy):
    return Slot("drafter", "noted", strategy)


def test_engines_start_anew_when_drafting_changes_and_only_then(by_hand, hand):
    engine, noted = hand(), Noted()

    async def main():
        async with by_hand(engine) as runtime:
            await runtime.update_weights("weights/1")
            await runtime.use(Strategies(Policies()))
            assert (engine.starts, engine.drafter) == (1, None)
            await runtime.use(Strategies(Policies(), drafter=slot(noted)))
            assert (engine.starts, engine.drafter) == (2, noted)
            assert engine.weights == [("weights/1", 1), ("weights/1", 1)]
            await runtime.use(Strategies(Policies()))
            assert (engine.starts, engine.drafter) == (3, None)

    asyncio.run(main())


def test_an_engine_that_cannot_draft_says_so_at_the_start(by_hand, hand):
    class Engine(hand):
        def set_drafter(self, drafter):
            if drafter is not None:
                raise EngineError("it cannot speculate; run with -p no:noted")

    async def main():
        async with by_hand(Engine(), drafter=slot(Noted())):
            pass

    with pytest.raises(EngineError, match="cannot speculate"):
        asyncio.run(main())


def test_engines_forget_a_group_with_its_last_response(by_hand, hand, some_groups):
    engine = hand()

    async def main():
        async with by_hand(engine, drafter=slot(Noted())) as runtime:
            rollout = runtime.rollout(some_groups(2, 2))
            forgotten = []
            for job in sorted(engine.jobs, key=lambda name: name.split("#")[0]):
                engine.finish(job)
                forgotten.append(list(engine.forgotten))
            await rollout.wait()
            first, second = engine.forgotten
            assert forgotten == [[], [first], [first], [first, second]]

    asyncio.run(main())


@pytest.mark.parametrize("sharing", [True, False])
def test_engines_receive_what_siblings_write_elsewhere_if_the_drafter_shares(
    by_hand, hand, some_groups, sharing
):
    engines = hand("a", max_running=1), hand("b", max_running=1)

    async def main():
        async with by_hand(*engines, drafter=slot(Noted(sharing=sharing))) as runtime:
            rollout = runtime.rollout(some_groups(1, 3))
            first, second = engines
            first.finish(tokens=3)
            for engine in (second, first):
                engine.finish(tokens=2)
            await rollout.wait()

    asyncio.run(main())
    received = [[(text.start, text.token_ids) for text in engine.sibling_tokens] for engine in engines]
    assert received == ([[(0, [5, 6])], [(0, [5, 6, 7])]] if sharing else [[], []])


def test_a_drafter_s_memory_gets_each_response_and_engines_what_it_recalls_until_it_is_cleared(
    by_hand, hand, some_groups
):
    engine, drafter = hand(), Remembering(sharing=True)
    groups = some_groups(2, 1)

    async def main():
        async with by_hand(engine, drafter=slot(drafter)) as runtime:
            await rolled_out(runtime, groups)
            assert [tokens for _, tokens in drafter.kept] == [[5, 6], [5, 6]]
            assert engine.sibling_tokens == []
            await rolled_out(runtime, groups[:1])
            [text] = engine.sibling_tokens
            name = groups[0].id
            assert (text.group_id, text.request_id, text.start) == (name, f"{name}/earlier-0", 0)
            assert text.token_ids == [5, 6]
            await runtime.reset_caches()
            await rolled_out(runtime, groups)
            assert len(engine.sibling_tokens) == 1

    async def rolled_out(runtime, groups):
        rollout = runtime.rollout(groups)
        while engine.jobs:
            engine.finish(tokens=2)
        await rollout.wait()

    asyncio.run(main())


def test_a_memory_that_fails_is_named(by_hand, hand, some_groups):
    drafter = Remembering(sharing=True)
    drafter.kept = None

    async def main():
        async with by_hand(hand(), drafter=slot(drafter)) as runtime:
            runtime.rollout(some_groups(1, 1))

    with pytest.raises(PluginError, match="plug-in 'noted', slot 'drafter': raised"):
        asyncio.run(main())


def test_drafts_are_counted_per_chunk_per_group_and_in_the_summary(by_hand, hand, some_groups, tmp_path):
    engine = hand()
    trace = TraceWriter(tmp_path / "trace.jsonl")

    async def main():
        async with by_hand(
            engine, drafter=slot(Noted()), observers=[Slot("observer", "test", trace)]
        ) as runtime:
            rollout = runtime.rollout(some_groups(1, 2))
            group = next(iter(runtime._controller.scheduler.contexts))
            engine.sink.reported(InstanceReported("hand-0", 2, 0, 0.1, 4.0, 0.5))
            engine.finish(tokens=10, drafts=(4, [4, 3], [4, 2]))
            assert (group.steps, group.drafted, group.accepted) == (4, 7, 6)
            engine.sink.reported(InstanceReported("hand-0", 1, 0, 0.1, 10.0, 1.0))
            engine.finish(tokens=5, drafts=(5, [1], [0]))
            return await rollout.wait()

    result = asyncio.run(main())
    trace.close()
    chunk = result.completions[0].chunks[0]
    assert (chunk.steps, chunk.drafted_at, chunk.accepted_at) == (4, [4, 3], [4, 2])
    summary = result.summary
    assert (summary.steps, summary.drafted_tokens, summary.accepted_tokens) == (9, 8, 6)
    assert summary.acceptance_length == 15 / 9
    assert summary.acceptance_at == [4 / 5, 2 / 3]
    assert summary.drafting_share == pytest.approx(0.1)
    from seer_core.scheduling.scheduler import Scheduler

    assert replay(tmp_path / "trace.jsonl", Scheduler()) > 0


def test_a_plug_in_s_drafter_fills_its_slot_and_two_are_refused(distribution, write_config):
    distribution("steady", STEADY)
    strategies = fill_slots(load_config(write_config(["steady"])))
    assert strategies.drafter.owner == "steady"
    assert isinstance(strategies.drafter.strategy, Drafter)


def test_an_arm_that_drafts_gives_the_same_tokens_and_is_faster_in_the_tail(
    distribution, write_config, some_groups
):
    distribution("steady", STEADY)
    config = load_config(
        write_config(
            ["divided_rollout", "steady"],
            '[compare]\ntechniques = ["divided_rollout", "steady"]\noracle = []\n'
            "[plugin.divided_rollout]\nchunk_tokens = 32\n"
            "[engine.sim]\nkv_capacity_tokens = 1024\nmax_model_tokens = 512\n"
            "[engine.sim.lengths]\nmean_tokens = 150\n",
        )
    )

    async def main():
        async with Runtime.from_config(config.with_plugins(())) as runtime:
            return await compare(runtime, config, some_groups(4, 4, 400))

    _, divided, drafting = asyncio.run(main())
    assert drafting.tokens_equal
    assert drafting.summaries[0].acceptance_length > 1
    assert drafting.summaries[0].total_time_s < divided.summaries[0].total_time_s
    assert divided.summaries[0].drafted_tokens == 0


def test_profile_writes_the_step_times_of_one_instance(seer, distribution, write_config, tmp_path):
    distribution("steady", STEADY)
    config, out = write_config(["steady"]), tmp_path / "profile.json"
    result = seer("profile", config, "--out", out, "--batch", 1, "--batch", 4, "--draft-tokens", 2)
    assert result.exit_code == 0, result.output
    times = msgspec.json.decode(out.read_bytes(), type=StepTimes)
    assert (times.batch, times.draft_tokens) == ((1, 4), (0, 2))
    assert "milliseconds per step" in result.output


def test_profile_without_a_drafter_measures_steps_without_drafts(seer, write_config, tmp_path):
    out = tmp_path / "profile.json"
    result = seer("profile", write_config(), "--out", out, "--batch", 1, "--batch", 4)
    assert result.exit_code == 0, result.output
    times = msgspec.json.decode(out.read_bytes(), type=StepTimes)
    assert (times.batch, times.draft_tokens) == ((1, 4), (0,))


def test_profile_of_drafts_without_a_drafter_says_what_to_add(seer, write_config, tmp_path):
    result = seer("profile", write_config(), "--draft-tokens", 2, "--out", tmp_path / "profile.json")
    assert result.exit_code == 2
    assert "no plug-in of [seer].plugins drafts" in result.output
    assert not (tmp_path / "profile.json").exists()


def test_a_distribution_can_add_a_command(seer, distribution):
    site = distribution(
        "extra",
        "import click\nfrom seer_core.errors import SeerError\n"
        "@click.command('hello')\n@click.option('--fail', is_flag=True)\n"
        "def hello(fail):\n    'Say hello.'\n"
        "    if fail:\n        raise SeerError('it is late; say it tomorrow')\n"
        "    click.echo('hello')\n",
    )
    points = next(site.glob("*.dist-info")) / "entry_points.txt"
    points.write_text("[seer.commands]\nhello = extra_module:hello\nbroken = nowhere:command\n")
    assert "hello" in seer("--help").output
    assert seer("hello").output == "hello\n"
    failed = seer("hello", "--fail")
    assert failed.exit_code == 1
    assert "it is late; say it tomorrow" in failed.output
    broken = seer("broken")
    assert broken.exit_code == 1
    assert "command 'broken' cannot be imported: ModuleNotFoundError" in broken.output
