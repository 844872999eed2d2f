"""Commands on the server's rollout, and its page."""

import json
import re
import threading

import httpx
import pytest

from tests.support.eventually import eventually

PATIENCE_S = 60


@pytest.fixture
def command():
    """Return a function that sends a command and returns status and answer."""

    def send(served, **fields):
        answer = httpx.post(f"{served.url}/v1/command", json=fields, timeout=PATIENCE_S)
        return answer.status_code, answer.json()

    return send


def test_a_paused_server_answers_when_it_goes_on(serve_sim, command):
    answers = []

    def ask(served):
        body = {"prompt": "how far", "max_tokens": 24}
        answers.append(httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S))

    with serve_sim() as served:
        said = {"done": "paused: no chunk is sent until the rollout goes on"}
        assert command(served, do="pause", by="a test") == (200, said)
        asking = threading.Thread(target=ask, args=(served,))
        asking.start()
        eventually(lambda: httpx.get(f"{served.url}/v1/state").json()["unfinished"] == 1)
        assert not answers
        assert command(served, do="resume") == (200, {"done": "the rollout goes on"})
        asking.join(PATIENCE_S)
        assert [answer.status_code for answer in answers] == [200]


def test_commands_that_cannot_be_carried_out_are_refused_with_a_reason(serve_sim, command):
    with serve_sim() as served:
        [*names] = httpx.get(f"{served.url}/v1/state").json()["instances"]
        for fields, reason in (
            ({"do": "stop"}, "stop.*one of pause, resume, drain, limit, give_up"),
            ({"do": "drain", "what": "x"}, "no instance .x. is up"),
            ({"do": "limit", "what": names[0]}, "a limit needs max_running"),
            ({"do": "limit", "what": names[0], "max_running": 10**6}, "requests at once"),
            ({"do": "give_up", "what": "x"}, "no request of a group .x. is unfinished"),
            ({"undo": "pause"}, "undo"),
        ):
            status, answer = command(served, **fields)
            assert 400 <= status < 500, answer
            assert re.search(reason, json.dumps(answer)), answer


def test_commands_need_the_server_s_token(serve_sim, command):
    with serve_sim(token="a-token-of-the-run") as served:
        assert command(served, do="pause")[0] == 401
