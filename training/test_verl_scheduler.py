"""Seer's scheduler over verl's own servers, which are stand-ins here; without Ray and without verl.

With verl's classes, under Ray, and with verl's server around a real vLLM: ``make verl-test``.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import re
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from seer_cli.report.reading import RunReader
from seer_divided_rollout.splitter import Chunks
from structlog.testing import capture_logs

from seer_core.errors import ConfigError, EngineError, SeerError
from tests.support.eventually import aeventually

sys.path[:0] = [str(Path(__file__).parent / "verl"), str(Path(__file__).parent / "verl/tests")]

from seer_verl import step_reports  # noqa: E402
from seer_verl.merging import merged_experts, merged_output  # noqa: E402
from seer_verl.sampling import CONTROLS, record_fields  # noqa: E402
from seer_verl.scheduler import RowJob, RowScheduler, config_of  # noqa: E402
from seer_verl.servers import SglangInner, VllmInner  # noqa: E402
from seer_verl.settings import KeptSettings, VerlSettings  # noqa: E402
from verl_standin import END, Here, StandInServer  # noqa: E402

CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched"]
[engine.remote]
require = "exact"
poll_s = 0.05
[seer.restarts]
attempts = 0
[plugin.divided_rollout]
chunk_tokens = 8
"""
GROUPS = [("0-0", 3), ("0-1", 3)]
FIELDS = {"max_tokens": 40, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "ignore_eos": False}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "seer.toml"
    path.write_text(CONFIG, "utf-8")
    return str(path)


def job(group="0-0", index=0, turn=0, batch="b", prompt=(3, 4, 5), **more):
    fields = FIELDS | more.pop("fields", {})
    defaults = {"arguments": {}, "sampling_params": {}, "iteration": 1}
    return RowJob(batch, group, index, turn, list(prompt), fields, **defaults | more)


@asynccontextmanager
async def scheduling(servers, config, **settings):
    actors = {f"host:{number}": Here(server) for number, server in enumerate(servers)}
    kept = KeptSettings(**{"config": config, "prompt_wait_s": 0.0, "wait_s": 20.0} | settings)
    scheduler = RowScheduler(actors, "vllm", kept)
    try:
        yield scheduler
    finally:
        await scheduler.close()


async def step(scheduler, jobs, groups=GROUPS, batch="b", iteration=1):
    """Roll out a batch; return tokens and the rest of each answer."""
    await scheduler.begin(batch, groups, iteration)
    try:
        return await asyncio.gather(*map(scheduler.generate, jobs))
    finally:
        await scheduler.end(batch)


def all_jobs(**more):
    return [
        job(name, i, prompt=(3, 4, 5 + g), **more) for g, (name, n) in enumerate(GROUPS) for i in range(n)
    ]


def mine(server):
    """Requests for the tests' prompts."""
    return [each for each in server.requests if each["prompt"][:2] == [3, 4]]


def test_rows_are_divided_over_servers_and_have_the_tokens_of_one_server_alone(config):
    servers = [StandInServer("one"), StandInServer("two")]

    async def play():
        async with scheduling(servers, config) as scheduler:
            return await step(scheduler, all_jobs())

    answers = asyncio.run(play())
    assert all(mine(server) for server in servers)
    assert all(each["sampling"]["max_tokens"] <= 8 for server in servers for each in mine(server))
    assert len({tuple(each["token_ids"]) for each in answers}) == 6
    for each in answers:
        assert len(each["token_ids"]) == 40 or each["token_ids"][-1] == END
        assert each["stop_reason"] == "completed"
        assert len(each["log_probs"]) == len(each["token_ids"])
        assert each["extra_fields"]["seer_fallback"] is False
    one = asyncio.run(_on([StandInServer()], config))
    assert [each["token_ids"] for each in one] == [each["token_ids"] for each in answers]


async def _on(servers, config, jobs=None):
    async with scheduling(servers, config) as scheduler:
        return await step(scheduler, jobs or all_jobs())


def test_an_end_token_at_the_end_of_a_chunk_ends_the_response(config):
    """verl's servers say ``completed`` for an end and for a full length."""
    server = StandInServer()
    answers = asyncio.run(_on([server], config))
    assert all(END not in each["token_ids"][:-1] for each in answers)
    forever = asyncio.run(_on([StandInServer()], config, all_jobs(fields={"ignore_eos": True})))
    assert {len(each["token_ids"]) for each in forever} == {40}


