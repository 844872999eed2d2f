"""Environments at work: many at once, each within its limit, and each failure of one response alone."""

import asyncio
import itertools
import math
import threading

import pytest
from seer_host.tables import TurnsTable
from seer_session.environment import EnvironmentAnswer, ModelTurn, Trajectory
from seer_session.environment_calls import EncodedAnswer, EnvironmentCalls, Question
from seer_session.long_texts import LONG_TEXT
from structlog.testing import capture_logs

from seer_core.errors import PromptError
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ModelInfo
from tests.support.eventually import PATIENCE_S, aeventually
from tests.support.virtual_time import run_in_virtual_time

DONE = EnvironmentAnswer(done=True)


class Letters:
    """A tokenizer of one token for each letter, which can append messages."""

    def encode(self, text):
        return [ord(letter) for letter in text]

    encode_part = encode

    def encode_chat(self, messages, template_kwargs=None):
        return self.encode("".join(message["content"] for message in messages))

    def encode_reply(self, messages, written, template_kwargs=None):
        if not messages:
            raise PromptError("the chat template writes no message")
        return self.encode_chat(messages)

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


class Outcomes:
    """Keeps what becomes of the turns."""

    def __init__(self):
        self.answers, self.failures, self.order = {}, {}, []
        self._happened = asyncio.Event()

    def extend(self, request_id, token_ids, reward, done, images=None):
        self.answers[request_id] = EncodedAnswer(token_ids, reward, done, images)
        self._note(request_id)

    def extension_failed(self, request_id, reason):
        self.failures[request_id] = reason
        self._note(request_id)

    def _note(self, request_id):
        self.order.append(request_id)
        self._happened.set()

    async def until(self, count):
        while len(self.order) < count:
            self._happened.clear()
            await self._happened.wait()


class Scripted:
    """An environment that does what a function says, and keeps what it was called with."""

    def __init__(self, act):
        self.act, self.calls = act, []

    async def reset(self, trajectory, earlier):
        self.calls.append(("reset", trajectory.request_id, len(earlier)))

    async def step(self, trajectory, turn):
        self.calls.append(("step", trajectory.request_id, turn.number))
        answer = self.act(turn)
        return await answer if asyncio.iscoroutine(answer) else answer

    async def close(self, trajectory):
        self.calls.append(("close", trajectory.request_id))


def question(request_id="g/0", number=0, earlier=(), left=10):
    trajectory = Trajectory(request_id, "g", 0, 7, (1, 2, 3), {}, {})
    return Question(trajectory, ModelTurn(number, [5, 6], "ab", "=", left), lambda: earlier)


def play(environment, story, *, tokenizer=None, run=asyncio.run, **settings):
    """Run a story with the calls of an environment, and return what became of the turns."""

    async def played():
        outcomes = Outcomes()
        calls = EnvironmentCalls(
            environment, TurnsTable(**settings), RealClock(), ModelInfo(200, 1000), tokenizer, outcomes
        )
        await asyncio.wait_for(story(calls, outcomes), PATIENCE_S)
        calls.stop()
        await calls.closed()
        return outcomes

    return run(played())


def answered(act, **more):
    """Return the only answer, or the reason why there is none."""

    async def story(calls, outcomes):
        calls.ask(question())
        await outcomes.until(1)

    outcomes = play(Scripted(act), story, **more)
    return outcomes.answers.get("g/0") or outcomes.failures["g/0"]


