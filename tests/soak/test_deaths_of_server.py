"""A server that dies again and again, and clients that come again, lose no token and get none twice.

`pytest tests/soak/test_deaths_of_server.py --soak-minutes 30 -s` runs a long campaign.
"""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import attrs
import httpx
import pytest

from tests.support.eventually import eventually

from .campaign import PROGRAM
from .deaths import DAMAGES, DEATHS, Disk, Life, bad_ending, damage, strike

TOKEN = "a-token-of-this-test"
CONFIG = """
[seer]
plugins = ["divided_rollout"]
engine = "no_model"
[engine.no_model]
token_s = 0.03
[plugin.divided_rollout]
chunk_tokens = 16
"""
CLIENTS, RESPONSES, MOST_TOKENS = 6, 4, 500
LIFE_S = 8.0
PATIENCE_S = 60.0
LEAVES = "client"
KINDS = (*(kind for kind in DEATHS if kind != "child"), *DAMAGES, LEAVES)


@attrs.define(eq=False)
class StreamClient:
    """Streams until every choice is over; ``leaves`` makes it break off once."""

    group: str
    tokens: list[list[int]] = attrs.Factory(lambda: [[] for _ in range(RESPONSES)])
    reasons: dict[int, str] = attrs.Factory(dict)
    leaves: bool = False

    def finish(self, server):
        while len(self.reasons) < RESPONSES and not server.closed:
            with suppress(httpx.HTTPError):
                self.stream(server.url)
            time.sleep(0.05)

    def stream(self, url):
        body = {
            "prompt": [5, 6],
            "n": RESPONSES,
            "group": self.group,
            "max_tokens": MOST_TOKENS,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"skip_tokens": [len(tokens) for tokens in self.tokens]},
        }
        headers = {"Authorization": f"Bearer {TOKEN}"}
        address = f"{url}/v1/completions"
        with httpx.stream("POST", address, json=body, headers=headers, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                for choice in json.loads(line[6:]).get("choices", ()) if line.startswith("data: {") else ():
                    self.tokens[choice["index"]] += choice["token_ids"]
                    # A server that ends in order aborts what is unfinished: the client asks again.
                    if choice["finish_reason"] not in (None, "aborted", "error"):
                        self.reasons[choice["index"]] = choice["finish_reason"]
                if self.leaves:
                    self.leaves = False
                    return


class RestartedServer:
    """`seer serve --journal` over engines without a model, started again after each death."""

    def __init__(self, folder, chance):
        folder.mkdir()
        self.folder, self.chance = folder, chance
        self.url, self.closed, self.lives = "http://127.0.0.1:9", False, 0
        self.deaths, self.complaints = Counter(), []
        for name in ("clock", "token", "seer.toml"):
            (folder / name).write_text({"clock": "0", "token": TOKEN, "seer.toml": CONFIG}[name])
        (folder / "scratch").mkdir()
        self.disk = Disk(folder / "disk")

    @property
    def journal(self):
        return self.disk.path / "journal"

    def start(self):
        self.lives += 1
        command = [
            sys.executable,
            "-c",
            PROGRAM,
            str(self.folder),
            "serve",
            self.folder / "seer.toml",
        ]
        command += ["--port", "0", "--token-file", self.folder / "token", "--journal", self.journal]
        with (self.folder / "errors").open("w") as stderr:
            process = subprocess.Popen(
                [*map(str, command), "--drain-s", "1"],
                env={**os.environ, "TMPDIR": str(self.folder / "scratch")},
                stderr=stderr,
                text=True,
            )
        address = re.compile(r"running on (http://\S+)")
        found = eventually(lambda: address.search(self.errors) or process.poll() is not None)
        assert process.poll() is None, self.errors
        self.url = found[1]
        return process

    @property
    def errors(self):
        return (self.folder / "errors").read_text()

    def live(self, clients, working):
        """Live until a death, or until all clients are done; then end in order."""
        process = self.start()
        kinds = self.chance.choices(KINDS, k=self.chance.choice((1, 1, 2)))
        end = time.monotonic() + self.chance.uniform(0, LIFE_S)
        while time.monotonic() < end and not all(each.done() for each in working):
            time.sleep(0.02)
        life = Life(
            process,
            [],
            self.chance,
            self.disk,
            20_000,
            self.folder / "clock",
            self.folder / "scratch",
        )
        for kind in kinds:
            self.deaths[kind] += 1
            if kind == LEAVES:
                self.chance.choice(clients).leaves = True
            else:
                strike(kind, life)
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.chance.uniform(0, LIFE_S))  # it may live on, with a full disk for example
        process.terminate()
        allowed = {0, 143, -9, -15}
        self.complaints += bad_ending(process, kinds, PATIENCE_S, self.folder / "errors", allowed)
        self.disk.set_writable(True)
        for kind in set(kinds).intersection(DAMAGES):
            damage(kind, self.journal, self.chance)

    def serve(self):
        """Live until all clients are done; return the tokens of each."""
        clients = [StreamClient(f"g{number}") for number in range(CLIENTS)]
        with ThreadPoolExecutor(CLIENTS) as threads:
            working = [threads.submit(client.finish, self) for client in clients]
            try:
                while not all(each.done() for each in working) and not self.complaints:
                    self.live(clients, working)
            finally:
                self.closed = True
        self.disk.close()
        for each in working:
            each.result()
        return {client.group: (client.tokens, client.reasons) for client in clients}


def expected_of(folder):
    """Return the tokens that a server without a death streams."""
    server = RestartedServer(folder, random.Random(0))
    process = server.start()
    clients = [StreamClient(f"g{number}") for number in range(CLIENTS)]
    threads = [threading.Thread(target=client.finish, args=(server,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    process.terminate()
    process.wait(PATIENCE_S)
    server.disk.close()
    return {client.group: (client.tokens, client.reasons) for client in clients}


@pytest.mark.long
def test_a_server_dies_and_its_clients_lose_nothing(no_model, tmp_path, soak):
    expected = expected_of(tmp_path / "undisturbed")
    assert all(len(reasons) == RESPONSES for _, reasons in expected.values())
    chance = random.Random(soak.seed)
    deaths, lives, served = Counter(), 0, 0
    end = time.monotonic() + 60 * soak.minutes
    while time.monotonic() < end or deaths.total() < 3:
        server = RestartedServer(tmp_path / f"server-{served}", chance)
        found = server.serve()
        assert not server.complaints, server.complaints
        assert found == expected
        deaths += server.deaths
        lives += server.lives
        served += 1
    print(f"{deaths.total()} deaths in {lives} lives, {served} times {CLIENTS} groups: {dict(deaths)}")
