"""slime keeps its servers: the hook over two real SGLang servers, which slime's trainer gives new weights.

Tokens follow from seeds, so they are those of whole responses on one server, also after a fault of the
scheduler or of a server.
"""

from __future__ import annotations

import threading
from argparse import Namespace

import pytest
import seer_slime.rollout
from routers import router_over
from seer_slime import generate_rollout
from slime.rollout import sglang_rollout

from tests.soak.real_servers import WEIGHTS, server_processes, two_checkpoints
from tests.support.eventually import eventually

pytestmark = [pytest.mark.engine, pytest.mark.long]

MID = 20
"""A chunk of twelve responses that is neither one of the first nor one of the last."""


class TrainedServers:
    """Two servers, and the calls of slime's trainer to them; they start with the first version, unnamed."""

    def __init__(self, folder):
        self.checkpoints = two_checkpoints(folder)
        self.each = [
            server_processes.sglang_server(WEIGHTS, folder / f"log-{number}", "--sleep-on-idle")
            for number in range(2)
        ]
        for server in self.each:
            server.start()
        for server in self.each:
            server.await_ready()
        self.urls = [server.url for server in self.each]

    def load(self, version, *servers, name=None):
        """Load a version as slime does from a disk, into all servers if none are given."""
        for path, body in (
            ("/pause_generation", {}),
            ("/flush_cache", {}),
            (
                "/update_weights_from_disk",
                {"model_path": str(self.checkpoints[version - 1]), "weight_version": name or str(version)},
            ),
            ("/continue_generation", {}),
        ):
            for server in servers or self.each:
                server.call(path, body)

    def sleep_and_wake(self):
        """Have them give their memory to a trainer, and take it again, as slime's ``--offload-rollout``."""
        for path in ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation"):
            for server in self.each:
                server.call(path, {})

    def close(self):
        for server in self.each:
            server.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    found = TrainedServers(tmp_path_factory.mktemp("pair"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def routed(pair, tmp_path_factory):
    """Return a router over both, and one over the first alone."""
    folder = tmp_path_factory.mktemp("routers")
    found = [router_over(urls, folder / f"log-{len(urls)}") for urls in (pair.urls, pair.urls[:1])]
    yield found
    for router in found:
        router.close()


@pytest.fixture
def servers(pair, routed, engines):
    """The servers with version 1, and the address of the router over both."""
    pair.load(1)
    pair.router = routed[0].router
    return pair


@pytest.fixture
def args(args):
    args.rollout_max_response_len = 96
    args.sglang_enable_deterministic_inference = True
    return args


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def whole(kept, servers, routed, engines, source, known):
    """Return a function: the samples of a rollout whose responses run whole on one server."""

    def of(version, rollout_id):
        if (version, rollout_id) not in known:
            servers.load(version)
            args = Namespace(**vars(kept(1024)))
            args.sglang_router_ip, args.sglang_router_port = address_of(routed[1])
            output = generate_rollout(args, rollout_id, type(source)())
            assert output.metrics["rollout/seer/chunks"] == 12
            known[version, rollout_id] = samples_of(output)
            engines[-1].close()
            seer_slime.rollout.engines_of.cache_clear()
            servers.load(1)
        return known[version, rollout_id]

    return of


def address_of(router):
    host, _, port = router.router.removeprefix("http://").partition(":")
    return host, port


def samples_of(output):
    return [sample for group in output.samples for sample in group]


def require_same(samples, wanted):
    """Require the same tokens and weights, and log-probs that differ by rounding alone."""
    for mine, theirs in zip(samples, wanted, strict=True):
        assert mine.tokens == theirs.tokens
        assert mine.weight_versions == theirs.weight_versions
        assert mine.status == theirs.status
        assert mine.rollout_log_probs == pytest.approx(theirs.rollout_log_probs, abs=1e-4)


def figure(output, name):
    return output.metrics[f"rollout/seer/{name}"]


def test_divided_over_two_servers_a_batch_is_that_of_whole_responses_on_one(kept, whole, source, engines):
    wanted = whole(1, 0)
    output = generate_rollout(kept(16), 0, source)
    require_same(samples_of(output), wanted)
    assert figure(output, "chunks") > 24
    assert figure(output, "exactness") == 2
    assert len(engines[-1].session.runtime.alive) == 2


def test_an_evaluation_with_a_top_p_of_its_own_is_that_of_whole_responses_too(
    kept, servers, routed, source, engines, evaluation_set
):
    evaluation_set.max_response_len = 96
    found = []
    for router, chunk_tokens in zip(routed, (16, 1024), strict=True):
        args = kept(chunk_tokens)
        args.eval_datasets = [evaluation_set]
        args.sglang_router_ip, args.sglang_router_port = address_of(router)
        output = generate_rollout(args, 0, source, evaluation=True)
        found.append(output.data["held out"]["samples"])
        assert engines[-1].session.result.summary.exactness == "exact"
    require_same(*found)
    divided, whole = (each.session.result.summary.chunks for each in engines)
    assert divided > whole == 4


def test_a_canary_finds_nothing_until_one_server_has_other_weights_and_then_slimes_own_rollout_runs(
    kept, whole, servers, own_client, source, engines
):
    wanted = whole(1, 1)
    args = kept(16)
    args.seer_canary, args.seer_canary_stop = 4, 1
    first = generate_rollout(args, 0, source)
    assert (figure(first, "canary_compared"), figure(first, "canary_different")) == (4, 0)
    address = engines[-1].session.runtime.engines["remote-1"].address  # of two, the first is believed
    servers.load(2, *(each for each in servers.each if each.url == address), name="1")
    second = generate_rollout(args, 1, type(source)())
    require_same(samples_of(second), wanted)  # Seer has found the server out, and slime's router has not
    assert figure(second, "canary_compared") == 8
    assert figure(second, "canary_different") > 0
    third = generate_rollout(args, 2, source)
    assert len(own_client) == 8 + 12
    assert not any(name.startswith("rollout/seer/") for name in third.metrics or {})


def test_switched_off_the_batch_is_that_of_slimes_own_rollout(kept, own_client, source, engines, monkeypatch):
    args = kept(16)
    stock = sglang_rollout.generate_rollout(args, 0, type(source)())
    monkeypatch.setenv("SEER", "off")
    output = generate_rollout(args, 0, source)
    require_same(samples_of(output), samples_of(stock))
    assert len(own_client) == 24
    assert not engines


@pytest.fixture
def hanging(in_midst, engines):
    """Return a function that has Seer's scheduler hang at its chunk of that number until the test is over."""
    over = threading.Event()
    yield lambda number: in_midst(number, over.wait)
    over.set()


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_scheduler_that_fails_or_hangs_in_mid_rollout_changes_no_token(
    kept, whole, own_client, source, breaking, hanging, fault
):
    wanted, later = whole(1, 0), whole(1, 1)
    args = kept(16)
    if fault == "hangs":
        args.seer_stall_s = 10.0
        hanging(MID)
    else:
        breaking(MID)
    output = generate_rollout(args, 0, source)
    assert figure(output, "fallbacks") == len(own_client) > 0
    require_same(samples_of(output), wanted)
    args.seer_stall_s = 600.0
    after = generate_rollout(args, 1, type(source)())
    assert figure(after, "fallbacks") == 0
    require_same(samples_of(after), later)


def test_weights_that_come_between_rollouts_while_servers_sleep_write_all_that_follows(
    kept, whole, servers, source
):
    wanted = whole(1, 0), whole(2, 1)
    args = kept(16)
    require_same(samples_of(generate_rollout(args, 0, source)), wanted[0])
    servers.sleep_and_wake()
    servers.load(2)
    require_same(samples_of(generate_rollout(args, 1, type(source)())), wanted[1])


def test_weights_that_come_in_mid_rollout_mix_with_no_others_in_a_response(
    kept, whole, servers, own_client, source, in_midst
):
    wanted = whole(1, 0), whole(2, 0)
    args = kept(16)
    args.seer_stall_s = 20.0
    in_midst(MID, lambda: servers.load(2))
    output = generate_rollout(args, 0, source)
    assert figure(output, "fallbacks") > 0
    samples = samples_of(output)
    newer = [bool(sample.metadata.get("seer_fallback")) for sample in samples]
    require_same(samples, [wanted[new][place] for place, new in enumerate(newer)])


def test_a_server_that_alone_has_new_weights_in_mid_rollout_writes_nothing_until_the_other_has_them(
    kept, whole, servers, source, in_midst
):
    wanted = whole(1, 0), whole(2, 1)
    args = kept(16)
    in_midst(MID, lambda: servers.load(2, servers.each[1]))
    output = generate_rollout(args, 0, source)
    assert figure(output, "fallbacks") == 0
    require_same(samples_of(output), wanted[0])
    servers.load(2, servers.each[0])
    require_same(samples_of(generate_rollout(args, 1, type(source)())), wanted[1])


def test_a_server_that_is_killed_costs_no_token_and_is_used_again_once_slime_has_loaded_its_weights(
    kept, whole, servers, source, engines, in_midst
):
    wanted = [whole(1, number) for number in range(3)]
    args, [_, killed] = kept(16), servers.each
    args.offload_rollout = False  # or else Seer looks for it at the next rollout
    in_midst(MID, killed.kill)
    output = generate_rollout(args, 0, source)
    assert figure(output, "instances_lost") == 1
    assert figure(output, "fallbacks") == 0
    require_same(samples_of(output), wanted[0])
    killed.start()
    killed.await_ready()
    require_same(samples_of(generate_rollout(args, 1, type(source)())), wanted[1])
    runtime = engines[-1].session.runtime
    assert len(runtime.alive) == 1  # the other's weights have another name
    servers.load(1, killed)
    eventually(lambda: len(runtime.alive) == 2, "the server is used again", logs=[killed.log])
    require_same(samples_of(generate_rollout(args, 2, type(source)())), wanted[2])