def test_images_and_further_arguments_go_through_unread_and_experts_come_back(config):
    servers = [StandInServer("one"), StandInServer("two")]
    image, kwargs = object(), {"fps": 2}
    arguments = {"image_data": [[image]], "mm_processor_kwargs": [kwargs], "priority": [3]}
    jobs = all_jobs(arguments=arguments, sampling_params={"extra_args": {"mine": 1}})
    answers = asyncio.run(_on(servers, config, jobs))
    for each in mine(servers[0]) + mine(servers[1]):
        assert each["image_data"] == [image]
        assert (each["mm_processor_kwargs"], each["priority"]) == (kwargs, 3)
        assert each["sampling"]["extra_args"] == {"mine": 1}
    for number, each in enumerate(answers):
        context = [3, 4, 5 + number // 3, *each["token_ids"]]
        assert each["routed_experts"] == [[token] for token in context[:-1]]


def test_responses_to_images_are_divided_on_vllm_and_not_on_sglang(config, monkeypatch):
    jobs = all_jobs(arguments={"image_data": [[object()]]}, fields={"ignore_eos": True})
    vllm, sglang = StandInServer(), StandInServer()
    asyncio.run(_on([vllm], config, jobs))
    monkeypatch.setattr(VllmInner, "divided", SglangInner.divided)
    asyncio.run(_on([sglang], config, jobs))
    assert (len(mine(vllm)), len(mine(sglang))) == (6 * 5, 6)


@pytest.mark.parametrize("name", ["bad_words", "thinking_token_budget", "one_of_tomorrow"])
def test_responses_under_parameters_that_hold_within_one_request_are_not_divided(config, name):
    servers = [StandInServer("one"), StandInServer("two")]
    answers = asyncio.run(_on(servers, config, all_jobs(sampling_params={name: ["a word"]})))
    requests = mine(servers[0]) + mine(servers[1])
    assert len(requests) == len(answers) == 6
    assert all(each["sampling"][name] == ["a word"] for each in requests)


def test_parameters_have_seer_s_names_and_those_that_are_seer_s_are_refused():
    fields, left = record_fields({"n": 1, "min_new_tokens": 3, "stop": None}, 40, CONTROLS["sglang"])
    assert (fields["min_tokens"], left) == (3, {})
    for name in ("n", "seed", "output_kind"):
        with pytest.raises(ValueError, match=f"{name!r} is Seer's to send"):
            record_fields({name: 2}, 40, CONTROLS["vllm"])


def test_a_repetition_that_vllm_has_found_ends_a_response_by_its_reason(config):
    server = StandInServer(repeats=True)
    answers = asyncio.run(_on([server], config, all_jobs(sampling_params={"repetition_detection": {}})))
    assert {each["stop_reason"] for each in answers} == {"repetition"}


def test_further_turns_and_rows_that_differ_are_groups_of_their_own(config):
    async def play():
        async with scheduling([StandInServer()], config) as scheduler:
            first = job("0-0", 0)
            return await step(
                scheduler,
                [first, job("0-0", 1, prompt=(3, 4, 9)), job("0-0", 0, turn=1, prompt=(3, 4, 5, 9))],
            )

    one, other, later = asyncio.run(play())
    assert one["token_ids"] != other["token_ids"] != later["token_ids"]


def test_rows_whose_further_arguments_alone_differ_are_one_group(config):
    server = StandInServer()
    arguments = [{}, {"priority": [1]}, {"priority": [2]}]
    asyncio.run(_on([server], config, [job("0-0", i, arguments=each) for i, each in enumerate(arguments)]))
    seeds = {each["sampling"]["seed"] for each in mine(server)}
    assert len(seeds) == 3


def test_rows_whose_unread_parameters_differ_have_each_its_own(config):
    server = StandInServer()
    jobs = [job("0-0", index, sampling_params={"extra_args": {"mine": index}}) for index in range(3)]
    asyncio.run(_on([server], config, jobs))
    assert {each["sampling"]["extra_args"]["mine"] for each in mine(server)} == {0, 1, 2}


def test_servers_that_slept_and_have_new_weights_are_looked_at_and_serve_the_next_step(config):
    servers = [StandInServer("one"), StandInServer("two")]

    async def play():
        async with scheduling(servers, config) as scheduler:
            found = [await step(scheduler, all_jobs())]
            for server in servers:  # as verl's trainer between two steps
                await server.sleep()
                server.weights, server.global_steps = 1, 1
                await server.wake_up()
            found.append(await step(scheduler, all_jobs(batch="c"), batch="c"))
            return found, scheduler.metrics()

    (old, new), metrics = asyncio.run(play())
    assert all(each["extra_fields"]["min_global_steps"] == 1 for each in new)
    assert [each["token_ids"] for each in new] != [each["token_ids"] for each in old]
    assert metrics["seer/requests"] == 6
    assert metrics["seer/exactness"] == 2
    assert metrics["seer/fallbacks"] == 0


def test_a_validation_takes_no_canary_from_the_step_after_it_with_the_same_weights(config):
    async def play():
        async with scheduling([StandInServer("one"), StandInServer("two")], config, canary=2) as scheduler:
            for name in ("val", "1"):
                groups = [(f"{name}-0", 3)]
                await step(scheduler, [job(f"{name}-0", i) for i in range(3)], groups)
            return scheduler.metrics()

    assert asyncio.run(play())["seer/canary_compared"] == 4


def test_a_server_that_is_paused_in_mid_step_is_not_lost(config):
    servers = [StandInServer("one", token_s=0.002), StandInServer("two", token_s=0.002)]

    async def play():
        async with scheduling(servers, config) as scheduler:
            rolling = asyncio.create_task(step(scheduler, all_jobs()))
            await aeventually(lambda: mine(servers[0]))
            await servers[0].abort_all_requests()
            answers = await rolling
            await servers[0].resume_generation()
            await step(scheduler, all_jobs(batch="c"), batch="c")
            return answers, scheduler.metrics()

    answers, metrics = asyncio.run(play())
    assert [each["token_ids"] for each in answers] == [
        each["token_ids"] for each in asyncio.run(_on([StandInServer()], config))
    ]
    assert metrics["seer/fallbacks"] == 0


def test_no_token_is_of_weights_that_came_in_mid_step(config):
    """The chunk that saw the update is thrown away, and what is left has no server with its weights."""
    server = StandInServer(token_s=0.002)

    async def play():
        async with scheduling([server], config, stall_s=0.4) as scheduler:
            rolling = asyncio.create_task(step(scheduler, all_jobs()))
            await aeventually(lambda: server.running and len(mine(server)) > 6)
            server.weights, server.global_steps = 1, 1
            with pytest.raises(SeerError):
                await rolling
            server.token_s = 0.0
            return await step(scheduler, all_jobs(batch="c"), batch="c")

    answers = asyncio.run(play())
    assert all(each["extra_fields"]["min_global_steps"] == 1 for each in answers)


def test_where_the_scheduler_fails_in_mid_step_servers_write_the_rest_and_it_is_marked(config, monkeypatch):
    servers = [StandInServer("one"), StandInServer("two")]
    split, calls = Chunks.split, []

    def breaking(self, *arguments):
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("broken")
        return split(self, *arguments)

    async def play():
        async with scheduling(servers, config) as scheduler:
            monkeypatch.setattr(Chunks, "split", breaking)
            answers = await step(scheduler, all_jobs())
            monkeypatch.setattr(Chunks, "split", split)
            after = await step(scheduler, all_jobs(batch="c"), batch="c")
            return answers, after

    answers, after = asyncio.run(play())
    marks = [each["extra_fields"]["seer_fallback"] for each in answers]
    assert any(marks)
    assert not any(each["extra_fields"]["seer_fallback"] for each in after)  # the next step tries again
    assert [each["token_ids"] for each in answers] == [each["token_ids"] for each in after]


def test_figures_of_a_step_have_what_its_canary_has_found(config):
    servers = [StandInServer("one", token_s=0.002), StandInServer("two", token_s=0.002)]

    async def play():
        async with scheduling(servers, config, canary=2) as scheduler:
            await step(scheduler, all_jobs())
            return scheduler.metrics()

    metrics = asyncio.run(play())
    assert (metrics["seer/canary_compared"], metrics["seer/canary_different"]) == (2, 0)


def test_figures_of_a_step_are_there_though_its_servers_are_not_free_yet(config):
    async def play():
        entered, over = asyncio.Event(), asyncio.Event()

        async with scheduling([StandInServer()], config) as scheduler:
            await scheduler.begin("b", GROUPS, 1)
            await asyncio.gather(*map(scheduler.generate, all_jobs()))
            exclusive = scheduler._broker.exclusive

            @asynccontextmanager
            async def busy(wait_s):
                entered.set()
                await over.wait()
                async with exclusive(wait_s) as runtime:
                    yield runtime

            scheduler._broker.exclusive = busy
            ending = asyncio.create_task(scheduler.end("b"))
            await entered.wait()
            early = scheduler.metrics()
            over.set()
            return early, await ending

    early, late = asyncio.run(play())
    assert early["seer/requests"] == late["seer/requests"] == 6


def shown(page):
    found = re.search(r'id="data">(.*?)</script>', page.read_text("utf-8")).group(1)
    return json.loads(found)["runs"]


def test_each_step_leaves_a_page_also_one_in_which_the_scheduler_fails(config, tmp_path, monkeypatch):
    folder, servers = tmp_path / "reports", [StandInServer("one"), StandInServer("two")]
    split, calls = Chunks.split, []

    def breaking(self, *arguments):
        calls.append(1)
        if len(calls) == 12:
            raise RuntimeError("broken")
        return split(self, *arguments)

    def named(prefix):
        return [(f"{prefix}-{number}", n) for number, (_, n) in enumerate(GROUPS)]

    async def play():
        async with scheduling(servers, config, report=str(folder)) as scheduler:
            for prefix in ("1", "2", "3", "val", "val"):
                monkeypatch.setattr(Chunks, "split", breaking if prefix == "2" else split)
                jobs = [job(name, i, batch=prefix) for name, n in named(prefix) for i in range(n)]
                await step(scheduler, jobs, named(prefix), batch=prefix)
            return scheduler.metrics()

    metrics = asyncio.run(play())
    names = ["step-1", "step-2", "step-3", "validation", "validation-2"]
    assert {each.name for each in folder.iterdir()} == {f"{each}.html" for each in names}
    for name in names:
        [run] = shown(folder / f"{name}.html")
        assert run["name"] == name
        whole = name != "step-2"  # of that one Seer has not seen all ends
        assert (run["whole"], run["figures"]["requests"] == 6) == (whole, whole)
    assert run["figures"]["tokens"] == metrics["seer/tokens"]


def test_a_page_that_cannot_be_written_costs_no_step(config, tmp_path):
    async def play():
        async with scheduling([StandInServer()], config, report=config) as scheduler:  # which is a file
            return await step(scheduler, all_jobs())

    assert len(asyncio.run(play())) == 6


def test_a_step_of_which_an_event_cannot_be_read_has_no_page_and_the_next_one_has(
    config, tmp_path, monkeypatch
):
    folder, read, calls = tmp_path / "reports", RunReader.read, []

    def breaking(self, record):
        calls.append(1)
        if len(calls) == 10:  # beside the loop, before the step's end
            raise RuntimeError("unread")
        read(self, record)

    monkeypatch.setattr(step_reports, "AT_ONCE", 4)
    monkeypatch.setattr(RunReader, "read", breaking)

    async def play():
        async with scheduling([StandInServer()], config, report=str(folder)) as scheduler:
            for prefix in ("1", "2"):
                groups = [(f"{prefix}-{number}", n) for number, (_, n) in enumerate(GROUPS)]
                jobs = [job(name, i, batch=prefix) for name, n in groups for i in range(n)]
                await step(scheduler, jobs, groups, batch=prefix)

    with capture_logs() as logs:
        asyncio.run(play())
    assert [each["reason"] for each in logs if each["event"] == "no_report"] == ["unread"]
    assert [each.name for each in folder.iterdir()] == ["step-2.html"]


@pytest.mark.parametrize("name", ["model_config", "_submission_paused", "global_steps"])
def test_servers_in_which_a_name_has_moved_are_an_error_that_says_which_verl_is_known(config, name):
    moved = StandInServer("moved")
    moved.of_tomorrow = moved.__dict__.pop(name)
    with pytest.raises(EngineError, match=rf"not those of verl 0\.9\.1, .*no attribute '{name}'"):
        asyncio.run(_on([StandInServer(), moved], config))


def test_a_second_life_has_no_batch_and_a_batch_that_ends_gives_rows_up(config):
    async def play():
        async with scheduling([StandInServer(token_s=0.01)], config) as scheduler:
            with pytest.raises(EngineError, match="started anew"):
                await scheduler.generate(job())
            await scheduler.begin("b", GROUPS, 1)
            asked = asyncio.create_task(scheduler.generate(job()))
            await aeventually(lambda: scheduler.progress({"0-0/0": 0})["written"])
            [(tokens, logprobs)] = scheduler.progress({"0-0/0": 0})["written"].values()
            assert len(tokens) == len(logprobs) >= 8
            assert scheduler.progress({"0-0/0": len(tokens)})["label"] == "None"
            asked.cancel()
            await scheduler.end("b")
            return await step(scheduler, all_jobs(batch="c"), batch="c")

    assert len(asyncio.run(play())) == 6


@asynccontextmanager
async def asking_for_something_else(config):
    """Yield a scheduler, and row 1 of a group that has another prompt than its group, under way."""
    async with scheduling([StandInServer(token_s=0.01)], config) as scheduler:
        await scheduler.begin("b", GROUPS, 1)
        asked = [job(), job(index=1, prompt=(3, 4, 9))]
        first, other = [asyncio.create_task(scheduler.generate(each)) for each in asked]
        await aeventually(lambda: scheduler.progress({"0-0/1": 0})["written"])
        yield scheduler, asked[1], other
        first.cancel()
        await scheduler.end("b")


def test_the_tokens_so_far_of_a_row_that_asks_for_something_else_are_its_own(config):
    async def play():
        async with asking_for_something_else(config) as (scheduler, _, other):
            [(tokens, _)] = scheduler.progress({"0-0/1": 0})["written"].values()
            return tokens, await other

    tokens, answer = asyncio.run(play())
    assert tokens == answer["token_ids"][: len(tokens)]


def test_a_row_that_asks_for_something_else_can_be_abandoned(config):
    async def play():
        async with asking_for_something_else(config) as (scheduler, asked, other):
            scheduler.abandon(asked)
            return await other

    answer = asyncio.run(play())
    assert answer["stop_reason"] == "aborted"


def test_relative_paths_begin_where_settings_were_read(tmp_path, monkeypatch):
    (tmp_path / "seer.toml").write_text(CONFIG, "utf-8")
    (tmp_path / "token").write_text("a-token-of-16-ASCII", "utf-8")
    monkeypatch.chdir(tmp_path)
    read = KeptSettings(config="seer.toml", report="pages"), VerlSettings(token_file="token")
    monkeypatch.chdir("/")
    kept, own = pickle.loads(pickle.dumps(read))
    assert config_of(kept).plugin["divided_rollout"] == {"chunk_tokens": 8}
    assert (kept.report, own.token) == (str(tmp_path / "pages"), "a-token-of-16-ASCII")
    assert KeptSettings(report="").report == ""


def test_a_config_with_engines_is_refused(tmp_path):
    path = tmp_path / "vllm.toml"
    path.write_text('[seer]\nengine = "vllm"\n', "utf-8")
    with pytest.raises(ConfigError, match="the engines are verl's"):
        config_of(KeptSettings(config=str(path)))
    assert config_of(KeptSettings()).seer.plugins == ("divided_rollout", "length_posterior")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mode": "of"}, "write one of on, off, shadow"),
        ({"stall_s": -1}, "0 or more"),
        ({"canary": True}, "0 or"),
    ],
)
def test_settings_that_are_none_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        KeptSettings(**given)


