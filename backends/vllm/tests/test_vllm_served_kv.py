"""Seer's KV connector in a stock server: keys, and what a chunk has cost; without an engine."""

from types import SimpleNamespace

import numpy as np
import pytest
from msgspec import json
from seer_worker.served import JOB, ServedJob

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]  # imports vLLM: ten seconds

BLOCK = 4


class Shelf:
    """A ``KVStore`` of one test."""

    def __init__(self):
        self.blocks = {}

    def find(self, keys):
        return next((n for n, key in enumerate(keys) if key not in self.blocks), len(keys))

    def lacks(self, keys):
        return [n for n, key in enumerate(keys) if key not in self.blocks]

    def put(self, keys, blocks):
        self.blocks |= dict(zip(keys, blocks.copy(), strict=True))

    def get(self, keys, blocks):
        for n, key in enumerate(keys):
            blocks[n] = self.blocks[key]
        return len(keys)

    def drop(self, keys):
        for key in keys:
            self.blocks.pop(key, None)

    def close(self):
        self.blocks = {}


@pytest.fixture(scope="module")
def connector():
    """Return a function that makes a server's connector, which shares by a name."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("vllm")
    from seer_vllm.served_kv import SeerConnector
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    def make(shelf, name="model-1"):
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])]
        config = SimpleNamespace(
            kv_transfer_config=KVTransferConfig(kv_connector="SeerConnector", kv_role="kv_both"),
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
            model_config=SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: 1),
        )
        kv = SimpleNamespace(kv_cache_groups=groups, num_blocks=8)
        made = SeerConnector(config, KVConnectorRole.SCHEDULER, kv)
        made.attach(
            shelf, lambda ids: np.full((len(ids), made.block_bytes), 7, np.uint8), print, beside=False
        )
        made.share(name)
        return made

    return make


def request(tokens, *, ours=True, salt="a", most=20):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    job = json.encode(ServedJob("g/0", "g", 4)).decode()
    params = SamplingParams(max_tokens=most, extra_args={JOB: job} if ours else {})
    return Request("r", list(tokens), params, None, cache_salt=salt)


def end(made, one, block_ids, status="FINISHED_ABORTED"):
    """Let a request end; return its answer's part."""
    from vllm.v1.request import RequestStatus

    one.status = RequestStatus[status]
    return made.request_finished(one, block_ids)[1]


def ended(made, tokens, **named):
    """Let a request run to its end, without a token more; return its answer's part."""
    one = request(tokens, **named)
    made.get_num_new_matched_tokens(one, 0)
    one.num_computed_tokens = one.num_tokens
    return end(made, one, list(range(1, 1 + one.num_tokens // BLOCK)))


def found(made, tokens, **named):
    count, _ = made.get_num_new_matched_tokens(request(tokens, **named), 0)
    return count


def test_another_server_that_shares_by_the_same_name_finds_what_a_chunk_has_left(
    connector,
):
    shelf = Shelf()
    ended(connector(shelf), range(13))
    assert found(connector(shelf), range(13), salt="b") == 12
    assert found(connector(shelf), [*range(8), 99, 98, 97, 96, 95]) == 8
    assert found(connector(shelf, "model-2"), range(13)) == 0
    assert found(connector(shelf, None), range(13)) == 0


def test_other_clients_requests_are_neither_saved_nor_loaded(connector):
    shelf = Shelf()
    assert ended(connector(shelf), range(13), ours=False) is None
    assert shelf.blocks == {}
    ended(connector(shelf), range(13))
    assert found(connector(shelf), range(13), ours=False) == 0


def test_a_request_that_has_run_under_two_names_is_not_saved(connector):
    shelf = Shelf()
    made = connector(shelf)
    one = request(range(13))
    made.get_num_new_matched_tokens(one, 0)
    made.share(None)  # its server's weights may have changed
    made.share("model-1b")
    one.num_computed_tokens = 13
    end(made, one, [1, 2, 3])
    assert shelf.blocks == {}


def test_an_answer_says_what_the_pool_had_and_what_became_of_drafts(connector):
    shelf = Shelf()
    ended(connector(shelf), range(13))
    made = connector(shelf)
    one = request(range(13))
    count, _ = made.get_num_new_matched_tokens(one, 0)
    made.update_state_after_alloc(one, SimpleNamespace(get_block_ids=lambda: ([1, 2, 3, 4],)), count)
    manager = SimpleNamespace(get_block_ids=lambda _: ([1, 2, 3, 4],), block_pool=None)
    made.bind_kv_cache_manager(manager)
    for drafts, kept in (([], [20]), ([21, 22], [21, 22, 23]), ([], [26]), ([24, 9], [24, 25])):
        made.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens={"r": 1 + len(drafts)},
                scheduled_spec_decode_tokens={"r": drafts} if drafts else {},
            )
        )
        one.append_output_token_ids(kept)
    one.num_computed_tokens = one.num_tokens - 1
    cost = end(made, one, [1, 2, 3, 4], "FINISHED_LENGTH_CAPPED")["seer"]
    assert cost == {"pool_tokens": 12, "steps": 4, "drafted_at": [2, 2], "accepted_at": [2, 1]}
    assert len(shelf.blocks) == 4  # of 20 tokens, the last of which has no KV yet
