"""Virtual time: jumps, ties, cancelling, and living together with asyncio."""

import asyncio

from seer_sim.clock import VirtualClock

from seer_core.ports.engine import Clock


def test_the_clock_satisfies_the_port():
    assert isinstance(VirtualClock(), Clock)


def test_callbacks_run_in_order_of_time_then_of_asking():
    clock, seen = VirtualClock(), []
    for name, when_s in [("c", 2.0), ("a", 1.0), ("b", 1.0)]:
        clock.call_at(when_s, lambda name=name: seen.append((name, clock.now())))
    while clock.step():
        pass
    assert seen == [("a", 1.0), ("b", 1.0), ("c", 2.0)]


def test_last_callbacks_run_after_all_others_of_their_instant():
    clock, seen = VirtualClock(), []
    clock.call_at(1.0, lambda: seen.append("last"), last=True)
    clock.call_at(1.0, lambda: clock.call_at(1.0, lambda: seen.append("added")))
    while clock.step():
        pass
    assert seen == ["added", "last"]


def test_a_cancelled_callback_never_runs():
    clock, seen = VirtualClock(), []
    cancel = clock.call_at(1.0, lambda: seen.append(1))
    cancel()
    cancel()
    assert not clock.step()
    assert not seen
    assert clock.now() == 0.0


def test_what_is_past_runs_at_once_and_time_never_goes_back():
    clock, seen = VirtualClock(), []
    clock.call_at(5.0, lambda: clock.call_at(1.0, lambda: seen.append(clock.now())))
    while clock.step():
        pass
    assert seen == [5.0]


def test_advance_says_when_nothing_can_happen_any_more():
    async def run():
        clock, changed = VirtualClock(), asyncio.Event()
        clock.call_at(1.0, lambda: None)
        clock.call_at(2.0, changed.set)
        clock.call_at(3.0, lambda: None)
        answers = [(await clock.advance(changed), clock.now())]
        changed.clear()
        answers.append((await clock.advance(changed), clock.now()))
        return answers

    assert asyncio.run(run()) == [(True, 2.0), (False, 3.0)]


def test_advance_notices_what_a_task_changes_without_the_clock():
    async def run():
        clock, changed = VirtualClock(), asyncio.Event()
        asyncio.get_running_loop().call_soon(changed.set)
        return await clock.advance(changed)

    assert asyncio.run(run())


def test_a_long_run_leaves_turns_to_other_tasks():
    async def run():
        clock, others = VirtualClock(), 0
        for i in range(3000):
            clock.call_at(float(i), lambda: None)

        async def other():
            nonlocal others
            while True:
                others += 1
                await asyncio.sleep(0)

        task = asyncio.ensure_future(other())
        for _ in range(3000):
            await clock.advance(asyncio.Event())
        task.cancel()
        return others

    assert asyncio.run(run()) >= 10


def test_a_task_that_sleeps_acts_at_its_time_before_later_callbacks():
    async def run():
        clock, seen = VirtualClock(), []

        async def sleeper():
            await clock.sleep_until(2.0)
            clock.call_at(2.5, lambda: seen.append(("woken", clock.now())))

        clock.call_at(3.0, lambda: seen.append(("later", clock.now())))
        task = asyncio.ensure_future(sleeper())
        await asyncio.sleep(0)
        while await clock.advance(asyncio.Event()):
            pass
        await task
        return seen

    assert asyncio.run(run()) == [("woken", 2.5), ("later", 3.0)]


def test_sleeping_moves_the_clock_when_no_other_task_does():
    async def run():
        clock = VirtualClock()
        await asyncio.gather(clock.sleep_until(4.0), clock.sleep_until(2.0))
        return clock.now()

    assert asyncio.run(run()) == 4.0


def test_no_time_passes_while_the_clock_is_held():
    async def story():
        clock, seen = VirtualClock(), []
        changed = asyncio.Event()
        clock.call_at(1.0, lambda: (seen.append(clock.now()), changed.set()))
        release = clock.hold()
        also = clock.hold()
        advancing = asyncio.ensure_future(clock.advance(changed))
        for _ in range(50):
            await asyncio.sleep(0)
        assert (seen, clock.now()) == ([], 0.0)
        release()
        release()  # does nothing more
        for _ in range(50):
            await asyncio.sleep(0)
        assert seen == []
        also()
        assert await advancing
        return seen

    assert asyncio.run(story()) == [1.0]


def test_a_change_is_seen_while_the_clock_is_held():
    async def story():
        clock, changed = VirtualClock(), asyncio.Event()
        clock.hold()
        advancing = asyncio.ensure_future(clock.advance(changed))
        await asyncio.sleep(0)
        changed.set()
        return await advancing

    assert asyncio.run(story())