def test_tokens_text_and_messages_are_answers():
    assert answered(lambda turn: EnvironmentAnswer(token_ids=[7, 8], reward=1)).token_ids == [7, 8]
    assert answered(lambda turn: EnvironmentAnswer(text="ab"), tokenizer=Letters()).token_ids == [97, 98]
    chat = EnvironmentAnswer(messages=[{"role": "tool", "content": "cd"}])
    assert answered(lambda turn: chat, tokenizer=Letters()).token_ids == [99, 100]
    found = answered(lambda turn: EnvironmentAnswer(done=True, reward=2))
    assert (found.token_ids, found.reward, found.done) == ([], 2.0, True)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "answered None, which is no EnvironmentAnswer"),
        (EnvironmentAnswer(), "answered no token, and the response is not done"),
        (EnvironmentAnswer(token_ids=[]), "answered no token, and the response is not done"),
        (EnvironmentAnswer(token_ids=[200]), "answered token 200; the vocabulary is 0 to 199"),
        (EnvironmentAnswer(token_ids=[-1]), "answered token -1"),
        (EnvironmentAnswer(token_ids=["a"]), "answered token 'a'"),
        (EnvironmentAnswer(token_ids=[True]), "answered token True"),
        (EnvironmentAnswer(token_ids=7), "'int' object is not iterable"),
        (EnvironmentAnswer(text="a", token_ids=[7]), "answered token_ids and text; give one of them"),
        (EnvironmentAnswer(text="a"), "answered text, and this engine has no tokenizer"),
        (EnvironmentAnswer(done=True, reward=math.nan), "gave the reward nan; a reward is a finite number"),
        (EnvironmentAnswer(done=True, reward="1"), "gave the reward '1'"),
    ],
)
def test_an_answer_that_is_none_fails_the_response(answer, reason):
    assert reason in answered(lambda turn: answer)


def test_messages_that_cannot_be_appended_fail_the_response():
    chat = EnvironmentAnswer(messages=[])
    assert "the chat template writes no message" in answered(lambda turn: chat, tokenizer=Letters())
    chat = EnvironmentAnswer(messages=[{"role": "tool"}])
    reason = answered(lambda turn: chat, tokenizer=Letters())
    assert "the chat template refused its environment's messages: 'content'" in reason


def test_an_environment_that_raises_is_named_with_its_line():
    def act(turn):
        raise ValueError("no\nnetwork")

    reason = answered(act)
    assert "its environment raised ValueError: no network at " in reason
    assert "test_environments.py" in reason


def test_an_environment_that_ends_the_process_fails_one_response():
    def act(turn):
        raise SystemExit(3)

    assert "its environment raised SystemExit: 3" in answered(act)


def test_an_environment_that_hangs_is_given_up_after_its_limit():
    async def hang(turn):
        await asyncio.Event().wait()

    assert "took more than 0.05 s for a turn" in answered(hang, timeout_s=0.05, run=run_in_virtual_time)


def test_a_plain_method_runs_in_a_thread_and_may_hang_there():
    class Plain:
        def __init__(self):
            self.threads, self.over = [], threading.Event()

        def step(self, trajectory, turn):
            self.threads.append(threading.current_thread().name)
            if turn.number:
                self.over.wait()
            return DONE

    plain = Plain()

    async def story(calls, outcomes):
        calls.ask(question("g/0", 0))
        await aeventually(lambda: outcomes.order)
        calls.ask(question("g/1", 1))
        await aeventually(lambda: len(plain.threads) == 2)
        await outcomes.until(2)
        plain.over.set()

    outcomes = play(plain, story, timeout_s=0.2, run=run_in_virtual_time)
    assert plain.threads == ["seer-environment"] * 2
    assert outcomes.answers.keys() == {"g/0"}
    assert "took more than 0.2 s" in outcomes.failures["g/1"]


def test_plain_methods_that_never_return_leave_a_bounded_number_of_threads():
    class Stuck:
        def __init__(self):
            self.begun, self.free = [], threading.Event()

        def step(self, trajectory, turn):
            self.begun.append(trajectory.request_id)
            self.free.wait()
            return DONE

    stuck = Stuck()

    async def story(calls, outcomes):
        for number in range(20):
            calls.ask(question(f"g/{number}"))
        await aeventually(lambda: len(stuck.begun) == 3)
        await outcomes.until(3)
        await aeventually(lambda: len(stuck.begun) == 6)
        await outcomes.until(20)
        stuck.free.set()
        await aeventually(lambda: not calls._threads)
        calls.ask(question("g/later"))
        await aeventually(lambda: len(outcomes.order) == 21)

    outcomes = play(stuck, story, timeout_s=0.1, at_once=3, run=run_in_virtual_time)
    late = [each for each in outcomes.failures.values() if "took more than 0.1 s" in each]
    refused = [each for each in outcomes.failures.values() if "6 calls of its environment have not" in each]
    assert (len(late), len(refused), len(stuck.begun)) == (6, 14, 7)
    assert outcomes.answers.keys() == {"g/later"}


