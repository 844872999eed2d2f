"""Code of users that raises any class of error, or answers anything: each call ends at once, and says why."""

import asyncio
import math
import signal
import threading
import types

import pytest
from msgspec import structs
from seer_host.tables import TurnsTable
from seer_host.threads import in_thread
from seer_session.environment import EnvironmentAnswer, ModelTurn, Trajectory
from seer_session.environment_calls import EncodedAnswer, EnvironmentCalls, Question
from seer_session.guard import guarded_policies
from structlog.testing import capture_logs

from seer_core.error_origin import describe_error, is_ctrl_c, is_interruption, one_line, place_of, shown
from seer_core.errors import PluginError, SeerError
from seer_core.model import InstanceInfo
from seer_core.model.events import GroupSpec, GroupsSubmitted, InstanceStarted, RequestsAborted
from seer_core.ports.clock import RealClock
from seer_core.ports.engine import ModelInfo
from seer_core.ports.policy import Placement
from seer_core.runtime.observers import ObserverHub
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot
from tests.support.eventually import PATIENCE_S, aeventually
from tests.support.raising import ERRORS, PLAIN, STRANGE, class_of, raise_one
from tests.support.virtual_time import run_in_virtual_time

LONGEST_REASON = 2000
DONE = EnvironmentAnswer(done=True, reward=1.0)


def check(reason, name):
    """A reason is one line that any terminal and file takes, and has the error's class."""
    assert class_of(name) in reason, (name, reason)
    assert reason.isprintable(), name
    assert reason.strip(), name
    assert len(reason) <= LONGEST_REASON, name
    reason.encode()


# The text of errors and values


@pytest.mark.parametrize("name", ERRORS)
def test_any_error_has_a_line_of_text_with_its_class(name):
    try:
        raise_one(name)
    except BaseException as error:
        described = describe_error(error, __name__)
    assert class_of(name) in described
    check(described, name)


def test_the_first_error_of_a_group_is_described_with_its_place():
    try:
        try:
            raise ValueError("no network")
        except ValueError as error:
            raise ExceptionGroup("unhandled errors in a TaskGroup", [error]) from None
    except ExceptionGroup as error:
        described, place = describe_error(error, __name__), place_of(error.exceptions[0], __name__)
    group = "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)"
    assert described == f"{group}, the first: ValueError: no network at {place}"
    assert "test_user_code.py:" in place


def test_the_end_of_an_iteration_that_python_has_wrapped_keeps_its_class():
    async def ended():
        raise StopIteration("no more pages")

    def pages():
        yield 1
        raise StopIteration

    with pytest.raises(RuntimeError) as caught:
        asyncio.run(ended())
    assert describe_error(caught.value, __name__).startswith("StopIteration: no more pages at ")
    with pytest.raises(RuntimeError) as caught:
        list(pages())
    assert describe_error(caught.value, __name__).startswith("StopIteration at ")
    own = RuntimeError("the server has ended")
    own.__cause__ = StopIteration()
    assert describe_error(own, __name__) == "RuntimeError: the server has ended"


class Odd:
    def __repr__(self):
        raise KeyboardInterrupt

    __str__ = __repr__


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Odd(), "a value of type Odd whose text cannot be read, which raised KeyboardInterrupt"),
        ([Odd()], "a value of type list whose text cannot be read"),
        ([0] * 10**6, "a list of 1,000,000 items"),
        ("x" * 10**7, "(10,000,000 characters)"),
        (b"\xff" * 10**7, "(10,000,000 bytes)"),
        ("\ud800", r"'\ud800'"),
        ("\0", r"'\x00'"),
        (10**5000, "too large to show"),
        (math.nan, "nan"),
    ],
    ids=range(9),
)
def test_any_value_can_be_shown(value, text):
    assert text in shown(value)
    assert shown(value).isprintable()
    assert len(shown(value)) < 500


def test_any_text_is_one_line():
    assert one_line("a\n b\t\ud800") == r"a b \ud800"
    assert one_line("x" * 5000) == "x" * 1000 + "... (5,000 characters)"
    assert one_line("\0" * 5000).endswith("... (5,000 characters)")
    assert "KeyboardInterrupt" in one_line(Odd())


def test_the_place_of_code_with_an_odd_name_is_printable():
    with pytest.raises(ValueError, match="no luck") as caught:
        exec(compile("raise ValueError('no luck')", "a\nb\x1b[2J", "exec"))
    assert place_of(caught.value, __name__) == r"a\nb\x1b[2J:1"


