"""Recorded trajectories on paced engines: no policy changes a token, and KV outlives the tools."""

import json
from functools import cache

import pytest
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.workload_choice import choose_workload

pytestmark = pytest.mark.engine

NAMES = ("sticky", "cache-ttl", "program-pause", "migrate-in-tools", "divided", "context")
POOLED = NAMES[3:]
PACED = ("paced", "paced-sglang")
PROMPT_TOKENS = 320


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    """Return 48 trajectories of one to four turns, on two instances with KV for a quarter of them."""
    pytest.importorskip("vllm")
    lines = []
    for group in range(12):
        for index in range(4):
            count = 1 + (group + 3 * index) % 4
            tokens, tool_s = 30 + 9 * index + group, 0.1 * (1 + group % 5)
            turns = [[tokens, tool_s, 250 + 60 * turn] for turn in range(count)]
            turns[-1][1:] = None, 0
            line = {"group": f"g{group}", "index": index, "prompt_tokens": PROMPT_TOKENS, "turns": turns}
            lines.append(json.dumps(line))
    path = tmp_path_factory.mktemp("agents") / "turns.jsonl"
    path.write_text("\n".join(lines))
    return choose_workload(str(path), on="qwen2.5-14b", instances=2, pressure=4.0)


class Notes:
    """An observer that keeps the tokens of responses, and the time of every event."""

    def __init__(self):
        self.tokens, self.turns, self.times = {}, {}, []

    def observe(self, now, event, commands):
        self.times.append(now)

    def completed(self, now, completion):
        self.tokens[completion.request_id] = list(completion.token_ids)
        self.turns[completion.request_id] = [
            (turn.tokens, turn.environment_s, turn.answer_tokens) for turn in completion.turns
        ]


@pytest.fixture(scope="module")
def on(agents):
    """Return a function that returns the run of a policy on an engine, with its notes."""

    @cache
    def run(engine, name):
        notes = Notes()
        return simulate(agents, POLICIES[name], observers=[notes], engine=engine), notes

    return run


@pytest.mark.parametrize("engine", PACED)
def test_tokens_and_turns_are_the_same_under_every_policy_and_on_simulated_engines(agents, on, engine):
    expected = on("sim", "sticky")[1]
    assert len(expected.tokens) == 48
    recorded = {
        f"{group.id}/{index}": [
            (turn.model_tokens, pytest.approx(turn.tool_s or 0.0), turn.answer_tokens) for turn in turns
        ]
        for group in agents.groups(0)
        for index, turns in enumerate(group.turns)
    }
    for name in NAMES:
        run, notes = on(engine, name)
        assert run.engine == engine
        assert notes.tokens == expected.tokens
        assert notes.turns == recorded


@pytest.mark.parametrize("engine", PACED)
def test_the_pool_has_the_kv_of_nearly_every_context_when_a_turn_begins(on, engine):
    for name in POOLED:
        run, _ = on(engine, name)
        assert run.turns.kv_hits == pytest.approx(on("sim", name)[0].turns.kv_hits, abs=0.01)
        assert run.turns.kv_hits > 0.95
        assert run.summary.pool_tokens > 0


@pytest.mark.parametrize("engine", PACED)
def test_without_a_pool_an_engine_that_keeps_kv_while_tools_work_finds_it(on, engine):
    sticky, kept = on(engine, "sticky")[0], on(engine, "cache-ttl")[0]
    assert sticky.turns.kv_hits < 0.8 < kept.turns.kv_hits
    assert sticky.summary.pool_tokens == kept.summary.pool_tokens == 0


def test_the_simulator_says_nearly_the_same_as_vllm(on):
    """A request that waits for its KV loses the rest of a step here, so policies with a pool differ by more.

    SGLang lets turns in later: it leaves room for much of what the trajectory may still write.
    """
    for name in NAMES:
        (one, _), (other, _) = on("paced", name), on("sim", name)
        apart = 0.08 if name in POOLED else 0.01
        assert one.summary.total_time_s == pytest.approx(other.summary.total_time_s, rel=apart)
        assert one.turns.kv_hits == pytest.approx(other.turns.kv_hits, abs=0.01)
        assert one.turns.longest_wait_s == pytest.approx(other.turns.longest_wait_s, rel=3 * apart)


@pytest.mark.parametrize("engine", PACED)
def test_the_same_run_takes_the_same_time_again(agents, on, engine):
    run, before = on(engine, "divided")
    notes = Notes()
    again = simulate(agents, POLICIES["divided"], observers=[notes], engine=engine)
    assert notes.times == before.times
    assert again.finish_times_s == run.finish_times_s
    assert again.turns == run.turns