def test_a_trajectory_is_begun_before_its_first_turn_and_closed_when_it_is_over():
    scripted = Scripted(lambda turn: EnvironmentAnswer(token_ids=[7]))

    async def story(calls, outcomes):
        calls.ask(question(number=3, earlier=("x", "y", "z")))
        await outcomes.until(1)
        calls.ask(question(number=4, earlier=("x",)))
        await outcomes.until(2)
        calls.over("g/0")
        await calls.closed()

    play(scripted, story)
    assert scripted.calls == [
        ("reset", "g/0", 3),
        ("step", "g/0", 3),
        ("step", "g/0", 4),
        ("close", "g/0"),
    ]


def test_no_more_turns_are_worked_on_at_once_than_the_limit():
    begun, free = [], asyncio.Event()

    async def act(turn):
        begun.append(turn.number)
        await free.wait()
        return DONE

    async def story(calls, outcomes):
        for number in range(5):
            calls.ask(question(f"g/{number}", number))
        while len(begun) < 2:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert begun == [0, 1]
        free.set()
        await outcomes.until(5)

    assert play(Scripted(act), story, at_once=2).order == [f"g/{number}" for number in range(5)]


def test_a_response_that_is_over_is_not_answered_any_more_and_others_take_its_place():
    free = asyncio.Event()

    async def act(turn):
        if turn.number == 0:
            await free.wait()
        return DONE

    async def story(calls, outcomes):
        for number in range(3):
            calls.ask(question(f"g/{number}", number))
        calls.over("g/1")  # waits
        await asyncio.sleep(0)
        calls.over("g/0")  # is worked on
        free.set()
        await outcomes.until(1)

    assert play(Scripted(act), story, at_once=1).order == ["g/2"]


def test_an_answer_with_a_delay_counts_once_that_is_over():
    async def story(calls, outcomes):
        calls.ask(question("g/0", 0))
        calls.ask(question("g/1", 1))
        await outcomes.until(2)

    delays = (0.05, 0.0)
    scripted = Scripted(lambda turn: EnvironmentAnswer(done=True, delay_s=delays[turn.number]))
    assert play(scripted, story, run=run_in_virtual_time).order == ["g/1", "g/0"]


def test_a_delay_beyond_the_limit_is_too_late():
    answer = EnvironmentAnswer(done=True, delay_s=3.0)
    assert "took more than 0.05 s for a turn" in answered(
        lambda turn: answer, timeout_s=0.05, run=run_in_virtual_time
    )


def test_trajectories_that_a_stop_ends_are_closed_in_the_order_of_their_turns():
    names = [f"g{number}/0" for number in range(16)]
    environment = Scripted(lambda turn: asyncio.Event().wait())

    async def story(calls, outcomes):
        for name in names:
            calls.ask(question(name))
        while len(environment.calls) < 2 * len(names):
            await asyncio.sleep(0)

    play(environment, story)
    assert [name for what, name, *_ in environment.calls if what == "close"] == names


def test_a_close_that_raises_is_logged_and_no_more():
    class Fragile(Scripted):
        async def close(self, trajectory):
            raise ValueError("stuck")

    async def story(calls, outcomes):
        calls.ask(question())
        await outcomes.until(1)
        calls.over("g/0")
        await calls.closed()

    with capture_logs() as logs:
        outcomes = play(Fragile(lambda turn: DONE), story)
    assert outcomes.order == ["g/0"]
    [line] = logs
    assert line["event"] == "environment_close_failed"
    assert "ValueError: stuck" in line["reason"]


def test_a_coroutine_that_heeds_no_cancellation_is_not_waited_for():
    free = asyncio.Event()

    async def stubborn(turn):
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue
        return DONE

    async def story(calls, outcomes):
        calls.ask(question("g/0"))
        await outcomes.until(1)
        calls.ask(question("g/1"))
        await asyncio.sleep(0)
        calls.over("g/1")
        free.set()
        for _ in range(20):
            await asyncio.sleep(0)

    outcomes = play(Scripted(stubborn), story, timeout_s=0.05, run=run_in_virtual_time)
    assert (outcomes.answers, outcomes.failures.keys()) == ({}, {"g/0"})


