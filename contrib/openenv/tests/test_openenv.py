"""Rollouts whose turns OpenEnv's own server answers, in a process and an interpreter of its own."""

import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import seer_openenv.episode
from seer_divided_rollout import Chunks, KvAware
from seer_host.config_files import make_config
from seer_journal import DiskJournal
from seer_openenv import OpenEnv
from seer_session.assembly import assemble
from seer_session.environment import AnsweredTurn, ModelTurn, Trajectory
from seer_session.runtime import Runtime
from seer_testing import EnvironmentContract
from structlog.testing import capture_logs

from seer_core.errors import ConfigError, EngineError
from seer_core.model import PromptGroup
from seer_core.model.events import EnvironmentAnswered
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import CORE, Policies, Slot

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-openenv/bin/python"
SERVER = Path(__file__).with_name("openenv_server.py")
PATIENCE_S = 240

spec = importlib.util.spec_from_file_location("openenv_letters", SERVER.with_name("letters.py"))
letters = importlib.util.module_from_spec(spec)
spec.loader.exec_module(letters)

if not PYTHON.exists():
    pytest.skip("no OpenEnv here; run: make setup-environments", allow_module_level=True)


class Served:
    """A server of OpenEnv's, which notes each session."""

    def __init__(self, kind, most, notes):
        self._kind, self._most, self._notes = kind, most, notes
        self.port = 0
        self.start()
        self.port = int(self.process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self):
        command = [PYTHON, SERVER, self._kind, str(self.port), self._notes, str(self._most)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()

    def notes(self):
        return self._notes.read_text().splitlines() if self._notes.exists() else []


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Servers that run, by kind and number of sessions: each takes seconds to start."""
    found = {}
    yield found
    for each in found.values():
        each.kill()


@pytest.fixture
def serve(servers, tmp_path_factory):
    """Return a function that returns a server of a kind, which a test may kill."""

    def serve(kind="letters", most=64):
        key = kind, most
        if key not in servers or servers[key].process.poll() is not None:
            servers[key] = Served(kind, most, tmp_path_factory.mktemp("server") / "notes")
        return servers[key]

    return serve


class Characters:
    """A tokenizer of a token for each character; the end token has no text."""

    def encode(self, text):
        return [min(ord(each), 999) for each in text]

    encode_part = encode

    def encode_chat(self, messages, kwargs):
        return self.encode("".join(each["content"] for each in messages))

    def encode_reply(self, messages, turn_token_ids, kwargs):
        return self.encode("".join(f"<{each['role']}>{each['content']}</>" for each in messages))

    def decode(self, token_ids):
        return "".join(map(chr, token_ids)).replace("\0", "")


def groups_with(**arguments):
    """Return groups that give the environment's reset their number, and further arguments."""
    return [
        PromptGroup(
            f"g{number}",
            (5, 6, 7 + number),
            4,
            300,
            seed=number,
            metadata={"openenv": {"seed": number, **arguments}},
        )
        for number in range(6)
    ]


GROUPS = groups_with()


@pytest.fixture
def no_model(monkeypatch):
    """Return a function that makes a runtime over engines without a model, whose tokens are keyed."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/plugins/engines"))
    module = importlib.import_module("seer_no_model")

    def make(chunk_tokens=32, observers=(), **turns):
        fleet = module.NoModelFleet(module.Settings(instances=2, token_s=0.0))
        fleet.tokenizer = Characters()
        strategies = {"splitter": Chunks(chunk_tokens), "placer": KvAware(0.25)}
        policies = Policies(**{name: Slot(name, "mine", each) for name, each in strategies.items()})
        slots = tuple(Slot("observer", CORE, each) for each in observers)
        config = make_config({"seer": {"turns": turns}}, base_dir=Path.cwd(), origin="test")
        return Runtime(Assembly(fleet, Strategies(policies, slots)), config.seer)

    return make


def roll_out(runtime, environment, groups=GROUPS, journal=None):
    async def run():
        async with runtime:
            return await runtime.rollout(groups, environment=environment, journal=journal).wait()

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def whole(result):
    """Return everything of the responses that must be the same however they were made."""
    return {
        each.request_id: (
            list(each.token_ids),
            each.loss_mask,
            each.finish_reason,
            each.reward,
            [(turn.tokens, turn.answer_tokens, turn.reward) for turn in each.turns],
        )
        for each in result.completions
    }


def failures(result):
    return {each.request_id: each.error for each in result.completions if each.finish_reason == "error"}


def letters_of(server, **settings):
    return OpenEnv(server.url, "message", "reply", **settings)


@pytest.mark.parametrize("role", ["user", ""])
def test_the_server_s_observations_are_the_masked_tokens_of_each_response(serve, no_model, role):
    server = serve()
    result = roll_out(no_model(), letters_of(server, role=role))
    assert len(result.completions) == 24
    assert max(len(each.turns) for each in result.completions) > 3
    for each in result.completions:
        state, at, rewards = letters.begin(int(each.group_id[1:])), 0, []
        for steps, turn in enumerate(each.turns, start=1):
            written = each.token_ids[at : at + turn.tokens]
            at += turn.tokens
            if turn is each.turns[-1] and each.finish_reason == "length" and not turn.answer_tokens:
                break
            text = Characters().decode(written).strip()
            state, reply, reward, done = letters.answer(state, steps, text)
            rewards.append(reward)
            answer = [] if done else Characters().encode(f"<user>{reply}</>" if role else reply)
            found = list(each.token_ids[at : at + turn.answer_tokens])
            cut = turn is each.turns[-1] and each.finish_reason == "length"
            assert found == (answer[: len(found)] if cut else answer)
            assert each.loss_mask[at - turn.tokens : at + len(found)] == [1] * turn.tokens + [0] * len(found)
            at += len(found)
        assert at == len(each.token_ids)
        assert each.reward == pytest.approx(sum(rewards) if rewards else None)


def test_chunks_change_no_token_and_every_session_ends(serve, no_model):
    server = serve()
    before = len(server.notes())
    expected = roll_out(no_model(300), letters_of(server))
    assert whole(roll_out(no_model(3), letters_of(server))) == whole(expected)
    answered = [each.request_id for each in expected.completions if each.turns[0].environment_s is not None]
    assert len(answered) > 8
    notes = [f"{kind} {request_id}" for request_id in answered for kind in ("begin", "end")]
    assert sorted(server.notes()[before:]) == sorted(2 * notes)


class Then:
    """An observer that does something once, when an environment has answered so many turns."""

    def __init__(self, count, act):
        self._left, self._act = count, act

    def observe(self, now, event, commands):
        self._left -= isinstance(event, EnvironmentAnswered)
        if self._left == 0:
            self._left = -1
            self._act()


def test_a_run_that_goes_on_plays_the_answered_turns_again(serve, no_model, tmp_path):
    server = serve()
    expected = roll_out(no_model(), letters_of(server))

    async def die():
        with DiskJournal(tmp_path / "j") as journal:

            def end():
                rollout.journal = None

            async with no_model(observers=[Then(20, end)]) as runtime:
                rollout = runtime.rollout(GROUPS, environment=letters_of(server), journal=journal)
                await rollout.wait()

    asyncio.run(die())
    with DiskJournal(tmp_path / "j") as journal:
        assert whole(roll_out(no_model(50), letters_of(server), journal=journal)) == whole(expected)


def test_a_server_that_is_killed_and_started_again_costs_no_token(serve, no_model, monkeypatch):
    monkeypatch.setattr(seer_openenv.episode, "PATIENCE_S", PATIENCE_S)
    server = serve()
    expected = roll_out(no_model(), letters_of(server))

    def restart():
        server.kill()
        server.start()

    with capture_logs() as logs:
        again = roll_out(no_model(observers=[Then(20, restart)], timeout_s=PATIENCE_S), letters_of(server))
    assert whole(again) == whole(expected)
    assert any(each["event"] == "openenv_lost" for each in logs)


def test_an_episode_that_hangs_meets_the_time_limit_and_one_that_fails_gives_its_reason(
    serve, no_model, monkeypatch
):
    monkeypatch.setattr(seer_openenv.episode, "CLOSE_S", 0.1)
    server = serve()
    expected = whole(roll_out(no_model(), letters_of(server)))
    groups = groups_with(hang="g1/1", crash="g2/2")
    result = roll_out(no_model(timeout_s=5.0), letters_of(server), groups)
    failed = failures(result)
    assert failed.keys() == {"g1/1", "g2/2"}
    assert "took more than 5 s for a turn" in failed["g1/1"]
    assert "OpenEnv's environment failed: no \\x1b[31mcrash (EXECUTION_ERROR)" in failed["g2/2"]
    for request_id, found in whole(result).items():
        if request_id not in failed:
            assert found == expected[request_id]


def test_a_server_without_room_for_all_sessions_is_named_with_what_to_change(serve, no_model):
    failed = failures(roll_out(no_model(), letters_of(serve(most=2))))
    assert 0 < len(failed) < 24
    assert all("start it with a higher max_concurrent_envs" in each for each in failed.values())


TRAJECTORY = Trajectory("g/0", "g", 0, 7, (1, 2, 3), {}, {})


def answers(environment, *texts, trajectory=TRAJECTORY, earlier=()):
    """Return the answers to turns of one response."""

    async def play():
        await environment.start()
        turns = [ModelTurn(number, [5], text, None, 100) for number, text in enumerate((*earlier, *texts))]
        await environment.reset(trajectory, [AnsweredTurn(each, [5]) for each in turns[: len(earlier)]])
        try:
            return [await environment.step(trajectory, turn) for turn in turns[len(earlier) :]]
        finally:
            await environment.close(trajectory)

    return asyncio.run(asyncio.wait_for(play(), PATIENCE_S))


def test_tools_are_called_by_mcp_and_mistakes_are_read_by_the_model(serve):
    found = answers(
        OpenEnv(serve("tools").url, role="tool"),
        '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 40}}</tool_call>',
        '{"name": "spell", "arguments": {"number": 2}}',
        '{"name": "spell", "arguments": {"number": 7}}',
        '{"name": "multiply", "arguments": {}}',
        '{"name": "add"',
        '{"add": 1}',
        "It is 42.",
    )
    *called, end = found
    assert {message["role"] for each in called for message in each.messages} == {"tool"}
    said = [message["content"] for each in called for message in each.messages]
    assert said[:2] == ["42", "two"]
    assert [next(iter(json.loads(each))) for each in said[2:]] == ["error"] * 4
    assert "list index out of range" in said[2]
    assert "multiply" in said[3]
    assert "this is no JSON" in said[4]
    assert "tool_name: Field required" in said[5]
    assert (end.done, end.reward, end.messages) == (True, None, None)


def test_metadata_of_an_observation_stay_hidden_from_the_model(serve):
    [first] = answers(OpenEnv(serve().url, "message"), "hello")
    [message] = first.messages
    assert json.loads(message["content"]).keys() == {"reply"}


def test_earlier_turns_are_played_again(serve):
    server = serve()
    first, second = answers(letters_of(server), "ab", "cd")
    assert answers(letters_of(server), "cd", earlier=["ab"]) == [second] != [first]


def test_a_reward_may_be_true(serve):
    [answer] = answers(letters_of(serve()), "true")
    assert answer.reward == 1.0


class TestOpenEnv(EnvironmentContract):
    metadata = {"openenv": {"seed": 3}}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _server(self, serve):
        self._url = serve().url

    def make(self):
        return OpenEnv(self._url, "message", "reply")


def start(tables):
    """Start a simulated runtime whose config names the plug-in."""
    config = make_config(
        {"seer": {"engine": "sim", "plugins": ["openenv"]}, "plugin": {"openenv": tables}},
        base_dir=Path.cwd(),
        origin="test",
    )

    async def run():
        async with Runtime(assemble(config), config.seer, config.rollout):
            pass

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def test_the_start_compares_the_config_with_the_server(serve):
    server = serve()
    start({"url": server.url, "action_field": "message"})
    start({"url": server.url})
    with pytest.raises(
        ConfigError, match=r"action_field is 'text'.* have \['count', 'message', 'metadata'\]"
    ):
        start({"url": server.url, "action_field": "text"})
    with pytest.raises(EngineError, match=r"there is no OpenEnv server at 'http://127.0.0.1:9/schema'"):
        start({"url": "http://127.0.0.1:9", "action_field": "message"})


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://there", "http://", "http://["])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match=r"write http://127\.0\.0\.1:8000"):
        OpenEnv(url)


def test_prompts_are_made_of_the_first_observations(serve):
    server = serve()
    command = [sys.executable, "-m", "seer_openenv", server.url, "--observation-field", "reply"]
    ended = subprocess.run(command, input='{"seed": 4}\n{"seed": 5}\n', capture_output=True, text=True)
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [
        {"messages": [{"role": "user", "content": f"seed {seed}"}], "metadata": {"openenv": {"seed": seed}}}
        for seed in (4, 5)
    ], ended.stderr
    plain = subprocess.run([*command, "--role="], input='{"seed": 4}', capture_output=True, text=True)
    assert json.loads(plain.stdout)["prompt"] == "seed 4"
    wrong = subprocess.run(command, input="[4]", capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "line 1 is [4]; write an object of reset's arguments" in wrong.stderr


def test_a_server_that_stays_away_ends_the_responses_that_need_it_alone(serve, no_model, monkeypatch):
    monkeypatch.setattr(seer_openenv.episode, "PATIENCE_S", 0.0)
    server = serve()
    expected = whole(roll_out(no_model(), letters_of(server)))
    result = roll_out(no_model(observers=[Then(20, server.kill)]), letters_of(server))
    failed = failures(result)
    assert 0 < len(failed) < len(result.completions) == 24
    gone = f"OpenEnv's server at 'ws://127.0.0.1:{server.port}/ws' is gone"
    assert all(gone in each for each in failed.values())
    for request_id, found in whole(result).items():
        if request_id not in failed:
            assert found == expected[request_id]


def test_an_action_that_kills_the_server_is_not_repeated_for_ever(serve, monkeypatch):
    monkeypatch.setattr(seer_openenv.episode, "PATIENCE_S", PATIENCE_S)
    server = serve()

    class Supervised(OpenEnv):
        async def step(self, trajectory, turn):
            asking = asyncio.ensure_future(super().step(trajectory, turn))
            await asyncio.to_thread(server.process.wait, PATIENCE_S)
            server.kill()
            server.start()
            return await asking

    with pytest.raises(EngineError, match="was lost twice over the same action"):
        answers(Supervised(server.url, "message", "reply"), "die")
    server.process.wait(PATIENCE_S)
