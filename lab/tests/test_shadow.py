"""Steps of requests that another scheduler placed: costs, replay, and the time under Seer."""

import json

import pytest
from click.testing import CliRunner
from msgspec import structs
from seer_host.shadow_records import WatchedRequest
from seer_lab.shadow import read_watched, shadow
from seer_lab.shadow_cli import shadow_command
from seer_lab.shadow_replay import ServerLimits, StepCosts, fit_costs, replayed, replayed_s

from seer_core.errors import InputError

COSTS = StepCosts(step_s=0.02, request_s=0.001, prompt_s=0.0)


def placed(step, lengths, servers):
    """Return requests that came at once, with the ends that ``COSTS`` give each server."""
    found = []
    for server in range(servers):
        mine = sorted(lengths[server::servers])
        now, written = 0.0, 0
        for place, tokens in enumerate(mine):
            now += (tokens - written) * (COSTS.step_s + COSTS.request_s * (len(mine) - place))
            written = tokens
            group = f"g{lengths.index(tokens) // 4}"
            found.append(
                WatchedRequest(step, group, f"s{server}", 10, tokens, 1000.0 * step, 1000.0 * step + now)
            )
    return found


LENGTHS = [40, 44, 41, 43, 300, 310, 305, 320, 60, 62, 64, 61, 500, 33, 520, 34]


def test_costs_are_those_under_which_requests_took_as_long_as_they_did():
    found = fit_costs(placed(0, LENGTHS, 2), ServerLimits())
    assert found.step_s == pytest.approx(COSTS.step_s, rel=0.05)
    assert found.request_s == pytest.approx(COSTS.request_s, rel=0.2)


def test_a_replay_takes_as_long_as_the_step_did():
    requests = placed(0, LENGTHS, 2)
    measured = max(each.ended_s for each in requests)
    assert replayed_s(requests, COSTS, ServerLimits()) == pytest.approx(measured, rel=1e-6)
    assert replayed_s(requests, COSTS, ServerLimits(2)) > measured


def test_where_kv_runs_short_requests_wait_or_are_preempted_and_their_contexts_are_computed_again():
    requests = [WatchedRequest(0, f"g{number}", "s", 16, 64, 0.0, 1.0) for number in range(4)]
    costs = StepCosts(step_s=1.0)
    assert replayed_s(requests, costs, ServerLimits()) == 64
    two_at_a_time = ServerLimits(kv_tokens=2 * (16 + 64 + 8))
    assert replayed_s(requests, costs, two_at_a_time) > 64
    again = StepCosts(step_s=0.0, prompt_s=1.0)
    assert replayed_s(requests, again, ServerLimits()) == 4 * 16
    assert replayed_s(requests, again, two_at_a_time) > 4 * 16


def test_the_requests_of_a_group_share_the_kv_of_its_prompt_and_compute_it_once():
    prompt, later_turn = 1000, 1100
    group = [WatchedRequest(0, "g", "s", prompt, 64, 0.0, 1.0) for _ in range(4)]
    others = [structs.replace(each, group=f"g{number}") for number, each in enumerate(group)]
    steps, prompts = StepCosts(step_s=1.0), StepCosts(step_s=0.0, prompt_s=1.0)
    limits = ServerLimits(kv_tokens=2 * (prompt + 64 + 8))
    assert replayed_s(group, steps, limits) == 64
    assert replayed_s(others, steps, limits) == 2 * 64
    assert replayed_s(others, prompts, limits) == 4 * prompt
    assert replayed_s(group, prompts, limits) == prompt + 3  # as vLLM computes a prompt's last token for each
    longer = [structs.replace(group[0], prompt_tokens=later_turn), *group[1:]]
    assert replayed_s(longer, prompts, limits) == later_turn + 3


def test_costs_are_found_where_requests_have_waited_for_kv():
    costs, limits = StepCosts(step_s=0.02, request_s=0.001), ServerLimits(kv_tokens=400)
    lengths = [each // 2 for each in LENGTHS]
    requests = ended_by(costs, limits, [(server, 10, tokens) for tokens in lengths for server in "ab"])
    found = fit_costs(requests, limits)
    assert found.step_s == pytest.approx(costs.step_s, rel=0.15)
    last_s = max(each.ended_s for each in requests)
    assert replayed_s(requests, found, limits) == pytest.approx(last_s, rel=0.05)


def ended_by(costs, limits, placed):
    """Return requests of servers that came at once, with the ends that a replay gives them."""
    coming = [WatchedRequest(0, f"g{number}", *each, 0.0, 1.0) for number, each in enumerate(placed)]
    return [
        structs.replace(coming[number], ended_s=end_s)
        for server in replayed(coming, costs, limits)
        for number, (_, end_s) in server.ends.items()
    ]


def test_later_steps_are_predicted_by_the_costs_of_earlier_ones():
    lopsided = sorted(LENGTHS)  # the long ones of each step on one of two servers
    halves = [each for pair in zip(lopsided[:8], lopsided[8:], strict=True) for each in pair]
    steps = [placed(step, halves, 2) for step in range(2)]
    first, second = shadow(steps)
    assert first.own_costs
    assert not second.own_costs
    assert abs(second.error) < 0.05
    assert second.seer_s < second.measured_s
    least_s, most_s = second.seer_range_s
    assert least_s <= second.seer_s <= most_s


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt_tokens": -3}, "prompt_tokens: expected `int` >= 0"),
        ({"tokens": 10**12}, "tokens: expected `int` <= 1000000000"),
        ({"ended_s": 1e300}, "ended_s: expected `float` <= "),
    ],
)
def test_a_line_that_no_server_can_have_caused_is_named(tmp_path, line, words):
    good = {
        "step": 0,
        "group": "a",
        "server": "s",
        "prompt_tokens": 3,
        "tokens": 5,
        "began_s": 0,
        "ended_s": 1,
    }
    (tmp_path / "watched.jsonl").write_text(json.dumps(good) + "\n" + json.dumps(good | line) + "\n")
    with pytest.raises(InputError, match=rf"watched\.jsonl:2: not a watched request: {words}"):
        read_watched(tmp_path / "watched.jsonl")


def test_the_command_reads_what_several_processes_have_watched(tmp_path):
    steps = [placed(step, LENGTHS, 2) for step in range(2)]
    for number in range(2):
        lines = [
            json.dumps({name: getattr(each, name) for name in each.__struct_fields__})
            for each in steps[number]
        ]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    assert [len(each) for each in read_watched(tmp_path)] == [16, 16]
    out = tmp_path / "shadow.json"
    done = CliRunner().invoke(shadow_command, [str(tmp_path), "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert [each["step"] for each in json.loads(out.read_text())] == [0, 1]
    assert "under Seer" in done.output
