"""A server with a journal: a request that comes again, after a death on either side, goes on where it was."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from seer_journal import DiskJournal

from tests.support.eventually import eventually

PATIENCE_S = 60
TOKEN = "a-token-of-this-test"
CONFIG = """
[seer]
plugins = ["divided_rollout"]
engine = "no_model"
[engine.no_model]
token_s = 0.005
[plugin.divided_rollout]
chunk_tokens = 16
"""
BODY = {"prompt": [5, 6], "n": 2, "group": "g", "max_tokens": 64, "return_token_ids": True}


def ask(served):
    return httpx.post(f"{served.url}/v1/completions", json=BODY, timeout=PATIENCE_S).json()["choices"]


def finish(served, engine, name, tokens, stopped=True):
    """Answer a request's chunk where the event loop runs."""
    eventually(lambda: any(job.request_id == name for job in engine.jobs.values()))
    job_id = next(job_id for job_id, job in engine.jobs.items() if job.request_id == name)
    served.do(lambda: engine.finish(job_id, tokens, stopped=stopped))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(2) as threads:
        yield threads


@pytest.fixture
def start(no_model, tmp_path):
    """Return a function that starts ``seer serve`` over engines without a model: its process and url."""
    (tmp_path / "seer.toml").write_text(CONFIG)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    processes = []

    def run(*arguments):
        command = [sys.executable, "-c", "from seer_main import main; main()", "serve"]
        command += [tmp_path / "seer.toml", "--port", "0", "--token-file", tmp_path / "token", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        found = next(filter(None, (re.search(r"running on (http://\S+)", line) for line in process.stderr)))
        return process, found[1]

    yield run
    for process in processes:
        process.kill()
        process.wait(PATIENCE_S)
        process.stderr.close()


def test_after_a_death_of_the_server(start, pool, tmp_path):
    body = {"prompt": [5, 6], "n": 8, "group": "g", "max_tokens": 600, "return_token_ids": True}

    def post(url):
        headers = {"Authorization": f"Bearer {TOKEN}"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
        return [choice["token_ids"] for choice in answer.json()["choices"]]

    _, url = start()
    expected = post(url)
    journal = tmp_path / "journal"
    process, url = start("--journal", journal)
    waiting = pool.submit(post, url)
    eventually(lambda: sum(path.stat().st_size for path in journal.iterdir()) >= 3000)
    process.kill()
    with pytest.raises(httpx.HTTPError):
        waiting.result(PATIENCE_S)
    process.wait(PATIENCE_S)
    with DiskJournal(journal, replace=True) as found:
        assert found.found_tokens > 100
        assert found.found_responses < 8
    _, url = start("--journal", journal)
    assert post(url) == expected


def test_after_a_death_of_the_client(serve_by_hand, playing, pool, tmp_path):
    engine = playing.Hand()
    with (
        DiskJournal(tmp_path / "j", replace=True) as journal,
        serve_by_hand(engine, journal=journal) as served,
    ):

        def die():
            with httpx.stream("POST", f"{served.url}/v1/completions", json=BODY | {"stream": True}) as answer:
                for line in answer.iter_lines():
                    if '"token_ids"' in line:
                        return

        dying = pool.submit(die)
        finish(served, engine, "g/0", 3)
        dying.result(PATIENCE_S)
        eventually(lambda: engine.aborted)
        waiting = pool.submit(ask, served)
        finish(served, engine, "g/1", 2)
        assert [choice["token_ids"] for choice in waiting.result(PATIENCE_S)] == [[5, 6, 7], [5, 6]]


def test_other_prompts_of_the_same_name_are_answered_anew(serve_by_hand, playing, pool, tmp_path):
    engine = playing.Hand()
    with (
        DiskJournal(tmp_path / "j", replace=True) as journal,
        serve_by_hand(engine, journal=journal) as served,
    ):
        for prompt, tokens in (([5, 6], 3), ([5, 7], 4)):
            body = BODY | {"prompt": prompt, "n": 1}
            waiting = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)
            finish(served, engine, "g/0", tokens)
            [choice] = waiting.result(PATIENCE_S).json()["choices"]
            assert len(choice["token_ids"]) == tokens


def stream(url, body, more=10**9):
    """Return tokens and text of each choice of a stream; after ``more`` events its client is gone."""
    tokens, texts = {}, {}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body | {"stream": True}, headers=headers
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                more -= 1
            if more <= 0:
                break
    return [tokens.get(each, []) for each in range(body["n"])], texts


def test_a_stream_goes_on_after_the_tokens_that_its_client_has(start, tmp_path):
    body = {"prompt": [5, 6], "n": 4, "group": "g", "max_tokens": 600, "return_token_ids": True}
    process, url = start("--journal", tmp_path / "journal")
    had, _ = stream(url, body, more=9)
    process.kill()
    process.wait(PATIENCE_S)
    assert 0 < sum(map(len, had)) < 300
    _, url = start("--journal", tmp_path / "journal")
    skip = [len(tokens) for tokens in had]
    rest, _ = stream(url, body | {"stream_options": {"skip_tokens": skip}})
    whole, _ = stream(url, body)
    assert [tokens + more for tokens, more in zip(had, rest, strict=True)] == whole


def test_the_text_of_a_stream_that_goes_on_fits_what_its_client_has(serve_by_hand, playing, pool):
    class Tokenizer:
        """Two tokens are a character."""

        eos_token_id = 0

        def decode(self, token_ids):
            broken = "\N{REPLACEMENT CHARACTER}" * (len(token_ids) % 2)
            return "".join(chr(97 + each % 26) for each in token_ids[1::2]) + broken

    engine = playing.Hand()
    with serve_by_hand(engine, tokenizer=Tokenizer()) as served:
        body = BODY | {"n": 1}
        texts = []
        for skipped in (0, 3, 4, 9):
            waiting = pool.submit(stream, served.url, body | {"stream_options": {"skip_tokens": [skipped]}})
            finish(served, engine, "g/0", 6, stopped=False)
            finish(served, engine, "g/0", 2)
            [tokens], text = waiting.result(PATIENCE_S)
            assert len(tokens) == max(0, 8 - skipped)
            texts.append(text[0])
    assert texts == ["gikm"[:4], texts[0][1:], texts[0][2:], ""]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"group": "g", "stream_options": {"skip_tokens": [1]}}, "skip_tokens has 1 numbers for 2 choices"),
        ({"group": None, "stream_options": {"skip_tokens": [1, 1]}}, "name the group or the seed"),
        ({"group": "g", "stream_options": {"skip_tokens": [1, -1]}}, "`$.stream_options.skip_tokens[1]`"),
    ],
)
def test_a_stream_cannot_skip(body, message, serve_by_hand, playing):
    with serve_by_hand(playing.Hand()) as served:
        answer = httpx.post(f"{served.url}/v1/completions", json=BODY | {"stream": True} | body)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
