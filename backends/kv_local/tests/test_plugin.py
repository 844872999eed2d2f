import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import pytest
import seer_kv_local
from seer_kv_local import NodePools

from seer_core.plugins.hookspecs import Startup


def test_the_factory_takes_no_memory(tmp_path):
    pool = seer_kv_local.seer_make_kv_pool(seer_kv_local.Settings(1 << 40), Startup(0, tmp_path), None)
    assert pool.stats().capacity_bytes == 1 << 40
    asyncio.run(pool.clear())
    asyncio.run(pool.stop())


def test_a_capacity_below_a_mebibyte_is_no_setting():
    with pytest.raises(msgspec.ValidationError, match="1048576"):
        msgspec.convert({"capacity_bytes": 1000}, seer_kv_local.Settings)


def test_the_disk_tier_lies_beside_the_config_or_where_temporary_files_go(tmp_path):
    settings = seer_kv_local.Settings(disk_bytes=1 << 20, disk_path="tier")
    pool = seer_kv_local.seer_make_kv_pool(settings, Startup(0, tmp_path), None)
    assert (pool.disk_bytes, pool.disk_path) == (1 << 20, tmp_path / "tier")
    assert pool.stats().disk_capacity_bytes == 1 << 20
    pool = seer_kv_local.seer_make_kv_pool(seer_kv_local.Settings(), Startup(0, tmp_path), None)
    assert pool.disk_path == Path(tempfile.gettempdir())


@pytest.mark.parametrize(
    ("disk_bytes", "path", "fact"),
    [(1, ".", "free in"), (1 << 60, ".", "free in"), (1, "nowhere", "No such file")],
)
def test_the_doctor_looks_for_room_on_the_disk(tmp_path, disk_bytes, path, fact):
    settings = seer_kv_local.Settings(disk_bytes=disk_bytes, disk_path=path)
    memory, disk = seer_kv_local.seer_doctor(settings, Startup(0, tmp_path))
    assert memory.ok
    assert disk.ok is (disk_bytes == 1 and path == ".")
    assert fact in disk.finding
    assert ("disk_path" in disk.remedy) is not disk.ok


@pytest.mark.parametrize(("capacity", "ok"), [(1 << 20, True), (1 << 50, False)])
def test_the_doctor_compares_the_pool_with_the_memory(capacity, ok):
    [check] = seer_kv_local.seer_doctor(seer_kv_local.Settings(capacity), None)
    assert check.ok is ok
    assert ("lower [kv_pool.local].capacity_bytes" in check.remedy) is not ok
    assert seer_kv_local.seer_doctor(None, None)[0].part == "kv_pool"


def test_on_a_cluster_there_is_a_pool_on_each_node_and_the_doctor_leaves_memory_to_them(tmp_path):
    startup = Startup(0, tmp_path, workers_here=False)
    settings = seer_kv_local.Settings(1 << 50, disk_bytes=1 << 60)
    assert isinstance(seer_kv_local.seer_make_kv_pool(settings, startup, object()), NodePools)
    [check] = seer_kv_local.seer_doctor(settings, startup)
    assert check.ok
    assert "each instance checks its node" in check.finding


def test_a_limit_of_file_sizes_is_an_error_with_a_remedy():
    program = """
import asyncio, resource, signal
from seer_kv_local.pool import LocalPool
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
asyncio.run(LocalPool(1 << 24).start(["a"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (
        "PluginError: the KV pool cannot make a memory file of 16777216 bytes: File too large" in done.stderr
    )
