"""Chunks that end where KV runs short, while a step is being planned: what of their KV is saved."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.installed import skip_without

HASHES = [bytes([number]) * 32 for number in range(4)]
BLOCK = 16


@pytest.fixture(scope="module")
def parts():
    """The parts of vLLM and of the backend that a chunk passes at its end."""
    skip_without("vllm")
    from seer_vllm import connector, early_ends, kv_groups
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import RequestStatus

    return SimpleNamespace(
        connector=connector.StoreConnector,
        ends=early_ends.EarlyEnds,
        groups=kv_groups,
        pool=BlockPool,
        status=RequestStatus,
    )


@pytest.fixture
def connected(parts) -> Iterator[SimpleNamespace]:
    """A connector of a model with a recurrent group, the pool of vLLM's blocks, and what has been saved."""
    from seer_worker.process.pooling import PooledRequests
    from seer_worker.process.stores import FailsafeStore

    groups, saved = parts.groups, []
    connector = object.__new__(parts.connector)
    first, state = groups.KvGroup(0, BLOCK), groups.KvGroup(1, BLOCK, 1, recurrent=True)
    connector.groups = groups.KvGroups(first, (state,), BLOCK)
    connector.requests = PooledRequests(FailsafeStore(None), 64)
    connector.requests.save = lambda keys, read: saved.append(list(keys))
    connector.saves, connector._is_planning = True, False
    connector._kv = SimpleNamespace(num_blocks=16)
    connector._running, connector._cached_tokens = {}, {}
    connector._places, connector._staged_keys, connector._awaited = {}, [], {}
    pool = parts.pool(16, enable_caching=True, hash_block_size=BLOCK)
    connector._kv_cache_manager = SimpleNamespace(block_pool=pool)
    yield SimpleNamespace(connector=connector, pool=pool, saved=saved, state=state)
    connector.requests.close()


