"""Settings, the doctor, and what a machine may lack."""

import asyncio
import shutil
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import seer_mooncake
from seer_host import machine_memory
from seer_mooncake import MooncakePool, Settings, store, system
from seer_mooncake import pool as pool_module
from seer_mooncake.store import MooncakeStore
from seer_worker.client.local import LocalLauncher

from seer_core.errors import ConfigError, EngineError, PluginError
from seer_core.plugins.hookspecs import Check, Startup
from seer_core.ports.kv import StoreContext

pytestmark = pytest.mark.no_mooncake


def test_the_factory_starts_nothing(tmp_path):
    pool = seer_mooncake.seer_make_kv_pool(
        Settings(1 << 40, disk_bytes=1 << 40, disk_path="cold"), Startup(0, tmp_path), None
    )
    assert pool.directory == tmp_path / "cold"
    assert pool.stats().capacity_bytes == 1 << 40
    asyncio.run(pool.clear())
    asyncio.run(pool.stop())


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"capacity_bytes": 1 << 20}, "16777216"),
        ({"master": "somewhere"}, "master"),
        ({"protocol": "udp"}, "udp"),
        ({"on_failure": "cry"}, "cry"),
        ({"timeout_s": 0.0}, "timeout_s"),
    ],
)
def test_what_is_no_setting_is_named(settings, fact):
    with pytest.raises(msgspec.ValidationError, match=fact):
        msgspec.convert(settings, Settings)


def test_the_doctor_names_missing_libraries_and_how_to_get_them(monkeypatch, tmp_path):
    (tmp_path / "mooncake_master").touch()
    monkeypatch.setattr(system, "master_binary", lambda: tmp_path / "mooncake_master")
    monkeypatch.setattr(system, "LIBRARIES", {"libc.so.6": "libc6", "libwhale.so.9": "libwhale9"})
    [check] = seer_mooncake.seer_doctor(None, None)
    assert (check.part, check.ok) == ("kv_pool", False)
    assert check.finding.endswith("of this system: libwhale.so.9")
    assert check.remedy == "run scripts/install-system-packages, or: apt-get install libwhale9"
    with pytest.raises(PluginError, match=r"libwhale.so.9; run .*; or set kv_pool"):
        asyncio.run(MooncakePool(Settings()).start(["a"]))


def test_the_doctor_names_a_missing_package(monkeypatch):
    monkeypatch.setattr(system, "master_binary", lambda: None)
    [check] = seer_mooncake.seer_doctor(None, None)
    assert (check.finding, check.ok) == ("Mooncake is not installed", False)
    assert "make setup" in check.remedy


def test_the_doctor_compares_memory_and_disk_with_what_there_is(tmp_path):
    startup = Startup(0, tmp_path)

    def checks(**settings):
        return seer_mooncake.seer_doctor(Settings(**settings), startup)[1:]

    assert [check.ok for check in checks(disk_path=".", disk_bytes=1 << 20)] == [True, True]
    memory, disk = checks(capacity_bytes=1 << 50, disk_path=".", disk_bytes=shutil.disk_usage("/").total * 2)
    assert not memory.ok
    assert not disk.ok
    assert "lower disk_bytes" in disk.remedy
    assert len(checks(disk_path="nowhere")) == 1
    [_, disk] = checks(disk_path="nowhere", disk_bytes=1 << 20)
    assert not disk.ok
    assert disk.finding == f"{tmp_path / 'nowhere'} is no directory, or cannot be written"


def test_a_pool_must_fit_into_what_a_cgroup_allows(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_memory, "CGROUP", tmp_path)
    for name, text in (("max", "33554432"), ("current", "0"), ("stat", "inactive_file 0\nactive_file 0")):
        (tmp_path / f"memory.{name}").write_text(text)
    found = [
        seer_mooncake.seer_doctor(Settings(size), Startup(0, tmp_path))[1].ok for size in (32 << 20, 33 << 20)
    ]
    assert found == [True, False]


class Elsewhere(LocalLauncher):
    """Names an address that is kept for documents."""

    async def address(self):
        return "192.0.2.1"


def test_an_address_at_which_no_master_can_listen_is_named(monkeypatch):
    monkeypatch.setattr(pool_module, "installation", lambda: Check("kv_pool", True, "", ""))
    fact = r"cannot listen at 192\.0\.2\.1: Cannot assign requested address; correct .* launcher's table; or"
    with pytest.raises(PluginError, match=fact):
        asyncio.run(MooncakePool(Settings(), None, Elsewhere()).start(["a"]))
    pool = MooncakePool(Settings(on_failure="go_on"), None, Elsewhere())
    asyncio.run(pool.start(["a"]))
    assert "192.0.2.1" in pool.store("a").settings["reason"]


CLUSTER = Startup(0, Path("."), workers_here=False)