# Ctrl-C and cancellation


def test_an_interrupt_is_ctrl_c_only_in_the_main_thread_and_where_no_loop_takes_that():
    async def asked(error):
        return is_ctrl_c(error), is_interruption(error)

    def by_hand(error):
        loop = asyncio.new_event_loop()
        try:
            return loop.run_until_complete(asked(error))
        finally:
            loop.close()

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    error = KeyboardInterrupt()
    assert is_ctrl_c(error)
    assert asyncio.run(asked(error)) == (False, False)
    assert by_hand(error) == (True, True)
    assert not any(is_ctrl_c(PLAIN[name]()) for name in PLAIN if name != "KeyboardInterrupt")
    found = []
    thread = threading.Thread(target=lambda: found.append(is_ctrl_c(error)))
    thread.start()
    thread.join(PATIENCE_S)
    assert found == [False]


def test_the_cancellation_of_a_task_is_no_failure_of_what_it_waits_for():
    class Waiting:
        async def start(self):
            begun.set()
            await asyncio.Event().wait()

    async def story():
        slot = Slot("observer", "mine", Waiting())

        async def start():
            with slot.named():
                await slot.strategy.start()

        task = asyncio.ensure_future(start())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(PluginError, match="raised CancelledError: mine at "), slot.named():
            raise asyncio.CancelledError("mine")

    begun = asyncio.Event()
    asyncio.run(story())
    assert not is_interruption(asyncio.CancelledError())


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_raised_in_a_thread_is_raised_where_it_is_waited_for(name):
    async def story():
        try:
            await in_thread(None, raise_one, name)
        except BaseException as error:
            return describe_error(error, __name__)

    check(asyncio.run(story()), name)


# Environments


class Outcomes:
    """Keeps what becomes of the turns, and when."""

    def __init__(self):
        self.answers, self.failures = {}, {}
        self.at_s = {}
        self.settled = asyncio.Event()

    def extend(self, request_id, token_ids, reward, done, images=None):
        self.answers[request_id] = EncodedAnswer(token_ids, reward, done)
        self._settled(request_id)

    def extension_failed(self, request_id, reason):
        self.failures[request_id] = reason
        self._settled(request_id)

    def _settled(self, request_id):
        self.at_s[request_id] = asyncio.get_running_loop().time()
        self.settled.set()


class AsyncStep:
    def __init__(self, act):
        self.act = act

    async def step(self, trajectory, turn):
        await asyncio.sleep(0)
        return self.act(trajectory)


class PlainStep(AsyncStep):
    def step(self, trajectory, turn):
        return self.act(trajectory)


class AwaitableStep(AsyncStep):
    def step(self, trajectory, turn):
        return super().step(trajectory, turn)


class GeneratorStep(AsyncStep):
    @types.coroutine
    def step(self, trajectory, turn):
        yield
        return self.act(trajectory)


class TaskStep(AsyncStep):
    async def step(self, trajectory, turn):
        return await asyncio.ensure_future(super().step(trajectory, turn))


class GroupStep(AsyncStep):
    async def step(self, trajectory, turn):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(super().step(trajectory, turn))
        return task.result()


class AsyncReset(AsyncStep):
    async def reset(self, trajectory, earlier):
        self.act(trajectory)

    async def step(self, trajectory, turn):
        return DONE


class PlainReset(AsyncReset):
    def reset(self, trajectory, earlier):
        self.act(trajectory)


class TokensStep(AsyncStep):
    """It raises while its tokens are read."""

    async def step(self, trajectory, turn):
        return EnvironmentAnswer(token_ids=self._tokens(trajectory))

    def _tokens(self, trajectory):
        yield 7
        self.act(trajectory)


class ThreadedStep(AsyncStep):
    async def step(self, trajectory, turn):
        return await asyncio.to_thread(self.act, trajectory)


KINDS = [AsyncStep, PlainStep, AwaitableStep, GeneratorStep, AsyncReset, PlainReset, TokensStep]
OF_LIBRARIES = [TaskStep, GroupStep, ThreadedStep]


def calls_of(environment, outcomes, tokenizer=None, timeout_s=60.0, at_once=200):
    settings = TurnsTable(timeout_s=timeout_s, at_once=at_once)
    return EnvironmentCalls(environment, settings, RealClock(), ModelInfo(200, 1000), tokenizer, outcomes)


def question(name):
    trajectory = Trajectory(name, "g", 0, 7, (1, 2, 3), {}, {})
    return Question(trajectory, ModelTurn(0, [5, 6], "ab", "=", 10), tuple)