def test_numbers_of_numpy_are_tokens_and_rewards():
    numpy = pytest.importorskip("numpy")
    answer = EnvironmentAnswer(token_ids=numpy.array([7, 8]), reward=numpy.float32(0.5))
    found = answered(lambda turn: answer)
    assert (found.token_ids, found.reward) == ([7, 8], 0.5)
    assert type(found.token_ids[0]) is int


class Watched(Letters):
    """Keeps the thread and the length of each text that it encodes, and may hold long ones up."""

    def __init__(self):
        self.threads, self.lengths, self.free = [], [], threading.Event()
        self.free.set()

    def encode(self, text):
        self.threads.append(threading.current_thread().name)
        self.lengths.append(len(text))
        if len(text) > 1000:
            assert self.free.wait(PATIENCE_S)
        return super().encode(text)

    encode_part = encode


def big(turn, letter="a"):
    return EnvironmentAnswer(text=letter * LONG_TEXT)


def test_a_long_answer_is_encoded_beside_the_event_loop_and_a_short_one_on_it():
    tokenizer = Watched()
    assert answered(lambda turn: EnvironmentAnswer(text="ab"), tokenizer=tokenizer).token_ids == [97, 98]
    assert set(tokenizer.threads) == {threading.current_thread().name}
    tokenizer.threads.clear()
    assert answered(big, tokenizer=tokenizer).token_ids == [97] * 11
    assert set(tokenizer.threads) == {"seer-encoding"}


def test_other_answers_come_while_a_long_one_is_encoded():
    tokenizer = Watched()
    tokenizer.free.clear()

    def act(turn):
        return DONE if turn.number else EnvironmentAnswer(text="a" * LONG_TEXT)

    async def story(calls, outcomes):
        calls.ask(question("g/0", 0, left=LONG_TEXT))
        await aeventually(lambda: tokenizer.threads)
        calls.ask(question("g/1", 1))
        await outcomes.until(1)
        tokenizer.free.set()
        await outcomes.until(2)

    assert play(Scripted(act), story, tokenizer=tokenizer).order == ["g/1", "g/0"]


def test_long_answers_are_encoded_one_at_a_time():
    tokenizer = Watched()
    tokenizer.free.clear()

    async def story(calls, outcomes):
        for number in range(3):
            calls.ask(question(f"g/{number}", left=LONG_TEXT))
        await aeventually(lambda: tokenizer.threads)
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(tokenizer.threads) == 1
        tokenizer.free.set()
        await outcomes.until(3)

    outcomes = play(Scripted(big), story, tokenizer=tokenizer)
    assert [len(each.token_ids) for each in outcomes.answers.values()] == [LONG_TEXT] * 3


@pytest.mark.parametrize(
    "answer",
    [
        EnvironmentAnswer(text="abc" * 10**6),
        EnvironmentAnswer(messages=[{"role": "tool", "content": "abc" * 10**6}]),
        EnvironmentAnswer(
            messages=[
                {"role": "tool", "content": "abc"},
                {"role": "tool", "content": None},
                {"role": "tool", "content": "abc" * 10**6},
                {"role": "user", "content": "abc" * 10**6},
            ]
        ),
    ],
    ids=["text", "message", "messages"],
)
def test_no_more_of_an_answer_is_encoded_than_there_is_room_for(answer):
    class Chats(Watched):
        def encode_chat(self, messages, template_kwargs=None):
            return self.encode("".join(message["content"] or "" for message in messages))

    tokenizer = Chats()
    assert answered(lambda turn: answer, tokenizer=tokenizer).token_ids == list(b"abcabcabcab")
    assert max(tokenizer.lengths) <= 8 * 10 * 4


def test_tokens_without_an_end_are_read_as_far_as_there_is_room_for_them():
    assert answered(lambda turn: EnvironmentAnswer(token_ids=itertools.repeat(7))).token_ids == [7] * 11
