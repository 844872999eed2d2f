"""verifiers: its own server plays episodes of several turns, whose model is Seer's server.

Three processes, each with an interpreter of its own: this one, which asks for episodes as a trainer does;
verifiers' environment server; and ``seer serve``.
"""

import asyncio
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from verifiers.v1 import EvalClientConfig, SamplingConfig, TrainClientConfig
from verifiers.v1.serve import EnvClient

HERE = Path(__file__).with_name("verifiers_environment")
LETTERS = "aeiou"
TURNS = 3
SIBLINGS = 4
PATIENCE_S = 300


class Episodes:
    """verifiers' environment server, in a process of its own."""

    def __init__(self, home):
        environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(HERE)}
        command = [sys.executable, HERE / "serve.py"]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        self.address = self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()


@pytest.fixture
def episodes(tmp_path, server, monkeypatch):
    """Return a function that starts an environment server."""
    monkeypatch.setenv("SEER_TOKEN", server.token)
    started = []

    def start():
        started.append(Episodes(tmp_path))
        return started[-1]

    yield start
    for each in started:
        each.kill()


async def play(address, make_client, letters, **sampling):
    """Play each task several times at once, and return the traces by task."""
    client = EnvClient(address)
    sampling = SamplingConfig(**{"max_tokens": 40, "temperature": 1.0, **sampling})

    async def one(letter):
        data = {"prompt": f"write {letter}", "letter": letter}
        episode = await client.run(make_client(letter), "seer", sampling, data)
        assert episode.ok, episode.errors
        [trace] = episode.traces
        return trace

    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.wait_for_server_startup()
            found = await asyncio.gather(*(one(letter) for letter in letters for _ in range(SIBLINGS)))
    finally:
        await client.close()
    return {letter: found[at * SIBLINGS : (at + 1) * SIBLINGS] for at, letter in enumerate(letters)}


@pytest.fixture
def in_letters(vocabulary):
    """Return how turns are sampled that have eight letters at least, and no special token but their end.

    verifiers leaves special tokens out of a turn's text, and begins another branch where one was written.
    """
    letters = [token for word, token in vocabulary.items() if len(word) == 1]
    return {"min_tokens": 8, "allowed_token_ids": [*letters, vocabulary["<eos>"]]}


def figure(server, name):
    """Return one of the server's figures."""
    asked = urllib.request.Request(
        f"{server.root}/metrics", headers={"Authorization": f"Bearer {server.token}"}
    )
    with urllib.request.urlopen(asked, timeout=PATIENCE_S) as reply:
        lines = reply.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def end_group(server, name):
    asked = urllib.request.Request(
        f"{server.root}/v1/groups/{name}",
        method="DELETE",
        headers={"Authorization": f"Bearer {server.token}"},
    )
    urllib.request.urlopen(asked, timeout=PATIENCE_S).close()


def by_chats(server):
    """Return a function that makes the client of a task's group, which sends chats."""

    def client(letter):
        return EvalClientConfig(
            base_url=server.url, api_key_var="SEER_TOKEN", headers={"X-Seer-Group": f"write-{letter}"}
        )

    return client


def by_tokens(server):
    """Return a function that makes the client of a task's group, which sends and receives tokens."""

    def client(letter):
        return TrainClientConfig(
            base_url=server.url,
            api_key_var="SEER_TOKEN",
            headers={"X-Seer-Group": f"write-{letter}"},
            renderer_model_name=str(server.model),
        )

    return client


def sampled(trace):
    return [node for node in trace.nodes if node.sampled]


def test_episodes_of_groups_come_back_with_their_turns_and_rewards(episodes, server, in_letters):
    before = figure(server, "seer_trajectories")
    traces = asyncio.run(play(episodes().address, by_chats(server), LETTERS, **in_letters))
    for letter, siblings in traces.items():
        for trace in siblings:
            texts = [node.message.content or "" for node in sampled(trace)]
            assert len(texts) == trace.num_turns == TURNS
            assert trace.reward == sum(text.count(letter) for text in texts)
    texts = {
        tuple(node.message.content for node in sampled(each))
        for siblings in traces.values()
        for each in siblings
    }
    assert len(texts) == len(LETTERS) * SIBLINGS
    assert figure(server, "seer_trajectories") - before == len(LETTERS) * SIBLINGS
    for letter in LETTERS:
        end_group(server, f"write-{letter}")
    assert figure(server, "seer_trajectories") == before


def test_the_train_client_has_the_tokens_their_mask_and_their_log_probs(episodes, server, client, in_letters):
    traces = asyncio.run(
        play(episodes().address, by_tokens(server), "ae", **{**in_letters, "min_tokens": 40})
    )
    for trace in (each for siblings in traces.values() for each in siblings):
        [branch] = trace.branches
        token_ids, mask = branch.token_ids, branch.sampled_mask
        assert (len(token_ids), sum(mask)) == (len(mask), TURNS * 40)
        written = [
            token
            for node in sampled(trace)
            for token, own in zip(node.token_ids, node.mask, strict=True)
            if own
        ]
        assert [token for token, own in zip(token_ids, mask, strict=True) if own] == written
        scored = client.completions.create(
            model="seer", prompt=token_ids, max_tokens=1, logprobs=1, echo=True
        ).choices[0]
        expected = scored.logprobs.token_logprobs[: len(token_ids)]
        drawn = [value for node in sampled(trace) for value in node.logprobs]
        assert drawn == pytest.approx([expected[at] for at, own in enumerate(mask) if own], abs=1e-4)


def test_an_environment_server_that_is_killed_leaves_nothing_behind_and_another_goes_on(
    episodes, server, in_letters
):
    first = episodes()

    async def interrupted():
        playing = asyncio.ensure_future(
            play(first.address, by_chats(server), LETTERS, max_tokens=600, min_tokens=600)
        )
        while not await asyncio.to_thread(figure, server, "seer_unfinished_requests"):
            assert not playing.done(), playing
        first.kill()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        async with asyncio.timeout(PATIENCE_S):
            while await asyncio.to_thread(figure, server, "seer_unfinished_requests"):
                await asyncio.sleep(0)

    asyncio.run(interrupted())
    traces = asyncio.run(play(episodes().address, by_chats(server), "a", **in_letters))
    assert [each.num_turns for each in traces["a"]] == [TURNS] * SIBLINGS
