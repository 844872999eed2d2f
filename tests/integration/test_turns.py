"""Rollouts whose turns an environment answers: exact to the token, and tools hold no engine up."""

import asyncio
import importlib
from itertools import pairwise
from pathlib import Path

import pytest
from seer_host.config_files import load_config, make_config
from seer_journal import DiskJournal
from seer_journal.records import HEAD
from seer_session.assembly import assemble
from seer_session.environment import EnvironmentAnswer
from seer_session.factories import environment_of
from seer_session.runtime import Runtime
from seer_session.session import Session
from seer_trace.records import TraceWriter, replay
from structlog.testing import capture_logs

from seer_core.errors import ConfigError, EngineError, InputError, PluginError
from seer_core.model import PromptGroup
from seer_core.model.events import AskEnvironment, ChunkFinished, EnvironmentAnswered
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import CORE, Policies, Scheduler, Slot

from .helpers import SMALL_SIM, divided, play

ENGINE = Path(__file__).parents[2] / "examples/plugins/engines"
GROUPS = [PromptGroup(f"g{number}", (5, 6, 7 + number), 4, 300, seed=number) for number in range(6)]
VOCABULARY = 90


class Dice:
    """An environment whose answer depends on all turns of a response so far, and that ends it by chance."""

    def __init__(self, delay_s=0.0):
        self.delay_s, self.steps, self.ends = delay_s, [], []
        self._sums = {}

    async def reset(self, trajectory, earlier):
        assert trajectory.request_id not in self._sums, "begun twice"
        self._sums[trajectory.request_id] = trajectory.seed % 1000
        for each in earlier:
            self._add(trajectory, each.turn)

    async def step(self, trajectory, turn):
        self.steps.append((trajectory.request_id, turn.number))
        total = self._add(trajectory, turn)
        if total % 5 == 0 or turn.number > 8:
            return EnvironmentAnswer(done=True, reward=float(turn.number), delay_s=self.delay_s)
        answer = [1 + (total + place) % VOCABULARY for place in range(1 + total % 7)]
        return EnvironmentAnswer(token_ids=answer, reward=0.5, delay_s=self.delay_s)

    async def close(self, trajectory):
        self.ends.append(trajectory.request_id)
        del self._sums[trajectory.request_id]

    def _add(self, trajectory, turn):
        self._sums[trajectory.request_id] += sum(turn.token_ids) + turn.number
        return self._sums[trajectory.request_id]


@pytest.fixture
def no_model(monkeypatch):
    """Return a function that makes a runtime over engines without a model, whose tokens are keyed."""
    monkeypatch.syspath_prepend(str(ENGINE))
    module = importlib.import_module("seer_no_model")

    def make(policies=None, observers=(), instances=2):
        fleet = module.NoModelFleet(module.Settings(instances=instances, token_s=0.0))
        slots = [Slot("observer", CORE, each) for each in observers]
        return Runtime(Assembly(fleet, Strategies(policies or divided(32), tuple(slots))))

    return make


def whole(result):
    """Return everything of the responses that must be the same however they were made."""
    return {
        each.request_id: (
            list(each.token_ids),
            list(each.logprobs),
            each.loss_mask,
            each.finish_reason,
            each.reward,
            [(turn.tokens, turn.answer_tokens, turn.reward) for turn in each.turns],
        )
        for each in result.completions
    }


async def roll_out(runtime, environment, groups=GROUPS, journal=None):
    async with runtime:
        return await runtime.rollout(groups, environment=environment, journal=journal).wait()


def test_a_trajectory_is_the_same_whole_and_in_chunks(no_model):
    dice = Dice()
    expected = play(roll_out(no_model(Policies()), dice))
    assert len(expected.completions) == 24
    turns = [turn for each in expected.completions for turn in each.turns]
    assert max(len(each.turns) for each in expected.completions) > 3
    assert expected.summary.turns == len(dice.steps) >= 24
    assert expected.summary.environment_tokens == sum(turn.answer_tokens for turn in turns) > 100
    assert sorted(dice.ends) == sorted({request_id for request_id, _ in dice.steps})
    for chunk_tokens in (3, 32):
        again = play(roll_out(no_model(divided(chunk_tokens), instances=3), Dice()))
        assert again.summary.chunks > expected.summary.chunks
        assert whole(again) == whole(expected)