def test_answers_of_chunks_become_one():
    parts = [
        {
            "num_preempted": 1,
            "extra_fields": {"global_steps": 4, "num_cached_tokens": 7, "spec_num_draft_tokens": 2},
        },
        {
            "num_preempted": None,
            "extra_fields": {"global_steps": 4, "num_cached_tokens": 9, "spec_num_draft_tokens": 3},
        },
    ]
    found = merged_output([1, 2], [-1.0, -2.0], parts, stop="completed")
    assert (found["num_preempted"], found["routed_experts"]) == (1, None)
    assert found["extra_fields"] == {
        "global_steps": 4,
        "min_global_steps": 4,
        "max_global_steps": 4,
        "num_cached_tokens": 7,
        "spec_num_draft_tokens": 5,
    }


def test_experts_of_new_tokens_alone_are_added_and_those_of_all_tokens_replace():
    import numpy

    rows = numpy.arange(12).reshape(6, 2)
    assert merged_experts([rows[:3], rows[:6]]).tolist() == rows.tolist()
    assert merged_experts([rows[:4], None, rows[4:]]).tolist() == rows.tolist()
    again = numpy.concatenate([rows[:3] + 50, rows[3:]])
    assert merged_experts([rows[:3], again]).tolist() == rows.tolist()  # those of the first time stay
