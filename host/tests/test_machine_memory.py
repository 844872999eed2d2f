"""Memory that can still be taken, in a cgroup and without one."""

import pytest
from seer_host import machine_memory
from seer_host.machine_memory import available_bytes


@pytest.fixture
def cgroup(monkeypatch, tmp_path):
    """Returns what is available to a cgroup with such files."""
    monkeypatch.setattr(machine_memory, "CGROUP", tmp_path)

    def available(limit, used, cached=0):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{used}\n")
        stat = f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\nactive_file 0\n"
        (tmp_path / "memory.stat").write_text(stat)
        return available_bytes()

    return available


def test_a_cgroup_may_allow_less_than_the_machine_has(cgroup):
    assert cgroup("max", 1000) > 1 << 20
    assert cgroup(5000, 1000) == 4000


def test_copies_of_files_leave_a_cgroup_for_others(cgroup):
    assert cgroup(5000, 4900, cached=3000) == 3100


def test_a_cgroup_beyond_its_limit_has_nothing(cgroup):
    assert cgroup(5000, 6000) == 0