def test_the_environment_s_tokens_are_masked_and_the_rewards_summed(no_model):
    result = play(roll_out(no_model(), Dice()))
    for completion in result.completions:
        tokens = [turn.tokens + turn.answer_tokens for turn in completion.turns]
        assert sum(tokens) == len(completion.token_ids) == len(completion.loss_mask) <= 300
        masked = [at for at, mask in enumerate(completion.loss_mask) if not mask]
        assert all(completion.logprobs[at] == 0.0 for at in masked)
        written = [at for at, mask in enumerate(completion.loss_mask) if mask]
        assert all(completion.logprobs[at] == -1.0 for at in written)
        rewards = [turn.reward for turn in completion.turns if turn.reward is not None]
        assert completion.reward == (sum(rewards) if rewards else None)


def test_a_trace_with_turns_replays_to_the_same_commands(no_model, tmp_path):
    writer = TraceWriter(tmp_path / "trace.jsonl")
    play(roll_out(no_model(observers=[writer]), Dice()))
    writer.close()
    assert replay(tmp_path / "trace.jsonl", Scheduler(divided(32))) > 100


class JournalEnds:
    """An observer that takes the journal away with an event of a kind, as the death of the process does."""

    def __init__(self, kind, count):
        self.kind, self.left = kind, count
        self.rollout = None

    def observe(self, now, event, commands):
        self.left -= isinstance(event, self.kind)
        if not self.left:
            self.rollout.journal = None


@pytest.mark.parametrize(
    ("kind", "count"), [(ChunkFinished, 2), (ChunkFinished, 50), (EnvironmentAnswered, 20)]
)
def test_a_rollout_that_goes_on_repeats_no_answer_that_the_journal_has(no_model, tmp_path, kind, count):
    first = Dice()
    expected = play(roll_out(no_model(), first))
    ends = JournalEnds(kind, count)

    async def die(journal):
        async with no_model(observers=[ends]) as runtime:
            ends.rollout = runtime.rollout(GROUPS, environment=Dice(), journal=journal)
            await ends.rollout.wait()

    with DiskJournal(tmp_path / "j") as journal:
        play(die(journal))
    with DiskJournal(tmp_path / "j") as journal:
        answered = sum(len(each.turns) for group in journal._contents.responses.values() for each in group)
        second = Dice()
        again = play(roll_out(no_model(divided(50)), second, journal=journal))
    assert whole(again) == whole(expected)
    assert len(second.steps) == len(first.steps) - answered
    assert answered == 0 if count == 2 else answered > 0
    with DiskJournal(tmp_path / "j") as journal:
        third = Dice()
        assert whole(play(roll_out(no_model(), third, journal=journal))) == whole(expected)
    assert third.steps == []


def ends_of_records(data):
    ends = [0]
    while ends[-1] < len(data):
        ends.append(ends[-1] + HEAD.size + HEAD.unpack_from(data, ends[-1])[1])
    return ends


def test_a_journal_that_is_cut_anywhere_or_lacks_a_record_goes_on_exactly(no_model, tmp_path):
    groups = [PromptGroup(f"g{number}", (5, 6, 7 + number), 2, 60, seed=number) for number in range(2)]
    expected = whole(play(roll_out(no_model(), Dice(), groups)))
    with DiskJournal(tmp_path / "whole") as journal:
        play(roll_out(no_model(divided(16)), Dice(), groups, journal))
    [file] = (tmp_path / "whole").iterdir()
    data = file.read_bytes()
    ends = ends_of_records(data)
    assert len(ends) > 20
    damaged = {}
    for number, (begin, end) in enumerate(pairwise(ends)):
        damaged[f"{number} cut"] = data[:begin]
        damaged[f"{number} torn"] = data[: (begin + end) // 2]
        damaged[f"{number} lost"] = data[:begin] + data[end:]
        damaged[f"{number} zeros"] = data[:begin] + bytes(end - begin) + data[end:]
    for name, left in damaged.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / file.name).write_bytes(left)
        with DiskJournal(directory) as journal:
            assert whole(play(roll_out(no_model(divided(50)), Dice(), groups, journal))) == expected, name
        with DiskJournal(directory) as journal:  # and what was written again is there
            again = Dice()
            assert whole(play(roll_out(no_model(), again, groups, journal))) == expected, name
        assert again.steps == [], name


def test_a_journal_is_of_rollouts_with_an_environment_or_without(no_model, tmp_path):
    with DiskJournal(tmp_path / "j") as journal:
        play(roll_out(no_model(), Dice(), journal=journal))
    with (
        DiskJournal(tmp_path / "j") as journal,
        pytest.raises(InputError, match="its answers by an environment"),
    ):
        play(roll_out(no_model(), None, journal=journal))


