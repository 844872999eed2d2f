import asyncio

import msgspec
import pytest
import seer_kv_local
from seer_kv_local import machine

from seer_core.hookspecs import Startup


def test_the_factory_takes_no_memory(tmp_path):
    pool = seer_kv_local.seer_make_kv_pool(seer_kv_local.Settings(1 << 40), Startup(0, tmp_path))
    assert pool.stats().capacity_bytes == 1 << 40
    asyncio.run(pool.clear())
    asyncio.run(pool.stop())


def test_a_capacity_below_a_mebibyte_is_no_setting():
    with pytest.raises(msgspec.ValidationError, match="1048576"):
        msgspec.convert({"capacity_bytes": 1000}, seer_kv_local.Settings)


@pytest.mark.parametrize(("capacity", "ok"), [(1 << 20, True), (1 << 50, False)])
def test_the_doctor_compares_the_pool_with_the_memory(capacity, ok):
    [check] = seer_kv_local.seer_doctor(seer_kv_local.Settings(capacity), None)
    assert check.ok is ok
    assert ("lower [kv_pool.local].capacity_bytes" in check.remedy) is not ok
    assert seer_kv_local.seer_doctor(None, None)[0].part == "kv_pool"


def test_a_cgroup_may_allow_less_than_the_machine_has(monkeypatch, tmp_path):
    free = machine.available_bytes()
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.available_bytes() > 1 << 20
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine.available_bytes() == 4000 < free
