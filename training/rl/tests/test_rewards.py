"""Rewards in real processes that raise, hang, print and die, and never outlive their parent."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import structlog
from seer_rl import Response, RewardError, rewards
from seer_rl.rewards import RewardPool
from training_runs import limit_only

from seer_core.errors import ConfigError
from seer_core.model import TurnRecord
from tests.support.eventually import eventually
from tests.support.processes import alive


@pytest.fixture
def pool(tmp_path):
    """Return a function that starts a pool on the body of a reward function."""
    pools = []

    def start(body, workers=1, timeout_s=30.0, top=""):
        source = f"import os, sys, time\n{top}\ndef reward(response):\n{textwrap.indent(body, '    ')}\n"
        (tmp_path / "rewards.py").write_text(source)
        pools.append(RewardPool("rewards.py:reward", tmp_path, workers, timeout_s))
        return pools[-1].__enter__()

    yield start
    for each in pools:
        each.close()


def response(**metadata):
    return Response(metadata, "text", [5, 6], "stop")


def test_a_reward_gets_the_whole_response(pool):
    facts = "response.metadata['a'], sum(response.token_ids), len(response.text), len(response.finish_reason)"
    assert pool(f"return sum([{facts}])").submit(response(a=0.25)).result() == 0.25 + 11 + 4 + 4


def test_an_environment_s_reward_is_added_to_the_function_s_which_gets_it_too(pool):
    turns = [TurnRecord(2, 1, None, 0.25), TurnRecord(3)]
    given = Response({}, "text", [5] * 6, "stop", turns, 0.25)
    body = "return 10 * response.environment_reward + len(response.turns) + response.turns[0].answer_tokens"
    assert pool(body).submit(given).result() == 2.5 + 2 + 1 + 0.25


def test_what_a_reward_prints_is_no_answer(pool):
    assert pool("print('{}'); sys.stdout.flush(); return 2").submit(response()).result() == 2.0


def test_what_a_reward_starts_reads_no_requests(pool):
    body = "subprocess.run(['cat'], check=True); return response.metadata['value']"
    started = pool(body, top="import subprocess")
    futures = [started.submit(response(value=number)) for number in range(2)]
    assert [future.result() for future in futures] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("return float('nan')", "must be a finite number"),
        ("return None", "TypeError: float"),
        ("time.sleep(60)", "longer than 0.5 s"),
        ("os.closerange(0, 256); time.sleep(60)", "longer than 0.5 s"),
        ("os._exit(7)", "died twice, with exit status 7"),
        ("os.kill(os.getpid(), 9)", "died twice, with exit status -9"),
    ],
)
def test_a_reward_that_fails_fails_its_response_and_no_other(pool, monkeypatch, body, reason):
    limit_only(monkeypatch, lambda each: each.metadata["bad"] and "sleep" in body)
    started = pool(
        f"if response.metadata['bad']:\n    {body}\nreturn response.metadata['value']", timeout_s=0.5
    )
    futures = [started.submit(response(bad=number == 1, value=number)) for number in range(4)]
    assert [futures[place].result() for place in (0, 2, 3)] == [0.0, 2.0, 3.0]
    with pytest.raises(RewardError, match=reason):
        futures[1].result()


def test_a_process_that_was_killed_from_outside_is_replaced_and_its_response_judged_again(pool, tmp_path):
    body = """
        import pathlib
        mark = pathlib.Path(__file__).with_name("struck")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)
        return 1
    """
    with structlog.testing.capture_logs() as logs:
        assert pool(textwrap.dedent(body)).submit(response()).result() == 1.0
    assert (tmp_path / "struck").exists()
    assert [(log["event"], log["status"]) for log in logs] == [("reward_process_died", -9)]


def test_a_replacement_that_does_not_come_up_costs_one_response_each_time(pool, tmp_path):
    mark = tmp_path / "mark"
    body = f"open({str(mark)!r}, 'x').close()\nif response.metadata['bad']:\n    os._exit(7)\nreturn 1"
    started = pool(body, top=f"if os.path.exists({str(mark)!r}): raise OSError('full')")
    for _ in range(2):
        with pytest.raises(RewardError, match=r"no process could be started .* OSError: full"):
            started.submit(response(bad=True)).result()
    mark.unlink()
    assert started.submit(response(bad=False)).result() == 1.0


def test_what_a_hanging_reward_has_started_ends_with_it(pool, tmp_path, monkeypatch):
    ask = rewards._Worker._answer

    def once_it_hangs(worker, limit_s):
        """Let the limit of the response begin when it has started its child."""
        if limit_s == 0.1:
            eventually((tmp_path / "child").exists)
        return ask(worker, limit_s)

    monkeypatch.setattr(rewards._Worker, "_answer", once_it_hangs)
    body = """
        import pathlib, subprocess
        child = subprocess.Popen(["sleep", "60"])
        new = pathlib.Path(__file__).with_name("new")
        new.write_text(str(child.pid))
        new.rename(new.with_name("child"))
        child.wait()
    """
    with pytest.raises(RewardError, match="longer than"):
        pool(textwrap.dedent(body), timeout_s=0.1).submit(response()).result()
    pid = int((tmp_path / "child").read_text())
    eventually(lambda: not alive(pid))


@pytest.mark.parametrize("hang", ["time.sleep(60)", "re.match('(a+)+$', 'a' * 64 + 'b')"])
def test_a_reward_and_what_it_has_started_end_with_a_trainer_that_was_killed(tmp_path, hang):
    reward = f"""
        import os, pathlib, re, subprocess, time
        def reward(response):
            child = subprocess.Popen(["sleep", "60"])
            pids = pathlib.Path(__file__).with_name("pids")
            pids.with_suffix(".new").write_text(f"{{os.getpid()}} {{child.pid}}")
            pids.with_suffix(".new").rename(pids)
            {hang}
    """
    (tmp_path / "rewards.py").write_text(textwrap.dedent(reward))
    trainer = f"""
        from pathlib import Path
        from seer_rl import Response
        from seer_rl.rewards import RewardPool
        with RewardPool("rewards.py:reward", Path({str(tmp_path)!r}), 1, 60.0) as pool:
            pool.submit(Response({{}}, "", [], "stop")).result()
    """
    killed = subprocess.Popen([sys.executable, "-c", textwrap.dedent(trainer)])
    pids = []
    try:
        eventually((tmp_path / "pids").exists)
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert all(alive(pid) for pid in pids)
        killed.kill()
        eventually(lambda: not any(alive(pid) for pid in pids))
    finally:
        killed.kill()
        killed.wait()
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


def test_several_processes_compute_at_a_time(pool):
    body = """
        here = pathlib.Path(__file__).parent
        (here / f"{os.getpid()}.at-work").touch()
        while len(list(here.glob("*.at-work"))) < response.metadata["wanted"]:
            time.sleep(0.01)
        return os.getpid()
    """
    started = pool(textwrap.dedent(body), workers=3, top="import pathlib")
    assert len({started.submit(response(wanted=1)).result() for _ in range(1)}) == 1
    futures = [started.submit(response(wanted=3)) for _ in range(6)]
    assert len({future.result() for future in futures}) == 3


def test_closing_ends_what_hangs_and_leaves_no_process(pool):
    started = pool("time.sleep(60)")
    hanging, waiting = started.submit(response()), started.submit(response())
    [worker] = started._workers
    pid = worker._process.pid
    eventually(hanging.running)
    started.close()
    assert waiting.cancelled()
    with pytest.raises(RewardError, match="was ended, with exit status -9"):
        hanging.result()
    assert not alive(pid)


@pytest.mark.parametrize(
    ("top", "reason"),
    [
        ("import no_such_module", "ModuleNotFoundError"),
        ("os._exit(3)", "exit status 3"),
        ("1 / 0", "ZeroDiv"),
    ],
)
def test_a_reward_that_cannot_be_imported_is_an_error_at_the_start(pool, top, reason):
    with pytest.raises(ConfigError, match=reason):
        pool("return 0", top=top)


@pytest.mark.parametrize("reference", ["rewards.py:other", "gone.py:reward", "reward", "os.path:sep"])
def test_a_reward_that_is_not_there_is_an_error_at_the_start(tmp_path, reference):
    (tmp_path / "rewards.py").write_text("def reward(response): return 0")
    with pytest.raises(ConfigError, match=reference), RewardPool(reference, tmp_path, 2, 1.0):
        pass


def test_metadata_that_is_no_json_fails_its_response(pool):
    with pytest.raises(RewardError, match="no JSON"):
        pool("return 1").submit(response(what=object())).result()


def test_a_reward_that_always_hangs_is_not_asked_for_ever(pool, monkeypatch):
    monkeypatch.setattr(rewards, "MOST_LATE", 3)
    limit_only(monkeypatch, lambda each: each.metadata["hang"])
    started = pool("time.sleep(60 * response.metadata['hang'])", timeout_s=0.3)
    hangs = [1, 1, 0, 1, 1, 1, 1, 0]
    reasons = [str(started.submit(response(hang=each)).exception()) for each in hangs]
    assert ["longer than 0.3 s" in reason for reason in reasons] == [bool(each) for each in hangs[:6]] + [
        True
    ] * 2
    given_up = "3 responses before it took longer than 0.3 s, one after the other"
    assert [given_up in reason for reason in reasons] == [False] * 6 + [True] * 2