class Grumpy(Dice):
    """An environment that fails on some responses, each time in another way."""

    async def step(self, trajectory, turn):
        match trajectory.index:
            case 0:
                raise ValueError("no network")
            case 1:
                await asyncio.Event().wait()
            case 2:
                return EnvironmentAnswer(token_ids=[10_000])
        return await super().step(trajectory, turn)


def test_an_environment_that_fails_ends_that_response_alone(no_model, tmp_path):
    runtime = no_model()
    limit = make_config({"seer": {"turns": {"timeout_s": 0.1}}}, base_dir=tmp_path, origin="test").seer
    runtime.settings = limit
    with capture_logs() as logs:
        result = play(roll_out(runtime, Grumpy()))
    expected = whole(play(roll_out(no_model(), Dice())))
    failed = {each.request_id: each.error for each in result.completions if each.finish_reason == "error"}
    reasons = {"0": "ValueError: no network", "1": "more than 0.1 s", "2": "the vocabulary is 0 to 999"}
    assert {request_id.partition("/")[2] for request_id in failed} == reasons.keys()
    assert all(reasons[request_id.partition("/")[2]] in reason for request_id, reason in failed.items())
    for request_id, found in whole(result).items():
        if request_id not in failed:
            assert found == expected[request_id]
    said = {each["request"]: each["reason"] for each in logs if each["event"] == "environment_failed"}
    assert said == failed


def test_a_rollout_in_which_all_responses_fail_raises_and_names_the_first_reason():
    class Broken:
        async def step(self, trajectory, turn):
            raise ValueError("no network")

    groups = [PromptGroup("g", (5, 6, 7), 2, 900)]
    with pytest.raises(EngineError, match=r"all 2 requests ended in an error.* ValueError: no network"):
        simulated(Broken(), groups=groups)


def test_a_response_that_is_aborted_while_its_environment_works_is_over_at_once():
    asked = asyncio.Event()
    late = []

    class Slow:
        async def step(self, trajectory, turn):
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                late.append(trajectory.request_id)
                raise

    async def story():
        async with simulator() as runtime:
            rollout = runtime.rollout([PromptGroup("g", (5, 6, 7), 1, 900)], environment=Slow())
            waiting = asyncio.ensure_future(rollout.wait())
            await asked.wait()
            rollout.abort_request("g/0")
            return await waiting

    [completion] = play(story()).completions
    assert (completion.finish_reason, completion.error) == ("aborted", None)
    assert len(completion.token_ids) == completion.turns[0].tokens > 0
    assert late == ["g/0"]


def test_a_session_takes_an_environment():
    config = make_config(
        {"seer": {"engine": "sim"}, "engine": {"sim": SMALL_SIM}}, base_dir=Path.cwd(), origin="test"
    )
    with Session(config) as session:
        result = session.rollout([{"prompt": "a", "n": 3, "max_tokens": 900}], environment=Dice())
        assert all(each.turns for each in result.completions)
        plain = session.rollout([{"prompt": "a", "n": 3, "max_tokens": 900}])
        assert not any(each.turns for each in plain.completions)


def simulator(observers=(), **seer):
    """Return a runtime over simulated engines."""
    plugins = ["divided_rollout", "context_sched"]
    tables = {
        "seer": {"engine": "sim", "plugins": plugins, "debug": True, **seer},
        "engine": {"sim": SMALL_SIM},
    }
    config = make_config(tables, base_dir=Path.cwd(), origin="test")
    return Runtime(assemble(config).with_observer(*observers), config.seer, config.rollout)


def simulated(environment, *, groups=None, **settings):
    """Roll out on simulated engines, and return the result and the virtual time that it took."""
    groups = groups or [PromptGroup(f"g{n}", (5, 6, 7 + n), 4, 900, seed=n) for n in range(6)]
    result = play(roll_out(simulator(**settings), environment, groups))
    return result, result.summary.total_time_s


def test_the_time_of_a_simulated_tool_passes_on_the_virtual_clock():
    quick, quick_s = simulated(Dice())
    slow, slow_s = simulated(Dice(delay_s=50.0))
    assert whole(quick) == whole(slow)
    longest = max(len(each.turns) for each in slow.completions)
    assert 50.0 * longest <= slow_s <= 50.0 * longest + quick_s
    assert slow.summary.environment_s == pytest.approx(50.0 * slow.summary.turns)
    again, again_s = simulated(Dice(delay_s=50.0))
    assert (whole(again), again_s) == (whole(slow), slow_s)