def asked(environment, names, tokenizer=None, run=run_in_virtual_time):
    """Ask about one turn for each name at once, and return what becomes of them."""

    async def story():
        outcomes = Outcomes()
        calls = calls_of(environment, outcomes, tokenizer)
        for name in names:
            calls.ask(question(name))
        await aeventually(lambda: len(outcomes.at_s) == len(names))
        calls.stop()
        await calls.closed()
        return outcomes

    return run(story())


def act(trajectory):
    """Raise what the name of the response says, or answer."""
    if trajectory.request_id in ERRORS:
        raise_one(trajectory.request_id)
    return DONE


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_environment_raises_is_the_reason_at_once_and_of_that_response_alone(kind):
    names = [*STRANGE, "first", *PLAIN, "last"]
    outcomes = asked(kind(act), names)
    assert outcomes.answers.keys() == {"first", "last"}
    assert set(outcomes.at_s.values()) == {0.0}
    for name in ERRORS:
        check(outcomes.failures[name], name)
        assert "took more than" not in outcomes.failures[name]


OF_TASKS = ["KeyboardInterrupt", "SystemExit", "GeneratorExit", "StopAsyncIteration", "ExceptionGroup"]
"""Builtin classes that tasks might take for another thing."""
NOT_FOR_TASKS = ("attributes raise", "class raises", "an end of its own")
"""Classes on which Python's own task groups and executors fail."""


@pytest.mark.parametrize("name", [*OF_TASKS, *(name for name in STRANGE if name not in NOT_FOR_TASKS)])
@pytest.mark.parametrize("kind", OF_LIBRARIES)
def test_what_an_environment_s_own_tasks_raise_is_the_reason_at_once(kind, name):
    outcomes = asked(kind(act), [name, "good"], run=asyncio.run)
    assert outcomes.answers.keys() == {"good"}
    if kind is not GroupStep or name != "CancelledError":  # a task group takes that for an end in order
        check(outcomes.failures[name], name)


class CancelsItself(AsyncStep):
    async def step(self, trajectory, turn):
        asyncio.current_task().cancel()
        if trajectory.request_id == "waits":
            await asyncio.sleep(0)
        return DONE


def test_an_environment_that_cancels_its_own_task_fails_its_response_at_once():
    outcomes = asked(CancelsItself(None), ["waits", "returns"])
    assert set(outcomes.at_s.values()) == {0.0}
    assert "its environment raised CancelledError at " in outcomes.failures["waits"]
    assert outcomes.failures["returns"] == "its environment cancelled the task in which it was called"


def test_a_close_may_raise_anything():
    class Closing(AsyncStep):
        async def close(self, trajectory):
            raise_one(trajectory.request_id)

    class PlainClosing(AsyncStep):
        def close(self, trajectory):
            raise_one(trajectory.request_id)

    for kind in Closing, PlainClosing:
        with capture_logs() as logs:
            outcomes = asked(kind(lambda trajectory: DONE), list(ERRORS))
        assert outcomes.answers.keys() == ERRORS.keys()
        found = {line["request"]: line["reason"] for line in logs}
        assert found.keys() == ERRORS.keys()
        for name, reason in found.items():
            check(reason, name)


class Hangs(Exception):
    """Its text comes once an event is set."""

    def __init__(self, over):
        self.over = over

    def __str__(self):
        self.over.wait(PATIENCE_S)
        return "late"


def hanging(over):
    """Return what raises such an error for the response of that name, and answers others."""

    def act(trajectory):
        if trajectory.request_id == "hangs":
            raise Hangs(over)
        return DONE

    return act


@pytest.mark.parametrize("kind", KINDS)
def test_a_hanging_text_of_an_error_costs_its_own_response_time_alone(kind):
    over = threading.Event()

    async def story():
        outcomes = Outcomes()
        calls = calls_of(kind(hanging(over)), outcomes)
        calls.ask(question("hangs"))
        calls.ask(question("other"))
        await aeventually(lambda: outcomes.answers)
        over.set()
        await aeventually(lambda: outcomes.failures)
        return outcomes

    outcomes = run_in_virtual_time(story())
    assert outcomes.answers.keys() == {"other"}
    assert "Hangs: late" in outcomes.failures["hangs"]


