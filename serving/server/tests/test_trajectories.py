"""Agents' trajectories: their turns go on where their KV is, siblings help each other, and nothing stays."""

import asyncio
import json

import httpx
import pytest
from seer_server.trajectories import PREFIX, AgentTurn, Trajectories
from seer_session.runtime import Runtime

from seer_core.model import Completion, PromptGroup
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.events import GroupsSubmitted
from seer_core.ports.policy import Observer
from tests.support.eventually import eventually

PATIENCE_S = 60


class Records(Observer):
    """Keeps the specifications of groups and the completions."""

    def __init__(self):
        self.specs, self.completions = [], []

    def observe(self, now, event, commands):
        if isinstance(event, GroupsSubmitted):
            self.specs += event.groups

    def completed(self, now, completion):
        self.completions.append(completion)


@pytest.fixture
def serve_watched(serve, config):
    """Return a function that makes a server on simulated engines, and what it rolls out."""

    def make(**settings):
        records, forgotten = Records(), []

        def make_runtime(observers):
            runtime = Runtime.from_config(config, observers)
            forget = runtime.forget
            runtime.forget = lambda name: (forgotten.append(name), forget(name))
            return runtime

        return serve(make_runtime, observers=[records], **settings), records, forgotten

    return make


def post(served, body, path="/v1/completions", **headers):
    body = {"max_tokens": 24, "return_token_ids": True, **body} if path == "/v1/completions" else body
    answer = httpx.post(f"{served.url}{path}", json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def delete(served, path):
    answer = httpx.delete(f"{served.url}{path}", timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()


def kept(served):
    return served.server.config.app.state.broker.trajectories


# Turns.


def test_a_turn_begins_where_the_turn_before_has_left_its_kv(serve_watched):
    served, records, _ = serve_watched()
    with served:
        prompt = [5, 6, 7]
        for _ in range(3):
            answer = post(served, {"prompt": prompt, "trajectory": "t", "seed": 1})
            prompt = [*prompt, *answer["choices"][0]["token_ids"], 9]
        post(served, {"prompt": prompt, "trajectory": "other"})
    homes = [each.chunks[-1].instance for each in records.completions]
    assert [each.home for each in records.specs] == ["", *homes[:2], ""]
    assert homes[0] == homes[1] == homes[2]
    cached = [each.chunks[0].cached_tokens for each in records.completions]
    assert cached[0] == 0
    for before, after, tokens in zip(
        records.completions, records.completions[1:3], cached[1:3], strict=False
    ):
        assert tokens >= len(before.token_ids) // 2
        assert after.chunks[0].prefilled_tokens < before.chunks[0].prefilled_tokens + 24


@pytest.mark.parametrize("ids", [{"trajectory": "t"}, {"trajectory": "t", "group": "g"}, {"program_id": "t"}])
def test_ids_change_no_token(serve_sim, ids):
    body = {"prompt": [5, 6, 7], "seed": 3, "n": 2, "ignore_eos": True}
    with serve_sim() as served:
        plain, named = (post(served, each)["choices"] for each in (body, {**body, **ids}))
    assert [each["token_ids"] for each in plain] == [each["token_ids"] for each in named]


@pytest.mark.parametrize("length", [1, 189, 190, 200])
def test_an_id_may_have_as_many_characters_as_the_message_names(serve_watched, length):
    served, _, forgotten = serve_watched()
    with served:
        name, other = "t" * length, "t" * (length - 1) + "u"
        for each in (name, name, other):
            post(served, {"prompt": [5, 6], "max_tokens": 3, "trajectory": each})
        assert kept(served).kept == 2
        record = {"prompt_token_ids": [5], "n": 1, "max_tokens": 2, "family": "f", "trajectories": [name]}
        answer = httpx.post(f"{served.url}/v1/rollouts", json={"records": [record]}, timeout=PATIENCE_S)
        assert '"done"' in answer.text
        assert delete(served, f"/v1/trajectories/{name}") == {"ended": 1}
        assert delete(served, f"/v1/trajectories/{name}") == {"ended": 0}
        body = {"prompt": [5], "trajectory": "t" * 201}
        refused = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert (refused.status_code, "1 to 200 characters" in refused.text) == (400, True)
    assert len(set(forgotten)) == 1


def test_turns_with_the_same_ids_and_without_a_seed_are_other_draws(serve_sim):
    body = {"prompt": [5, 6, 7], "trajectory": "t", "group": "g"}
    with serve_sim() as served:
        first, second = (post(served, body)["choices"][0]["token_ids"] for _ in range(2))
    assert first != second


def test_siblings_are_known_to_the_scheduler_by_the_group_s_id(serve_watched):
    served, records, _ = serve_watched()
    with served:
        for name in "ab":
            post(served, {"prompt": [5, 6, 7], "trajectory": name, "group": "g"})
        contexts = served.server.config.app.state.broker.runtime._controller.scheduler.contexts
        families = contexts._others  # no group of it is in flight any more
        assert families["g"].finished == 2
        assert families["g"].longest_finished_tokens == max(len(e.token_ids) for e in records.completions)
    assert [each.family for each in records.specs] == ["g", "g"]
    assert len({each.id for each in records.specs}) == 2


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Seer-Trajectory": "t"},
        {"X-Dynamo-Session-ID": "t"},
        {"X-Session-ID": "t"},
        {"session-id": "t"},
        {"X-Seer-Trajectory": "t", "X-Session-ID": "another"},
    ],
    ids=lambda headers: "+".join(headers),
)
def test_a_header_names_the_trajectory(serve_sim, headers):
    with serve_sim() as served:
        post(served, {"prompt": [5, 6, 7]}, **headers)
        assert list(kept(served)._trajectories) == [f"{PREFIX}t"]
        post(served, {"prompt": [5, 6, 7], "trajectory": "by field"}, **headers)
        assert list(kept(served)._trajectories) == [f"{PREFIX}t", f"{PREFIX}by field"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 8}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "how far"}], "max_tokens": 8}),
        ("/v1/responses", {"input": "how far", "max_output_tokens": 8}),
        ("/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 8}}),
    ],
)
def test_each_route_takes_turns(serve_sim, path, body):
    with serve_sim() as served:
        post(served, {**body, "trajectory": "t", "group": "g"}, path)
        assert (kept(served).kept, kept(served).kept_groups) == (1, 1)