@pytest.mark.parametrize(
    ("settings", "fact"),
    [
        ({"host": "10.0.0.7"}, "'10.0.0.7' names one machine.*; leave it out"),
        ({"master": "127.0.0.1:50051"}, "'127.0.0.1:50051' is on loopback.*; name the address"),
        ({"master": "localhost:50051"}, "'localhost:50051' is on loopback.*; name the address"),
    ],
)
def test_what_names_one_machine_is_refused_on_a_cluster(settings, fact):
    settings = Settings(**settings)
    seer_mooncake.seer_make_kv_pool(settings, CLUSTER, None)
    with pytest.raises(ConfigError, match=fact):
        seer_mooncake.seer_make_kv_pool(settings, CLUSTER, LocalLauncher())
    check = seer_mooncake.seer_doctor(settings, CLUSTER)[-1]
    assert not check.ok
    assert check.remedy


def test_on_a_cluster_the_doctor_leaves_memory_and_disk_to_the_nodes():
    [_, check] = seer_mooncake.seer_doctor(Settings(1 << 50, disk_bytes=1 << 60, disk_path="no"), CLUSTER)
    assert check.ok
    assert "each instance checks its node" in check.finding
    [check] = seer_mooncake.seer_doctor(Settings(master="10.0.0.1:50051"), CLUSTER)
    assert check.ok


def test_a_node_without_the_memory_that_an_instance_lends_is_named(monkeypatch):
    monkeypatch.setattr(store, "_import", lambda node: None)
    pool = MooncakePool(Settings(1 << 50), None, LocalLauncher())
    pool._on, pool._secret = True, "00" * 32
    with pytest.raises(EngineError, match=r"node here: .* lower \[kv_pool.mooncake\].capacity_bytes"):
        MooncakeStore(pool.store("a").settings, StoreContext("a", 4096, 32, node="here"))


def test_each_extra_names_one_of_the_wheels_that_own_the_module():
    requires = distribution("seer-mooncake").requires
    wheels = [one for one in requires if one.startswith("mooncake")]
    assert len(wheels) == len({one.split("extra ==")[1] for one in wheels}) == 3


def test_a_store_is_given_the_transport_that_the_settings_name(tmp_path):
    settings = Settings(host="10.0.0.7", protocol="rdma", device="mlx5_0", buffer_bytes=1 << 21)
    pool = MooncakePool(settings, tmp_path)
    pool._on, pool._shares = True, 2
    found = pool.store("b").settings
    assert [found[name] for name in ("host", "protocol", "device")] == ["10.0.0.7", "rdma", "mlx5_0"]
    assert (found["segment_bytes"], found["buffer_bytes"]) == (settings.capacity_bytes // 2, 1 << 21)


class FarClient:
    """A client whose puts end with one code, or get no answer without one."""

    def __init__(self, *arguments):
        pass

    def batch(self, method, keys, *arguments):
        return [] if self.code is None else [self.code] * len(keys)

    def later(self, work):
        pass


@pytest.mark.parametrize(("code", "refused"), [(None, 0), (-1, 0), (store.FULL, 3)])
def test_blocks_count_as_refused_only_for_want_of_room(code, refused, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_import", lambda node: None)
    monkeypatch.setattr(store, "MooncakeClient", FarClient)
    monkeypatch.setattr(store, "PAUSES_S", ())
    monkeypatch.setattr(FarClient, "code", code, raising=False)
    pool = MooncakePool(Settings(), tmp_path)
    pool._on, pool._secret = True, "00" * 32
    one = MooncakeStore(pool.store("a").settings, StoreContext("a", 4096, 32))
    one.put([bytes([number]) * 32 for number in range(3)], np.zeros((3, 4096), np.uint8))
    assert one.take_message() == ({"refused_blocks": refused} if refused else {})


class Unregistering:
    """A client of Mooncake's that registers no buffer, as without the right to lock memory."""

    made = closed = 0

    def __init__(self):
        Unregistering.made += 1

    def setup(self, *arguments):
        return 0

    def register_buffer(self, address, size):
        return -1

    def close(self):
        Unregistering.closed += 1


def test_a_client_that_registers_no_buffer_is_ended(monkeypatch):
    module = SimpleNamespace(MooncakeDistributedStore=Unregistering)
    monkeypatch.setattr(store, "_import", lambda node: module)
    monkeypatch.setattr(store, "answers", lambda *master: True)
    pool, reasons = MooncakePool(Settings()), []
    pool._on, pool._secret = True, "00" * 32
    MooncakeStore(pool.store("a").settings, StoreContext("a", 4096, 32, report=reasons.append)).close()
    assert "Mooncake does not register the buffer" in reasons[0]
    assert Unregistering.made == Unregistering.closed == 1


def test_an_instance_that_joins_again_lends_its_memory_once():
    pool = MooncakePool(Settings(capacity_bytes=32 << 20))
    pool._on, pool._shares, pool._instances = True, 2, ("a", "b")
    for name in ("c", "a", "c"):
        asyncio.run(pool.add(name))
    assert pool.stats().capacity_bytes == 48 << 20