def test_a_text_that_never_comes_ends_its_response_and_its_close_by_their_limit():
    class Closing(AsyncStep):
        async def close(self, trajectory):
            self.act(trajectory)

    over = threading.Event()

    async def story():
        outcomes = Outcomes()
        calls = calls_of(Closing(hanging(over)), outcomes, timeout_s=0.2)
        calls.ask(question("hangs"))
        await aeventually(lambda: outcomes.failures)
        calls.stop()
        await calls.closed()
        return outcomes

    with capture_logs() as logs:
        outcomes = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    over.set()
    assert "took more than 0.2 s for a turn" in outcomes.failures["hangs"]
    assert "took more than 0.2 s for a turn" in logs[-1]["reason"]


class Lost(Exception):
    """An error of a library, whose text is code of its own."""

    def __str__(self):
        return "no network"


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: EnvironmentAnswer(token_ids=()), "its environment answered no token"),
        (lambda: raise_error(ValueError("no network")), "ValueError: no network"),
        (lambda: raise_error(Lost()), "its environment raised Lost, and its text is not read: 2 calls of"),
    ],
    ids=["Seer's own", "Python's own", "another"],
)
def test_methods_that_hang_take_no_reason_from_another_response(act, words):
    class HangingReset(AsyncStep):
        def reset(self, trajectory, turns):
            if trajectory.request_id.startswith("hangs"):
                over.wait(PATIENCE_S)

    over, answers = threading.Event(), [lambda: EnvironmentAnswer(token_ids=(5,)), act]

    async def story():
        outcomes = Outcomes()
        calls = calls_of(HangingReset(lambda _: answers.pop(0)()), outcomes, at_once=1)
        patient = calls._settings
        calls.ask(question("other"))
        await aeventually(lambda: len(outcomes.at_s) == 1)
        calls._settings = structs.replace(patient, timeout_s=0.2)  # for those alone that never return
        for name in ("hangs", "hangs too"):
            calls.ask(question(name))
        await aeventually(lambda: len(outcomes.at_s) == 3)
        calls._settings = patient
        calls.ask(question("other"))
        await aeventually(lambda: "other" in outcomes.failures)
        over.set()
        calls.stop()
        return outcomes

    assert words in asyncio.run(asyncio.wait_for(story(), PATIENCE_S)).failures["other"]


def raise_error(error):
    raise error


class Refusing:
    """A tokenizer that raises as those of Hugging Face do."""

    def encode(self, text):
        return list(text.encode())

    encode_part = encode

    def encode_chat(self, messages, template_kwargs=None):
        return self.encode("".join(message["content"] for message in messages))

    def encode_reply(self, messages, written, template_kwargs=None):
        return self.encode_chat(messages)

    def decode(self, token_ids):
        return bytes(token_ids).decode()


class OddNumber(float):
    def __float__(self):
        raise SystemExit(3)


def numbers():
    yield 7


def chat(*contents):
    return EnvironmentAnswer(messages=[{"role": "tool", "content": content} for content in contents])