@pytest.mark.parametrize("name", ["trajectory", "group"])
@pytest.mark.parametrize("value", ["", "a" * 201, "a\nb", "\x1b[31m"])
def test_what_cannot_be_an_id_is_refused_by_its_name(serve_sim, name, value):
    body = {"prompt": [5], "trajectory": "t", name: value}
    with serve_sim() as served:
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert kept(served).kept == 0
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert "\x1b" not in answer.json()["error"]["message"]


def test_a_stream_of_a_turn_goes_on_only_by_its_seed(serve_sim):
    body = {
        "prompt": [5],
        "trajectory": "t",
        "group": "g",
        "stream": True,
        "stream_options": {"skip_tokens": [3]},
    }
    with serve_sim() as served:
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert "name the seed they had" in answer.json()["error"]["message"]
        answer = httpx.post(f"{served.url}/v1/completions", json={**body, "seed": 1}, timeout=PATIENCE_S)
        assert answer.text.endswith("data: [DONE]\n\n")


# Ends.


def test_a_trajectory_that_is_ended_is_forgotten_and_may_begin_again(serve_watched):
    served, _, forgotten = serve_watched()
    with served:
        post(served, {"prompt": [5, 6, 7], "trajectory": "a/b", "group": "g"})
        assert delete(served, "/v1/trajectories/a/b") == {"ended": 1}
        assert (kept(served).kept, kept(served).kept_groups) == (0, 1)
        assert delete(served, "/v1/trajectories/a/b") == {"ended": 0}
        assert forgotten == [f"{PREFIX}a/b"]
        post(served, {"prompt": [5, 6, 7], "trajectory": "a/b"})
        assert kept(served).kept == 1
        assert f"{1.0}" in httpx.get(f"{served.url}/metrics").text.split("seer_trajectories")[-1]


def test_a_group_ends_with_all_of_its_trajectories(serve_watched):
    served, _, forgotten = serve_watched()
    with served:
        for name in "abc":
            post(served, {"prompt": [5, 6, 7], "trajectory": name, "group": "g" if name != "c" else "h"})
        assert delete(served, "/v1/groups/g") == {"ended": 2}
        assert delete(served, "/v1/groups/g") == {"ended": 0}
        assert sorted(forgotten) == ["g", f"{PREFIX}a", f"{PREFIX}b"]
        assert (kept(served).kept, kept(served).kept_groups) == (1, 1)


