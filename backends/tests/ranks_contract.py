"""Two instances of two ranks each, of any engine, that share KV: each rank has its part of every block.

A test module has a class derived from ``RanksContract`` and these fixtures: ``pair``, over the class's
``pool``, of which the second instance drafts; and ``expected``, responses of an instance of one rank by the
names of ``SAMPLINGS``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest
from msgspec import structs
from seer_host.config_files import load_config
from seer_host.scratch import SHARED_MEMORY
from seer_host.shared_weights import SharedWeights
from seer_kv_local import LocalPool
from seer_session.assembly import fill_slots
from seer_session.runtime import Runtime

from backends.tests.mover import Mover
from seer_core.errors import EngineError
from seer_core.model import PromptGroup, Sampling, request_seed
from seer_core.ports.drafting import StepTimes
from seer_core.ports.weights import directory
from seer_core.scheduling.scheduler import Slot
from tests.support.eventually import eventually
from tests.support.processes import alive

__all__ = [
    "PLAIN",
    "SAMPLINGS",
    "TOKENS",
    "RanksContract",
    "expect_a_rollout_in_which_a_rank_dies",
    "forget_all",
]

PLAIN, GOING_ON = Sampling(1.0), Sampling(1.0, ignore_eos=True)
SAMPLINGS = {"greedy": Sampling(0.0), "plain": PLAIN}
TOKENS = 110


def children_of(pid):
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(leader, mark):
    """Return the process of a rank, with ``mark`` in its command, of the instance whose worker this is."""
    [rank] = [pid for pid in children_of(leader) if mark in Path(f"/proc/{pid}/cmdline").read_text()]
    return rank


def forget_all(pair, pool):
    """Let instances and their pool forget everything."""
    for each in pair:
        each.run(each.engine.reset_cache())
    pair[0].run(pool.clear())


def pool_of_two(loop, kind):
    """Yield a pool for two instances of an engine, and stop it."""
    pool = LocalPool(64 << 20)
    loop.run_until_complete(pool.start([f"{kind}-0", f"{kind}-1"]))
    yield pool
    loop.run_until_complete(pool.stop())


def shared_by(*processes: int) -> set[str]:
    """Return the names of shared memory that processes use, and that would outlive them."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in processes]
    lines = [line for text in maps for line in text.splitlines() if not line.endswith("(deleted)")]
    return {found for line in lines if (found := line.partition(f"{SHARED_MEMORY}/")[2])}