ANSWERS = {
    "None": (None, "answered None, which is no EnvironmentAnswer"),
    "a class": (EnvironmentAnswer, "which is no EnvironmentAnswer"),
    "a number": (math.nan, "answered nan, which is no EnvironmentAnswer"),
    "a generator": (numbers(), "which is no EnvironmentAnswer"),
    "a value without text": (Odd(), "answered a value of type Odd whose text cannot be read"),
    "megabytes": ("x" * 10**7, "(10,000,000 characters), which is no EnvironmentAnswer"),
    "many": ([0] * 10**6, "answered a list of 1,000,000 items"),
    "an error": (KeyboardInterrupt(), "answered KeyboardInterrupt(), which is no EnvironmentAnswer"),
    "a surrogate": (EnvironmentAnswer(text="\ud835"), "the tokenizer refused its environment's text: "),
    "surrogates in a chat": (chat("\ud835"), "the chat template refused its environment's messages: "),
    "bytes": (EnvironmentAnswer(text=b"ab"), "answered the text b'ab', which is no string"),
    "a text without text": (EnvironmentAnswer(text=Odd()), "answered the text a value of type Odd"),
    "a chat of numbers": (EnvironmentAnswer(messages=[7]), "refused its environment's messages: "),
    "a chat of one number": (EnvironmentAnswer(messages=7), "refused its environment's messages: "),
    "content without text": (chat(Odd()), "its environment raised KeyboardInterrupt at"),
    "tokens of floats": (EnvironmentAnswer(token_ids=[math.inf]), "answered token inf; the vocabulary is 0"),
    "a token without text": (EnvironmentAnswer(token_ids=[Odd()]), "answered token a value of type Odd"),
    "a huge token": (EnvironmentAnswer(token_ids=[10**5000]), "too large to show; the vocabulary is 0 to"),
    "no reward": (EnvironmentAnswer(done=True, reward=math.nan), "the reward nan; a reward is a finite"),
    "infinity": (EnvironmentAnswer(done=True, reward=-math.inf), "the reward -inf; a reward is a finite"),
    "a large reward": (EnvironmentAnswer(done=True, reward=1.7e308), "from -1e+300 to 1e+300"),
    "a huge reward": (EnvironmentAnswer(done=True, reward=10**400), "a reward is a finite number"),
    "an unshowable reward": (EnvironmentAnswer(done=True, reward=10**5000), "too large to show; a reward is"),
    "a complex reward": (EnvironmentAnswer(done=True, reward=1j), "gave the reward 1j"),
    "an odd reward": (EnvironmentAnswer(done=True, reward=OddNumber()), "raised SystemExit: 3"),
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("kind", [AsyncStep, PlainStep])
def test_an_answer_that_is_none_is_named(kind, name):
    answer, reason = ANSWERS[name]
    act = {name: answer, "good": DONE}.get
    environment = kind(lambda trajectory: act(trajectory.request_id))
    found = asked(environment, [name, "good"], tokenizer=Refusing())
    assert set(found.at_s.values()) == {0.0}
    assert found.answers.keys() == {"good"}
    assert reason in found.failures[name]
    assert found.failures[name].isprintable()
    assert len(found.failures[name]) < LONGEST_REASON


@pytest.mark.parametrize("delay_s", [math.inf, 10**400, 1e308], ids=range(3))
def test_a_delay_without_an_end_is_too_late(delay_s):
    async def story():
        outcomes = Outcomes()
        endless = AsyncStep(lambda trajectory: EnvironmentAnswer(done=True, delay_s=delay_s))
        calls = calls_of(endless, outcomes)
        calls.ask(question("endless"))
        await outcomes.settled.wait()
        return outcomes

    assert "took more than 60 s for a turn" in run_in_virtual_time(story()).failures["endless"]


def test_strange_answers_that_are_good_are_taken():
    class Truth:
        def __bool__(self):
            return True

    strange = {
        "numpy's like": EnvironmentAnswer(token_ids=range(3), reward=10**15),
        "NULs": EnvironmentAnswer(text="\0\0"),
        "no delay": EnvironmentAnswer(done=Truth(), delay_s=math.nan),
        "a delay of a word": EnvironmentAnswer(done=True, delay_s="soon"),
        "a delay below 0": EnvironmentAnswer(done=True, delay_s=-math.inf),
        "a delay of a fraction of nothing": EnvironmentAnswer(done=True, delay_s=5e-324),
    }
    found = asked(
        AsyncStep(lambda trajectory: strange[trajectory.request_id]), list(strange), tokenizer=Refusing()
    )
    assert found.failures == {}
    assert found.answers["numpy's like"].token_ids == [0, 1, 2]


# Strategies


class Raising:
    """A strategy that raises in one of its methods, and otherwise does as another."""

    def __init__(self, inner, method, name):
        self._inner, self._method, self._name = inner, method, name

    def __getattr__(self, name):
        if name == self._method:
            return lambda *given: raise_one(self._name)
        return getattr(self._inner, name)

    def __len__(self):
        if self._method == "__len__":
            raise_one(self._name)
        return len(self._inner)


DECISIONS = [
    *(("prioritizer", method) for method in ("push", "peek", "take", "__len__", "tick", "group_changed")),
    *(("splitter", method) for method in ("split", "instance_started")),
    *(("placer", method) for method in ("place", "has_room", "instance_changed")),
]
DEFAULTS = {"prioritizer": FirstComeFirstServed, "splitter": WholeRequests, "placer": LeastLoaded}


def decide(strategy, slot, debug=False):
    """Let a scheduler decide about one request with a strategy, and return its error."""

    async def story():
        policies = Policies(**{slot: Slot(slot, "mine", strategy)})
        scheduler = Scheduler(guarded_policies(policies) if debug else policies)
        scheduler.handle(InstanceStarted(InstanceInfo("x", 1000, 1, 8, 1000)), 0.0)
        scheduler.handle(GroupsSubmitted((GroupSpec("g", 8, 1, 4),)), 1.0)
        scheduler.handle(RequestsAborted(("g/0",)), 2.0)

    with pytest.raises(PluginError) as caught:
        asyncio.run(story())
    return str(caught.value)


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize(("slot", "method"), DECISIONS)
def test_what_a_strategy_raises_is_an_error_that_names_it(slot, method, debug):
    for name in ERRORS:
        message = decide(Raising(DEFAULTS[slot](), method, name), slot, debug)
        assert message.startswith(f"plug-in 'mine', slot '{slot}'")
        check(message, name)


class Answering(Raising):
    """A strategy of which one method answers something else."""

    def __getattr__(self, name):
        if name == self._method:
            return lambda *given: self._name
        return getattr(self._inner, name)


VALUES = [
    Odd(),
    math.nan,
    math.inf,
    -1,
    0,
    10**5000,
    "\ud800",
    "x" * 10**6,
    [0] * 10**6,
    numbers(),
    True,
    Odd,
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize(
    ("slot", "method"), [("prioritizer", "peek"), ("splitter", "split"), ("placer", "place")]
)
def test_what_a_strategy_answers_wrongly_is_shown(slot, method, value):
    message = decide(Answering(DEFAULTS[slot](), method, value), slot)
    assert message.startswith(f"plug-in 'mine', slot '{slot}'")
    assert shown(value) in message
    assert len(message) < LONGEST_REASON


@pytest.mark.parametrize("why", [Odd(), None, "\ud800", "a\nb", "\0", 7], ids=range(6))
def test_the_reason_of_a_placement_is_a_word_that_a_trace_can_hold(why):
    class Wordy(LeastLoaded):
        def place(self, request, tokens, instances):
            return Placement(instances[0], why)

    assert f"gives {shown(why)} for a reason" in decide(Wordy(), "placer")


# Observers


class Seen:
    def __init__(self):
        self.events = []

    def observe(self, now, event, commands):
        self.events.append(event)


class RaisingObserver:
    def __init__(self, name):
        self.name = name

    def observe(self, now, event, commands):
        raise_one(self.name)

    def streamed(self, now, request_id):
        raise_one(self.name)

    async def start(self):
        raise_one(self.name)

    async def stop(self):
        raise_one(self.name)


@pytest.mark.parametrize("name", ERRORS)
def test_an_observer_may_raise_anything(name):
    async def story(method, debug=False):
        seen = Seen()
        slots = [Slot("observer", "mine", RaisingObserver(name)), Slot("observer", "other", seen)]
        hub = ObserverHub(slots, debug=debug)
        if method == "start":
            await hub.start()
        for _ in range(2):
            getattr(hub, method)(1.0, *{"notify": ("event", ()), "streamed": ("g/0",)}[method])
        return hub.failed, len(seen.events)

    with capture_logs() as logs:
        assert asyncio.run(story("notify")) == (1, 2)
        assert asyncio.run(story("streamed")) == (1, 0)
    assert [line["plugin"] for line in logs] == ["mine"] * 2
    check(logs[0]["error"], name)
    for method, debug in (("notify", True), ("start", False)):
        with pytest.raises(SeerError) as caught:
            asyncio.run(story(method, debug))
        check(str(caught.value), name)


@pytest.mark.parametrize("name", ERRORS)
def test_an_observer_s_stop_may_raise_anything(name):
    class Stopping(Seen):
        async def stop(self):
            raise_one(name)

    async def story():
        hub = ObserverHub([Slot("observer", "mine", Stopping()), Slot("observer", "other", Seen())])
        await hub.start()
        await hub.stop()

    with capture_logs() as logs:
        asyncio.run(story())
    [line] = logs
    assert line["event"] == "stop_failed"
    check(line["error"], name)


# Journals


class RaisingJournal:
    def __init__(self, name):
        self.name = name

    def begin(self, groups, version, fingerprints, end_token_ids):
        return [()] * len(groups)

    def chunk(self, *facts):
        raise_one(self.name)

    def answered(self, *facts):
        pass

    def aborted(self, *facts):
        pass

    async def synced(self):
        pass


@pytest.mark.parametrize("name", ERRORS)
def test_what_a_journal_raises_ends_the_rollout_with_its_reason(by_hand, hand, some_groups, name):
    engine = hand()

    async def story():
        async with by_hand(engine) as runtime:
            rollout = runtime.rollout(some_groups(1, 2), journal=RaisingJournal(name))
            engine.finish(stopped=False)
            try:
                await rollout.wait()
            except Exception as error:
                return describe_error(error, __name__)

    check(asyncio.run(asyncio.wait_for(story(), PATIENCE_S)), name)