def test_a_program_is_released_as_at_thunderagent_s(serve_watched):
    served, _, forgotten = serve_watched()
    with served:
        post(served, {"prompt": [5, 6, 7], "program_id": "p"})
        for released in (True, False):
            answer = post(served, {"program_id": "p"}, "/programs/release")
            assert answer == {"program_id": "p", "released": released}
    assert forgotten == [f"{PREFIX}p"]


def test_a_session_is_finished_as_at_skyrl_s_router(serve_watched):
    served, _, forgotten = serve_watched()
    with served:
        post(served, {"prompt": [5, 6, 7]}, **{"X-Session-ID": "s"})
        for session, ended in (("t", 0), ("s", 1), ("s", 0)):
            answer = httpx.post(f"{served.url}/finish_session", params={"session_id": session})
            assert answer.json() == {"ended": ended}
        assert httpx.post(f"{served.url}/finish_session").json() == {"ended": 0}
    assert forgotten == [f"{PREFIX}s"]


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_request_of_a_session_ends_its_trajectory_as_at_dynamo_s(serve_watched, stream):
    served, _, forgotten = serve_watched()
    ids = {"X-Dynamo-Session-ID": "s"}
    with served:
        post(served, {"prompt": [5, 6, 7]}, **ids)
        body = {"prompt": [5, 6, 7], "stream": stream, "max_tokens": 24}
        last = {**ids, "X-Dynamo-Session-Final": "true"}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=last, timeout=PATIENCE_S)
        assert answer.status_code == 200
        eventually(lambda: not kept(served).kept)
    assert forgotten == [f"{PREFIX}s"]


def test_a_trajectory_that_is_ended_during_a_turn_is_forgotten_after_it(serve_by_hand, playing):
    engine = playing.Hand()
    with serve_by_hand(engine) as served, httpx.Client(timeout=PATIENCE_S) as client:
        body = {"prompt": [5, 6, 7], "trajectory": "t", "stream": True, "max_tokens": 8}
        with client.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
            eventually(lambda: engine.jobs)
            assert delete(served, "/v1/trajectories/t") == {"ended": 1}
            assert kept(served).kept == 1
            served.do(lambda: engine.finish(tokens=3, stopped=True))
            answer.read()
        eventually(lambda: not kept(served).kept)


def test_a_harness_that_vanishes_during_a_turn_leaves_nothing_after_the_idle_time(serve_by_hand, playing):
    engine = playing.Hand()
    with (
        serve_by_hand(engine, trajectory_idle_s=0.2) as served,
        httpx.Client(timeout=PATIENCE_S) as client,
    ):
        body = {"prompt": [5, 6, 7], "trajectory": "t", "group": "g", "stream": True}
        with client.stream("POST", f"{served.url}/v1/completions", json={**body, "max_tokens": 8}):
            eventually(lambda: engine.jobs)
            assert kept(served).kept == 1
        eventually(lambda: not (kept(served).kept or kept(served).kept_groups))
        broker = served.server.config.app.state.broker
        assert broker.unfinished == 0
        assert not broker.trajectories._under_way
        assert not broker._subscriptions


def test_a_turn_that_is_refused_is_not_under_way(serve_sim):
    with serve_sim(most_requests=4) as served:
        body = {"prompt": [5, 6, 7], "trajectory": "t", "max_tokens": 10**6}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 400
        post(served, {"prompt": [5, 6, 7], "trajectory": "t"})
        assert delete(served, "/v1/trajectories/t") == {"ended": 1}
        assert kept(served).kept == 0


# Turns of trainers, whose records name a trajectory for each response.