class RanksContract:
    """Instances of two ranks are as one of one rank."""

    kind: str
    """The engine's name."""
    block: int
    """Tokens of a block in the pool."""
    token_bytes: int
    """The KV of a token, in all ranks."""
    reserved: int
    """Tokens of an instance's KV memory that it keeps from requests."""
    processes: int
    """Those that a worker starts for its ranks, at least."""
    second: str
    """A part of the command of rank 1."""
    least_cached: int
    """Prompts that differ have fewer tokens in common."""
    drafting_group, plain_group = "group", "nothing"
    """Groups in which the second instance drafts, and does not."""

    broken: str
    """The import path of an instance whose rank 1 cannot read its KV."""

    @property
    def block_bytes(self):
        return self.block * self.token_bytes

    @pytest.fixture(scope="class")
    @classmethod
    def pool(cls, loop):
        yield from pool_of_two(loop, cls.kind)

    @pytest.fixture
    def own_pool(self, loop):
        """A pool for instances of one test; in the common one they would take the places of the pair."""
        yield from pool_of_two(loop, self.kind)

    @pytest.fixture
    def cold(self, pair, pool):
        """Let both instances and the pool forget everything, now and when it is called."""
        forget_all(pair, pool)
        return lambda: forget_all(pair, pool)

    def test_it_says_what_its_kv_takes_over_all_ranks_and_in_which_layout(self, pair, roomy):
        for here in pair:
            assert here.info.kv_bytes_per_token == roomy.info.kv_bytes_per_token == self.token_bytes
            kinds = f"{self.kind}-tp2-float32", f"{self.kind}-float32"
            assert (here.info.kv_kind, roomy.info.kv_kind) == kinds
            assert here.info.fingerprint.startswith(f"{self.kind}-tp2:")
            assert here.info.fetch_s_per_token is not None
        capacity, of_one = pair[0].info.kv_capacity_tokens, roomy.info.kv_capacity_tokens
        assert capacity + self.reserved == 2 * (of_one + self.reserved)  # as many bytes on each device

    def test_moved_at_every_chunk_tokens_are_those_of_one_rank_and_nothing_old_is_prefilled(
        self, pair, pool, cold, prompts, expected, moved
    ):
        for name, sampling in SAMPLINGS.items():
            cold()
            assert pair[0].whole(prompts(5), sampling, TOKENS) == expected[name]
            cold()
            before = pool.stats()
            responses, rounds = moved(pair, prompts(5), sampling, TOKENS, 40)
            assert responses == expected[name]
            outputs = [output for outputs in rounds[1:] for output in outputs]
            assert max(output.prefilled_tokens for output in outputs) <= self.block
            assert min(output.pool_tokens for output in outputs) >= self.block
            counted = pool.stats().since(before)
            assert counted.torn_blocks == 0
            self.expect_got(counted, outputs, self.token_bytes)
            assert counted.put_bytes % self.block_bytes == 0
            assert counted.put_bytes > 0
            assert any(output.drafted_at for output in outputs)

    def expect_got(self, counted, outputs, token_bytes):
        """Compare what came out of the pool, whole blocks, with what was loaded for chunks."""
        loaded = sum(output.pool_tokens for output in outputs) * token_bytes
        assert loaded <= counted.got_bytes <= loaded + len(outputs) * (self.block - 1) * token_bytes
        assert counted.got_bytes % (self.block * token_bytes) == 0

    def test_parts_reach_the_pool_while_their_chunk_runs_and_the_next_chunk_finds_all(
        self, pair, pool, cold, prompts
    ):
        plain, drafting = pair
        [prompt] = prompts(1)
        job = structs.replace(drafting.job(prompt, 400, 0, GOING_ON), last=False)
        drafting.engine.submit(job)
        drafting.run(drafting.until(lambda: pool.stats().used_bytes >= 3 * self.block_bytes))
        assert job.id not in drafting.answers
        drafting.run(drafting.until(lambda: job.id in drafting.answers))
        text = [*prompt, *drafting.outputs[job.id].token_ids]
        [then] = plain.run(plain.chunks([plain.job(text, 40, 0, GOING_ON)]))
        assert then.pool_tokens == (len(text) - 1) // self.block * self.block
        cold()
        [whole] = plain.whole([prompt], GOING_ON, 440)
        assert [*text[len(prompt) :], *then.token_ids] == list(whole)

    def test_a_damaged_part_of_one_rank_makes_the_whole_block_a_miss_and_no_token_another(
        self, pair, pool, cold, prompts, expected
    ):
        a, b = pair
        prompt = prompts(1)[0]
        [first] = a.run(a.chunks([a.job(prompt, 80, 0, PLAIN)]))
        saved = (len(prompt) + 79) // self.block
        rows = np.frombuffer(pool._memory[a.info.id].memory, np.uint8).reshape(-1, 4096)
        begin = np.flatnonzero(rows.any(axis=1))[-1] * 4096  # in the last part of the last block
        rows.reshape(-1)[begin : begin + 64] ^= 255
        del rows
        before = pool.stats()
        [second] = b.run(b.chunks([b.job([*prompt, *first.token_ids], TOKENS - 80, 0, PLAIN)]))
        assert [*first.token_ids, *second.token_ids] == list(expected["plain"][0])
        assert pool.stats().since(before).torn_blocks == 1
        assert second.pool_tokens < saved * self.block

    def test_a_rank_that_is_killed_ends_its_instance_and_the_other_goes_on_with_its_kv(
        self, pair, cold, models, prompts, expected
    ):
        a, b = pair
        firsts = a.run(a.chunks([a.job(prompt, 70, i, PLAIN) for i, prompt in enumerate(prompts(3))]))
        texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts(3), firsts, strict=True)]
        jobs, seen = [a.job(text, 600, i, GOING_ON) for i, text in enumerate(texts)], len(a.reports)
        for job in jobs:
            a.engine.submit(job)
        a.run(
            a.until(
                lambda: (
                    any(report.running for report in a.reports[seen:])
                    or all(job.id in a.answers for job in jobs)
                )
            )
        )
        assert not [a.failures[job.id] for job in jobs if job.id in a.failures]
        home = Path(f"/proc/{a.pid}/cwd").resolve().name
        rank = rank_of(a.pid, self.second)
        assert not [name for name in shared_by(a.pid, rank) if name.startswith(("psm_", "sem.mp-"))]
        os.kill(rank, signal.SIGKILL)
        a.run(a.until(lambda: bool(a.losses)))
        assert len(a.losses) == 1
        assert "rank" in a.losses[0]
        assert [*SHARED_MEMORY.glob(f"*{home}*")] == []

        def go_on(here):
            outputs = here.run(
                here.chunks([here.job(text, TOKENS - 70, i, PLAIN) for i, text in enumerate(texts)])
            )
            for output, first, whole in zip(outputs, firsts, expected["plain"], strict=False):
                assert [*first.token_ids, *output.token_ids] == list(whole)
                assert output.prefilled_tokens <= self.block

        go_on(b)
        a.run(a.engine.start(a))
        a.run(a.engine.update_weights(directory(models[0]), a.weight_version))
        go_on(a)

    def test_ranks_asleep_and_awake_again_find_their_kv_in_the_pool(self, pair, cold, prompts, expected):
        here, _ = pair
        prompt = prompts(1)[0]
        [first] = here.run(here.chunks([here.job(prompt, 80, 0, PLAIN)]))
        assert here.run(here.engine.sleep()) > self.block_bytes
        here.run(here.engine.wake())
        text = [*prompt, *first.token_ids]
        [second] = here.run(here.chunks([here.job(text, TOKENS - 80, 0, PLAIN)]))
        assert [*first.token_ids, *second.token_ids] == list(expected["plain"][0])
        assert second.prefilled_tokens <= self.block

    def test_new_weights_by_memory_and_broadcast_reach_every_rank_and_find_no_kv_of_the_old_ones(
        self, pair, cold, roomy, models, prompts
    ):
        from safetensors.torch import load_file
        from seer_worker.weights.broadcast import BroadcastWeights

        a, b = pair
        b.group = self.plain_group
        a.whole(prompts(4), PLAIN, 100)
        tensors = load_file(models[1] / "model.safetensors")
        with (
            SharedWeights() as shared,
            BroadcastWeights(piece_bytes=1 << 16) as sender,
            shared.offer(tensors.items()) as source,
            sender.offer(source) as sent,
        ):
            for here in (a, b, roomy):
                here.weight_version += 1
                version = here.weight_version
                by_directory = here.run(here.engine.update_weights(directory(models[1]), version))
                assert here.run(here.engine.update_weights(source, version)) == by_directory
                assert here.run(here.engine.update_weights(sent, version)) == by_directory
        expected = roomy.whole(prompts(4), PLAIN, 100)
        outputs = b.run(b.chunks([b.job(prompt, 60, i, PLAIN) for i, prompt in enumerate(prompts(4))]))
        assert {output.pool_tokens for output in outputs} == {0}
        assert max(output.cached_tokens for output in outputs) < self.least_cached
        for i, (prompt, output) in enumerate(zip(prompts(4), outputs, strict=True)):
            response = list(output.token_ids)
            if not output.stopped:
                [rest] = a.run(a.chunks([a.job([*prompt, *response], 40, i, PLAIN)]))
                assert rest.pool_tokens > 0
                response += rest.token_ids
            assert response == list(expected[i])
        for here in (a, b, roomy):
            here.weight_version += 1
            here.run(here.engine.update_weights(directory(models[0]), here.weight_version))
        b.group = self.drafting_group

    def test_weights_of_another_shape_are_refused_and_change_nothing(
        self, pair, cold, one_head_model, prompts, expected
    ):
        here, _ = pair
        with pytest.raises(EngineError, match="k_proj"):
            here.run(here.engine.update_weights(directory(one_head_model), here.weight_version + 1))
        assert here.whole(prompts(5), PLAIN, TOKENS) == expected["plain"]

    def test_a_rank_that_cannot_read_its_part_costs_the_pool_and_no_token(
        self, start, models, own_pool, prompts, expected
    ):
        def change(launch):
            return attrs.evolve(launch, instance=self.broken)

        harness = start(models[0], kv_pool=own_pool, index=1, change=change, tensor_parallel=2)
        assert harness.divided(prompts(5), PLAIN, TOKENS, chunk_tokens=40) == expected["plain"]
        assert harness.losses == []
        [degradation] = harness.degradations
        assert degradation.what == "kv_pool"
        flaw = "rank 1 cannot read its part of the KV: OSError: rank 1 has lost its memory"
        assert flaw in degradation.reason
        harness.run(harness.engine.stop())

    def test_a_head_that_both_ranks_have_is_stored_once(self, start, one_head_model, loop, prompts, moved):
        self.expect_one_head_stored(1, start, one_head_model, loop, prompts, moved)

    def expect_one_head_stored(self, times, start, one_head_model, loop, prompts, moved):
        """Check that two ranks store the KV of a model of one head so many times, and go on with it."""
        pool = LocalPool(64 << 20)
        loop.run_until_complete(pool.start([f"{self.kind}-0"]))
        one, two = start(one_head_model), start(one_head_model, kv_pool=pool, tensor_parallel=2)
        assert one.info.kv_bytes_per_token == self.token_bytes // 2
        assert two.info.kv_bytes_per_token == times * one.info.kv_bytes_per_token
        before = pool.stats()
        responses, rounds = moved([two], prompts(3), PLAIN, 120, 40)
        assert responses == one.whole(prompts(3), PLAIN, 120)
        outputs = [output for outputs in rounds[1:] for output in outputs]
        assert max(output.prefilled_tokens for output in outputs) <= self.block
        self.expect_got(pool.stats().since(before), outputs, times * self.token_bytes // 2)
        for here in (one, two):
            here.run(here.engine.stop())
        loop.run_until_complete(pool.stop())

    def expect_all_to_end_together(self, pair):
        """Kill the worker of the one instance, and while it is idle a rank of the other."""
        for here, kill in zip(pair, (lambda here: here.pid, self.second_of), strict=True):
            leader, children = here.pid, children_of(here.pid)
            losses, here.used_up = len(here.losses), True
            os.kill(kill(here), signal.SIGKILL)
            here.run(here.until(lambda here=here, losses=losses: len(here.losses) > losses))
            assert len(children) >= self.processes
            eventually(lambda pids=(leader, *children): not any(map(alive, pids)))

    def second_of(self, here):
        return rank_of(here.pid, self.second)


KILL_AT = 30
"""The chunk on whose way the kill comes."""
FREE = StepTimes((1, 64), (0, 8), ((1.0, 1.0), (1.0, 1.0)))
"""Drafts cost nothing, so as many as there are get verified; and no instance measures its steps."""


CONFIG = """
[seer]
engine = "{engine}"
kv_pool = "local"
plugins = []
restarts = {{ attempts = 0 }}

[engine.{engine}]
model = "{model}"
dtype = "float32"
instances = 2
tensor_parallel = 2
kv_cache_bytes = 33_554_432
max_model_tokens = 1024
start_timeout_s = 300.0

[plugin.divided_rollout]
chunk_tokens = 48

[plugin.grouped_spec]
profile = "{profile}"
"""


def expect_a_rollout_in_which_a_rank_dies(engine, second, model, roomy, prompts, tmp_path):
    """Compare with one rank's a divided and drafted rollout in which a rank, named by ``second``, dies."""
    groups = [PromptGroup(f"g{i}", tuple(prompt), 3, 240, seed=i) for i, prompt in enumerate(prompts(4))]
    jobs = {
        f"{group.id}/{index}": roomy.job(
            group.prompt_token_ids, group.max_tokens, request_seed(group.seed, index), group.sampling
        )
        for group in groups
        for index in range(group.n)
    }
    whole = [list(output.token_ids) for output in roomy.run(roomy.chunks(list(jobs.values())))]
    path, profile = tmp_path / "seer.toml", tmp_path / "profile.json"
    profile.write_bytes(msgspec.json.encode(FREE))
    path.write_text(CONFIG.format(engine=engine, model=model, profile=profile))
    config = load_config(path).with_plugins(("divided_rollout", "grouped_spec"))

    async def respond():
        async with Runtime.from_config(config) as runtime:

            def kill():
                os.kill(rank_of(runtime.engines[f"{engine}-1"].worker.pid, second), signal.SIGKILL)
                return True

            strategies = fill_slots(config)
            policies = attrs.evolve(
                strategies.policies, placer=Slot("placer", "test", Mover([(KILL_AT, kill)]))
            )
            await runtime.use(attrs.evolve(strategies, policies=policies))
            return await runtime.rollout(groups).wait()

    result = asyncio.run(asyncio.wait_for(respond(), 900))
    found = {one.request_id: list(one.token_ids) for one in result.completions}
    assert found == dict(zip(jobs, whole, strict=True))
    assert result.summary.instances_lost == 1
    assert result.summary.migrations > 5
    assert result.summary.accepted_tokens > 0
    assert result.summary.pool_tokens > 0