def test_virtual_time_stands_still_while_an_environment_s_own_code_runs():
    class Threaded(Dice):
        def step(self, trajectory, turn):  # a plain method: it runs in a thread
            return asyncio.run(super().step(trajectory, turn))

    quick, quick_s = simulated(Dice())
    threaded, threaded_s = simulated(Threaded())
    assert (whole(threaded), threaded_s) == (whole(quick), quick_s)


def test_few_answers_at_once_make_others_wait():
    _, many_s = simulated(Dice(delay_s=50.0))
    _, few_s = simulated(Dice(delay_s=50.0), turns={"at_once": 1})
    assert few_s > 3 * many_s


def test_a_request_that_acts_holds_no_place_in_an_engine():
    class Watch:
        def __init__(self):
            self.most_running = self.acting = 0

        def observe(self, now, event, commands):
            self.acting += sum(isinstance(each, AskEnvironment) for each in commands)
            self.acting -= isinstance(event, EnvironmentAnswered)
            self.most_running = max(self.most_running, self.acting)

    watch = Watch()
    groups = [PromptGroup("g", (5, 6, 7), 64, 900, seed=1)]
    result, _ = simulated(Dice(delay_s=50.0), observers=[watch], groups=groups)
    assert watch.most_running > SMALL_SIM["instances"] * SMALL_SIM["max_running"]
    assert result.summary.preemptions == 0


ENVIRONMENT = """
from seer_core.plugins.hookspecs import hookimpl
from seer_session.environment import EnvironmentAnswer

class Once:
    seen = []

    async def start(self):
        self.seen.append("start")

    async def step(self, trajectory, turn):
        self.seen.append(trajectory.request_id)
        return EnvironmentAnswer(done=True)

    async def stop(self):
        self.seen.append("stop")

@hookimpl
def seer_make_environment():
    return Once()
"""


def test_an_environment_of_the_config_is_started_asked_and_stopped(distribution, write_config):
    distribution("once", ENVIRONMENT)
    seen = importlib.import_module("once_module").Once.seen
    config = write_config(["once"])

    async def story():
        async with Runtime.from_config(config) as runtime:
            assert seen == ["start"]
            groups = runtime.groups([{"prompt": "a", "n": 2, "max_tokens": 8000}])
            await runtime.rollout(groups).wait()
            other = Dice()
            await runtime.rollout(
                runtime.groups([{"prompt": "a", "max_tokens": 8000}]), environment=other
            ).wait()
            assert other.steps

    play(story())
    assert seen[0] == "start"
    assert sorted(seen[1:-1]) == [f"{seen[1].partition('/')[0]}/{index}" for index in range(2)]
    assert seen[-1] == "stop"


def test_what_reads_no_turns_refuses_an_environment(distribution, write_config, seer):
    distribution("once", ENVIRONMENT)
    config = write_config(["once"])
    refused = r"takes no environment yet, and \[seer\].plugins names 'once'"
    with pytest.raises(ConfigError, match=f"the trainer {refused}"):
        Runtime.from_config(config).refuse_environment("the trainer")
    result = seer("serve", config, "--port", "0")
    assert result.exit_code == 2
    assert "seer serve takes no environment yet" in result.output
    without = load_config(config, ["seer.slots.environment=seer-core"])
    Runtime.from_config(without).refuse_environment("the trainer")


def test_two_environments_are_a_conflict_that_the_config_settles(distribution, write_config):
    distribution("once", ENVIRONMENT)
    distribution("more", ENVIRONMENT)
    with pytest.raises(ConfigError, match="slot 'environment' is claimed by 'once' and 'more'"):
        Runtime.from_config(write_config(["once", "more"]))
    chosen = load_config(write_config(["once", "more"]), ["seer.slots.environment=more"])
    assert environment_of(assemble(chosen).strategies).owner == "more"


def test_an_environment_that_does_not_start_ends_the_start(distribution, write_config):
    distribution("once", ENVIRONMENT.replace('self.seen.append("start")', 'raise OSError("no sandbox")'))

    async def story():
        async with Runtime.from_config(write_config(["once"])):
            pass

    with pytest.raises(PluginError, match="plug-in 'once', slot 'environment': raised OSError: no sandbox"):
        play(story())