def roll_out(served, **record):
    """Roll out a record; return its responses' tokens by index."""
    record = {"max_tokens": 24, "n": 2, "ignore_eos": True, **record}
    answer = httpx.post(f"{served.url}/v1/rollouts", json={"records": [record]}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    lines = map(json.loads, answer.text.splitlines())
    found = {each["index"]: each["token_ids"] for line in lines if (each := line.get("completion"))}
    assert len(found) == record["n"], answer.text
    return found


def test_each_response_of_a_record_is_a_turn_of_its_own_trajectory(serve_watched):
    served, records, forgotten = serve_watched()
    with served:
        first = roll_out(
            served, group_id="g", prompt_token_ids=[5] * 20, family="f", trajectories=["f/0", "f/1"]
        )
        assert kept(served).kept == 2
        for index in (1, 0):
            roll_out(
                served,
                group_id=f"g-{index}-1",
                prompt_token_ids=[*[5] * 20, *first[index], 9],
                n=1,
                family="f",
                trajectories=[f"f/{index}"],
            )
        assert delete(served, "/v1/groups/f") == {"ended": 2}
        assert (kept(served).kept, kept(served).kept_groups) == (0, 0)
    homes = {each.request_id: each.chunks[-1].instance for each in records.completions}
    assert [each.home for each in records.specs] == ["", homes["g/1"], homes["g/0"]]
    assert {each.family for each in records.specs} == {"f"}
    later = [each for each in records.completions if each.request_id.endswith("-1/0")]
    assert all(each.chunks[0].cached_tokens >= 32 for each in later)
    assert sorted(forgotten) == ["f", f"{PREFIX}f/0", f"{PREFIX}f/1"]


def test_a_group_that_is_refused_does_not_end_the_turn_of_its_id():
    def story(trajectories):
        groups = trajectories.mark([group("g")], AgentTurn("t"))
        assert trajectories.begin(groups, None) == ["g/0"]
        assert trajectories.begin(groups, None) == []
        trajectories.refused([])
        assert trajectories._under_way["g/0"].turns == 1
        trajectories.close()

    assert keep(story) == []


@pytest.mark.parametrize(
    ("names", "fact"),
    [
        ({"trajectories": ["a"]}, "it names 1 trajectories; name one for each of 2 responses"),
        ({"trajectories": ["a", "b\n"]}, "of a trajectory or a family cannot be one"),
        ({"family": "x" * 201}, "of a trajectory or a family cannot be one"),
    ],
)
def test_names_of_a_record_that_cannot_be_are_refused(serve_sim, names, fact):
    record = {"prompt_token_ids": [5], "n": 2, "max_tokens": 4, **names}
    with serve_sim() as served:
        answer = httpx.post(f"{served.url}/v1/rollouts", json={"records": [record]}, timeout=PATIENCE_S)
        assert answer.status_code == 400
        assert fact in answer.json()["error"]["message"]
        assert kept(served).kept == 0


# What is kept.


def group(name):
    return PromptGroup(name, (5, 6), 1, 8)


def completion(name):
    empty = Tokens(), Logprobs()
    return Completion(f"{name}/0", name, 0, 0, *empty, "", "stop", 0, [], [], 0.0, {})


def keep(story, idle_s=60.0):
    """Run a story with trajectories on an event loop; return what was forgotten."""
    forgotten = []

    async def run():
        found = story(Trajectories(idle_s, forgotten.append))
        if asyncio.iscoroutine(found):
            await asyncio.wait_for(found, PATIENCE_S)

    asyncio.run(run())
    return forgotten


def begin(trajectories, groups, turn):
    trajectories.begin(trajectories.mark(groups, turn), turn)


def play(trajectories, name, group_id=""):
    begin(trajectories, [group(f"turn of {name}")], AgentTurn(name, group_id))
    trajectories.completed(completion(f"turn of {name}"))


def test_what_was_used_longest_ago_makes_room_and_a_turn_under_way_stays(monkeypatch):
    monkeypatch.setattr("seer_server.trajectories.MOST_KEPT", 3)

    def story(trajectories):
        begin(trajectories, [group("long")], AgentTurn("busy"))
        for name in "abcb":
            play(trajectories, name)
        play(trajectories, "d")
        assert list(trajectories._trajectories) == [f"{PREFIX}{name}" for name in ("busy", "b", "d")]
        trajectories.close()

    assert keep(story) == [f"{PREFIX}a", f"{PREFIX}c"]


def test_groups_are_bounded_as_well(monkeypatch):
    monkeypatch.setattr("seer_server.trajectories.MOST_KEPT", 2)

    def story(trajectories):
        for number in range(4):
            play(trajectories, "t", f"g{number}")
        assert (trajectories.kept, trajectories.kept_groups) == (1, 2)
        trajectories.close()

    assert keep(story) == ["g0", "g1"]


def test_a_trajectory_between_two_turns_is_forgotten_in_time_and_one_in_a_turn_is_not():
    async def story(trajectories):
        begin(trajectories, [group("long")], AgentTurn("busy"))
        play(trajectories, "idle", "g")
        while trajectories.kept > 1 or trajectories.kept_groups:
            await asyncio.sleep(0)
        assert list(trajectories._trajectories) == [f"{PREFIX}busy"]
        trajectories.completed(completion("long"))
        while trajectories.kept:
            await asyncio.sleep(0)
        assert trajectories._timer is None

    assert keep(story, 0.05) == [f"{PREFIX}idle", "g", f"{PREFIX}busy"]
