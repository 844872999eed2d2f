"""Seer's routes in a server: who may call them, and when a run that calls no more is left."""

import asyncio
from argparse import Namespace

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from seer_vllm import served_routes
from seer_vllm.served_routes import SeerRoutes
from seer_worker.served import CALL, INFO, Detach, ServedCall

from tests.support.installed import skip_without

skip_without("vllm")


class Core:
    """Notes what the engine core is asked."""

    def __init__(self):
        self.engine_core = self
        self.asked = []

    async def call_utility_async(self, method, *arguments):
        self.asked.append((method, *arguments))
        if "fails" in str(arguments):
            raise RuntimeError("the core failed")
        return "{}"


@pytest.fixture
def core():
    return Core()


@pytest.fixture
def client_of(core):
    """Return a function that makes a client of the routes of a server with these tokens."""

    def make(*tokens):
        routes, app = SeerRoutes(), FastAPI()
        routes.attach_router(app)
        asyncio.run(routes.init_state(core, None, Namespace(api_key=[*tokens])))
        return TestClient(app)

    return make


def body_of(driver, *messages):
    return msgspec.json.encode(ServedCall(driver, [*messages])).decode()


@pytest.mark.parametrize(
    "header",
    [None, "one", "Basic one", "Bearer", "Bearer two ", "Bearer onee", "Bearer on\xe9".encode("latin-1")],
)
def test_a_server_with_tokens_answers_none_without_one_of_them(client_of, core, header):
    client = client_of("one", "three")
    headers = {} if header is None else {"Authorization": header}
    assert client.get(INFO, headers=headers).status_code == 401
    assert client.post(CALL, content=body_of("a"), headers=headers).status_code == 401
    assert not core.asked
    for token in ("one", "three"):
        assert client.get(INFO, headers={"Authorization": f"bearer {token}"}).status_code == 200


def test_the_token_of_the_environment_counts_too(client_of, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "four")
    client = client_of()
    assert client.get(INFO).status_code == 401
    assert client.get(INFO, headers={"Authorization": "Bearer four"}).status_code == 200


def test_what_is_no_call_and_what_fails_are_answered_with_the_reason(client_of, core):
    client = client_of()
    for content in (b'{"driver": 3}', b'{"driver": "\xff"}', b'{"more": ' + b"[" * 100_000):
        answer = client.post(CALL, content=content)
        assert (answer.status_code, answer.text[:22]) == (400, "it is no call of Seer'")
    assert not core.asked
    answer = client.post(CALL, content=body_of("fails"))
    assert (answer.status_code, answer.text) == (400, "the core failed")


def test_a_run_that_calls_no_more_is_left_whichever_else_calls(client_of, core, monkeypatch):
    monkeypatch.setattr(served_routes, "LEASE_S", 0.0)
    left = {("seer_call", body_of(driver, Detach())) for driver in "ab"}
    with client_of() as client:
        for driver in "ab":
            assert client.post(CALL, content=body_of(driver)).status_code == 200
        while not left <= set(core.asked):
            client.get(INFO)
