"""``scripts/gpu-check``: what it reports, and its exit status."""

import json
import os
import subprocess
import sys

import pytest

from bench.gpu import check
from bench.gpu.check import COULD_NOT_RUN, FAILED, GpuCheck, GpuMachine, exit_status, outcome_of, page
from bench.gpu.recorded_checks import ARMS
from bench.harness import ROOT

HERE = "test_gpu_check_functions"
MACHINE = GpuMachine("cpu", small=True)
FUNCTIONS = """
def passes(machine):
    return [{"device": machine.device, "figure": 1234.5}]
def fails(machine):
    assert machine.device != "cpu", "other tokens"
def breaks(machine):
    raise RuntimeError("no kernel image")
"""


def run_script(*arguments):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(ROOT / "scripts" / "gpu-check"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_a_dry_run_tries_every_check_on_a_cpu(tmp_path):
    done = run_script("--part", 1, "--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-check-1.json").read_text())
    assert [each["check"] for each in report["checks"]] == [each.name for each in check.PARTS[1]]
    assert {each["status"] for each in report["checks"]} == {"passed"}
    assert all(each["rows"] for each in report["checks"])
    page_of_it = (tmp_path / "gpu-check-1.md").read_text()
    assert page_of_it in done.stdout
    assert "times mean nothing" in page_of_it
    assert f"Send us {tmp_path / 'gpu-check-1.json'}" in done.stdout


@pytest.mark.engine
def test_a_dry_run_of_the_second_part_rolls_out_on_vllm_beside_stock_vllm(tmp_path):
    done = run_script("--part", 2, "--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads((tmp_path / "gpu-check-2.json").read_text())["checks"]
    assert [row["responses"] for row in found["rows"]] == [1, 4]
    assert all(row["stock vLLM, tokens/s"] > 0 for row in found["rows"])


@pytest.mark.engine
@pytest.mark.parametrize("part", [3, 5, 6, 7, 13])
def test_a_dry_run_of_a_part_makes_every_check_of_it_on_engines_on_a_cpu(tmp_path, part):
    done = run_script("--part", part, "--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads((tmp_path / f"gpu-check-{part}.json").read_text())["checks"]
    assert [each["check"] for each in checks] == [each.name for each in check.PARTS[part]]
    other = [
        value for each in checks for row in each["rows"] for key, value in row.items() if "unlike" in key
    ]
    assert other
    assert not any(other)


@pytest.mark.engine
def test_a_dry_run_of_part_10_writes_the_recorded_responses_under_every_arm_and_predicts_them(tmp_path):
    done = run_script("--part", 10, "--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    file = tmp_path / "gpu-check-10.json"
    checks = {each["check"]: each["rows"] for each in json.loads(file.read_text())["checks"]}
    assert list(checks) == [each.name for each in check.PARTS[10]]
    arms = [row for rows in checks.values() for row in rows if "arm" in row and "responses" in row]
    assert {(row["responses"], row["tokens"]) for row in arms} == {(12, arms[0]["tokens"])}
    assert not any(row.get("unlike the recorded") for row in arms)
    assert checks["posterior with drafts"][0]["tokens per step"] > 1
    predicted = checks["predictions"]
    assert [row["arm"] for row in predicted] == list(ARMS)
    assert all(row["total, simulated, s"] > 0 and row["total, emulated, s"] > 0 for row in predicted)
    again = run_script("--predict", file, "--out", tmp_path / "again")
    assert again.returncode == 0, again.stdout + again.stderr
    made = json.loads((tmp_path / "again" / file.name).read_text())["checks"]
    assert made[-1]["rows"] == predicted


@pytest.mark.engine
def test_a_dry_run_of_part_8_times_steps_of_each_kind_of_drafts_for_each_batch(tmp_path):
    done = run_script("--part", 8, "--dry-run", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    [found] = json.loads((tmp_path / "gpu-check-8.json").read_text())["checks"]
    kinds = {(row["drafts"], row["tokens of each"], row["requests"]) for row in found["rows"]}
    names = [("cannot draft", 0), ("one length, nothing drafted", 0), ("one length", 4)]
    assert kinds == {(*name, batch) for name in names for batch in (1, 4)}
    assert all(row["a step, ms"] > 0 for row in found["rows"])


def test_a_part_that_is_cut_off_leaves_the_checks_that_it_ended(functions, tmp_path, monkeypatch):
    def interrupts(check, machine):
        if check.name == "second":
            raise KeyboardInterrupt
        return outcome_of(check, machine)

    monkeypatch.setattr(check, "outcome_of", interrupts)
    first = GpuCheck("first", f"{HERE}:passes", ())
    monkeypatch.setitem(check.PARTS, 1, (first, first._replace(name="second")))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KeyboardInterrupt):
        check.main(["--part", "1", "--dry-run", "--out", str(tmp_path)])
    [found] = json.loads((tmp_path / "gpu-check-1.json").read_text())["checks"]
    assert (found["check"], found["status"]) == ("first", "passed")


@pytest.mark.parametrize("part", [4, 9])
def test_the_second_model_runner_is_left_out_of_a_dry_run_with_a_reason(tmp_path, part):
    done = run_script("--part", part, "--dry-run", "--out", tmp_path)
    assert done.returncode == COULD_NOT_RUN
    [found] = json.loads((tmp_path / f"gpu-check-{part}.json").read_text())["checks"]
    assert (found["status"], found["reason"]) == ("skipped", "vLLM's second model runner needs a GPU")


def test_a_machine_without_a_gpu_could_not_run_and_did_not_fail(tmp_path):
    done = run_script("--part", 1, "--out", tmp_path)
    assert done.returncode == COULD_NOT_RUN
    assert "PyTorch sees no GPU; --dry-run tries the checks on a CPU" in done.stderr
    assert not list(tmp_path.iterdir())


def test_the_first_part_needs_nothing_of_seer_but_the_sampler():
    barred = ("attrs", "msgspec", "pluggy", "seer_cli", "seer_core", "seer_vllm", "structlog", "vllm")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({barred}));"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'backends/worker')!r}];"
        "import bench.gpu.check, bench.gpu.sampler_checks, bench.gpu.machine_checks;"
        "from seer_worker.sampling import fused, kernels, keyed"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / f"{HERE}.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("function", "needs", "status", "reason"),
    [
        ("passes", ("json",), "passed", ""),
        ("fails", (), "failed", "other tokens"),
        ("breaks", (), "failed", "no kernel image"),
        ("passes", ("json", "no_such_module"), "skipped", "no_such_module is not installed"),
    ],
)
def test_a_check_passes_fails_or_is_skipped_by_name(functions, function, needs, status, reason):
    found = outcome_of(GpuCheck("tokens", f"{HERE}:{function}", needs), MACHINE)
    assert (found["check"], found["status"]) == ("tokens", status)
    assert reason in found["reason"]
    report = {"part": 1, "dry_run": False, "shared": False, "machine": {"gpu": "none"}, "checks": [found]}
    assert f"## tokens: {status}" in page(report)
    assert reason in page(report)
    assert "compare no times" not in page(report)
    assert "compare no times" in page({**report, "shared": True})


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["passed", "passed"], 0),
        (["passed", "skipped"], COULD_NOT_RUN),
        (["failed", "skipped", "passed"], FAILED),
    ],
)
def test_the_exit_status_sets_a_failure_apart_from_what_could_not_run(statuses, expected):
    assert exit_status([{"status": each} for each in statuses]) == expected
