"""The doctor on GPUs, on a machine made of files."""

import pytest
from seer_worker.gpus import Gpu, gpus, hardware, placement

SMI = """#!/bin/sh
case "$1" in
--query-gpu=*) printf '0, NVIDIA H100 80GB HBM3, 81559, 80000\\n1, NVIDIA GB10, [N/A], [N/A]\\n' ;;
nvlink) printf 'GPU 0: NVIDIA H100\\n\\t Link 0: 26.562 GB/s\\n\\t Link 1: 26.562 GB/s\\n' ;;
*) exit 2 ;;
esac
"""
H100 = Gpu(0, "H100", 80 << 30, 79 << 30)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    script = tmp_path / "bin" / "nvidia-smi"
    script.parent.mkdir()
    script.write_text(SMI)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    return script


@pytest.fixture
def machine(tmp_path):
    """A machine with a driver and an RDMA port."""
    root = tmp_path / "root"
    driver, port = root / "proc/driver/nvidia", root / "sys/class/infiniband/mlx5_0/ports/1"
    driver.mkdir(parents=True)
    port.mkdir(parents=True)
    (driver / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC\n")
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    return root


def test_gpus_are_those_that_nvidia_smi_lists(smi):
    assert gpus() == [
        Gpu(0, "NVIDIA H100 80GB HBM3", 81559 << 20, 80000 << 20),
        Gpu(1, "NVIDIA GB10", 0, 0),
    ]
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert gpus() == []


def test_driver_gpus_links_and_rdma_are_described(smi, machine):
    checks = hardware("vllm", machine)
    findings = [check.finding for check in checks]
    assert findings[0] == "driver 570.86.15, 2 GPUs"
    assert findings[1] == "GPU 0: NVIDIA H100 80GB HBM3, 78.1 of 79.6 GiB free"
    assert "2 NVLinks that are up" in findings
    assert findings[-1] == "RDMA: mlx5_0/1 active at 400 Gb/sec (4X NDR)"


def test_a_machine_without_a_driver_is_not_described(tmp_path):
    assert hardware("vllm", tmp_path) == []


def test_a_driver_whose_gpus_no_tool_lists_has_a_remedy(machine, monkeypatch):
    monkeypatch.setenv("PATH", "")
    first = hardware("vllm", machine)[0]
    assert (first.ok, first.finding) == (False, "driver 570.86.15, 0 GPUs")
    assert "nvidia-smi" in first.remedy


def test_a_driver_older_than_the_cuda_of_this_environment_is_refused(smi, machine, monkeypatch):
    monkeypatch.setattr("seer_worker.gpus.version", lambda name: {"nvidia-cuda-runtime": "13.0.96"}[name])
    monkeypatch.setattr("seer_worker.gpus.RUNTIMES", {"nvidia-cuda-runtime": "13"})
    [check] = [each for each in hardware("vllm", machine) if "libcudart" in each.finding]
    assert (check.ok, check.finding) == (False, "libcudart.so.13 (13.0.96)")
    assert check.remedy == "CUDA 13 needs driver 580 or later: update it"


@pytest.mark.parametrize(
    ("instances", "each", "kv_bytes", "share", "visible", "refused"),
    [
        (1, 1, None, None, None, ""),
        (2, 1, None, None, None, "2 devices of 1 GPUs that are visible"),
        (1, 2, None, None, "0", "2 devices of 1 GPUs that are visible"),
        (2, 1, None, 0.4, "0,0", ""),
        (2, 1, None, None, "0,0", "2 instances share a GPU, of whose memory each wants nearly all"),
        (2, 1, None, 0.6, "0,0", "2 instances share a GPU, of whose memory each wants 0.6"),
        (1, 1, 90 << 30, None, "0", "KV caches of 90.00 GiB on GPU 0 of 80.0 GiB"),
        (2, 1, 45 << 30, 0.4, "0,0", "KV caches of 90.00 GiB on GPU 0 of 80.0 GiB"),
        (1, 1, 90 << 30, None, "GPU-4f2a", ""),
    ],
)
def test_settings_that_do_not_fit_the_gpus_are_refused(instances, each, kv_bytes, share, visible, refused):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    checks = placement("vllm", instances, each, kv_bytes, share, environment, [H100])
    assert [check.finding for check in checks if not check.ok] == [refused] * bool(refused)
    assert all(check.remedy for check in checks if not check.ok)


@pytest.mark.parametrize(("visible", "count"), [("", 0), ("-1", 0), (" 0, 1", 2), ("1", 1)])
def test_only_devices_that_are_visible_count(visible, count):
    there = [Gpu(number, "H200", 1 << 37, 1 << 37) for number in range(2)]
    [check, *_] = placement("vllm", 2, 1, None, None, {"CUDA_VISIBLE_DEVICES": visible}, there)
    assert check.ok == (count == 2)
    if count < 2:
        assert check.finding == f"2 devices of {count} GPUs that are visible"
        assert ("name GPUs in CUDA_VISIBLE_DEVICES" in check.remedy) == (not count)


def test_a_device_that_is_named_with_a_space_is_compared_too():
    there = [Gpu(number, "H200", 1 << 37, 1 << 37) for number in range(2)]
    checks = placement("vllm", 2, 1, 1 << 38, None, {"CUDA_VISIBLE_DEVICES": "0, 1"}, there)
    assert [check.ok for check in checks] == [True, False, False]