def request_of(parts, name):
    """Return a request of two full blocks, which is to go on elsewhere."""
    job = {"group": "g", "prompt_tokens": 2 * BLOCK, "last": False, "trajectory": None, "turns": False}
    return SimpleNamespace(
        request_id=name,
        client_index=0,
        block_hashes=HASHES[:2],
        num_computed_tokens=2 * BLOCK,
        num_tokens=2 * BLOCK + 1,
        num_output_tokens=1,
        sampling_params=SimpleNamespace(extra_args=job, max_tokens=8),
        status=parts.status.RUNNING,
        get_finished_reason=lambda: None,
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
@pytest.mark.parametrize("holder", ["another request", "none"])
def test_a_state_that_the_step_being_planned_may_have_yet_to_fill_is_not_saved(parts, connected, holder):
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    own = connected.pool.get_new_blocks(2)
    [state] = connected.pool.get_new_blocks(1)
    connected.pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(HASHES[1], 1), state)
    if holder == "none":
        connected.pool.free_blocks([state])
    tables = [block.block_id for block in own], [0, 0]

    def free(request):
        return connected.connector.request_finished_all_groups(request, tables)[1], None

    scheduler = SimpleNamespace(connector=connected.connector, _free_request=free)
    parts.ends(parts.status.FINISHED_LENGTH_CAPPED).end(scheduler, request_of(parts, "ended"))
    [key] = connected.connector.groups.keys(HASHES, connected.state, [1])
    assert connected.saved == [[*HASHES[:2], *([key] if holder == "none" else [])]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
@pytest.mark.parametrize("trajectory", [None, "a trajectory"])
def test_of_a_preempted_request_an_older_place_is_dropped_but_all_of_a_trajectory_stays(
    parts, connected, trajectory
):
    from seer_vllm.connector import KvPlace
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    own = connected.pool.get_new_blocks(2)
    [state] = connected.pool.get_new_blocks(1)
    connected.pool.cached_block_hash_to_block.insert(make_block_hash_with_group_id(HASHES[1], 1), state)
    connected.pool.free_blocks([state])
    dropped = []
    connector, request = connected.connector, request_of(parts, "preempted")
    connector.requests.drop = dropped.extend
    connector._kv_cache_manager.get_block_ids = lambda name: ([block.block_id for block in own], [0, 0])
    connector._places["preempted"] = KvPlace(0, BLOCK, [], [])
    request.sampling_params.extra_args |= {"trajectory": trajectory, "prompt_tokens": BLOCK // 2}
    connector.request_preempted(request)
    older, newer = connector.groups.keys(HASHES, connected.state, [0, 1])
    assert connected.saved == [[*HASHES[:2], newer]]
    assert dropped == ([] if trajectory else [older])


def finish(parts, connected, job, status, *, own=True, awaited=False):
    """End a request that has no group beside its first one, and whose blocks may be on their way."""
    connector, request = connected.connector, request_of(parts, "ended")
    connector.groups = parts.groups.KvGroups(connector.groups.first, (), BLOCK)
    request.status = getattr(parts.status, f"FINISHED_{status}")
    request.sampling_params.extra_args |= job
    connector.saves_aborted = not own
    if awaited:
        connector._awaited["ended"] = object()
    tables = ([block.block_id for block in connected.pool.get_new_blocks(2)],)
    connector.request_finished_all_groups(request, tables)
    return connected.saved


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
@pytest.mark.parametrize("job", [{}, {"trajectory": "t"}], ids=["response", "trajectory"])
def test_what_goes_on_elsewhere_is_saved_and_what_is_still_being_loaded_is_not(parts, connected, job):
    assert finish(parts, connected, job, "ABORTED", own=False, awaited=True) == []
    connected.connector._awaited.clear()
    assert finish(parts, connected, job, "ABORTED", own=False) == [HASHES[:2]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_an_aborted_chunk_of_a_trajectory_is_saved_where_it_goes_on_elsewhere_alone(parts, connected):
    assert finish(parts, connected, {"trajectory": "t"}, "ABORTED") == []
    assert finish(parts, connected, {"trajectory": "t"}, "STOPPED") == [HASHES[:2]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_blocks_of_a_response_that_is_over_are_put_before_they_are_dropped(parts, connected):
    connector, calls = connected.connector, []
    connector._handed, connector._read = SimpleNamespace(into=None), lambda numbers: numbers
    connector._staged_keys = [HASHES[1]]
    connector.requests.save_beside = lambda keys, blocks: calls.append(("put", keys))
    connector.requests.drop = lambda keys: calls.append(("drop", keys))
    finish(parts, connected, {"last": True, "prompt_tokens": BLOCK}, "STOPPED")
    assert calls == [("put", [HASHES[1]]), ("drop", [HASHES[1]])]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_tokens_that_a_preempted_request_loads_again_are_none_of_those_it_was_let_in_with(parts):
    from seer_vllm.served_kv import SeerConnector, ServedStats

    connector, request = object.__new__(SeerConnector), request_of(parts, "served")
    stats = ServedStats(request=request)
    connector._stats, connector._cached_tokens = {"served": stats}, {}
    request.num_preemptions = 1
    connector.update_state_after_alloc(request, None, 2 * BLOCK)
    assert stats.pool_tokens == 0
    request.num_preemptions = 0
    connector.update_state_after_alloc(request, None, BLOCK)
    assert stats.pool_tokens == BLOCK


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
def test_a_chunk_whose_early_end_is_not_reported_yet_may_be_asked_to_end():
    skip_without("vllm")
    from seer_vllm.instance import VllmAdapter

    adapter, running = object.__new__(VllmAdapter), SimpleNamespace(max_tokens=90, num_output_tokens=7)
    adapter._scheduler = SimpleNamespace(requests={"here": running})
    adapter._requests = {"a": "here", "b": "ended"}
    adapter.end_chunk("b")
    adapter.end_chunk("a")
    assert running.max_tokens == 8
