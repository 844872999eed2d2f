"""The order of tests: as written, or random and repeatable, and what a file shares is made once."""

import re
from types import SimpleNamespace

from tests.harness import order

FILE = """
import pytest

@pytest.fixture(scope="module", params=["vllm", "sglang"])
def engine(request):
    print("start", request.param)
    return request.param

@pytest.mark.parametrize("number", range(4))
def test_engine(engine, number):
    pass

@pytest.mark.parametrize("number", range(4))
def test_plain(number):
    pass

@pytest.fixture(scope="class")
def shared():
    print("start class")

class TestContract:
    @pytest.mark.parametrize("number", range(4))
    def test_it(self, shared, number):
        pass
"""
FILES = {f"test_{name}": FILE for name in "abcd"}


def order_of(run):
    return re.findall(r"^(\w+\.py::\S+) ", run.output, re.M)


def files_of(tests):
    files = [test.split("::")[0] for test in tests]
    return [file for file, before in zip(files, [None, *files], strict=False) if file != before]


def test_a_random_order_keeps_each_file_together_and_starts_what_it_shares_once(run_tests):
    run = run_tests(["order"], "-v", "-s", "--order", "random", "--order-seed", "5", **FILES)
    assert run.status == 0
    assert run.output.count("start vllm") == run.output.count("start sglang") == len(FILES)
    assert run.output.count("start class") == len(FILES)
    found = re.findall(r"^(\w+\.py)::", run.output, re.M)
    assert len(files_of(found)) == len(FILES)
    assert files_of(found) != sorted(files_of(found))


def test_the_seed_repeats_the_order_also_in_workers(run_tests):
    written = order_of(run_tests(["order"], "-v", **FILES))
    first = run_tests(["order"], "-v", "--order", "random")
    seed = re.search(r"--order-seed=(\d+)", first.output)[1]
    assert sorted(order_of(first)) == sorted(written) != order_of(first)
    assert order_of(run_tests(["order"], "-v", "--order-seed", seed)) == order_of(first)
    in_worker = run_tests(
        ["order"], "-v", "--order-seed", seed, "-p", "xdist", "-n", "1", "--dist", "loadfile"
    )
    found = re.findall(r"PASSED (\S+)", in_worker.output)
    assert found == [test.rstrip() for test in order_of(first)]


def test_workers_share_a_seed_that_was_drawn(run_tests):
    run = run_tests(["order"], "--order", "random", "-p", "xdist", "-n", "2", **FILES)
    assert run.status == 0, run.output  # xdist refuses workers that have collected different orders
    assert re.search(r"order: random, again with --order-seed=\d+", run.output)


def test_the_order_is_as_written_by_default(run_tests):
    found = order_of(run_tests(["order"], "-v", **FILES))
    assert files_of(found) == sorted(files_of(found))


class Process:
    """Stands in for a process of xdist: it notes which tests it is sent."""

    gateway, shutting_down = SimpleNamespace(id="gw"), False

    def __init__(self):
        self.sent = []

    def send_runtest_some(self, numbers):
        self.sent += numbers

    def shutdown(self):
        self.shutting_down = True


def test_all_files_of_an_engine_go_to_the_process_that_has_begun_with_them_while_there_is_other_work():
    folders = ["backends/sglang"] * 4 + ["backends/vllm"] * 4 + ["plugins"] * 6
    tests = [f"{folder}/test_{number}.py::test" for number, folder in enumerate(folders)]
    values = {"dist": "loadfile", "tx": ["2*popen"]}
    config = SimpleNamespace(option=SimpleNamespace(loadscopereorder=True), getvalue=values.get)
    scheduler = order.pytest_xdist_make_scheduler(config, None)
    processes = Process(), Process()
    for process in processes:
        scheduler.add_node(process)
    for process in processes:
        scheduler.add_node_collection(process, tests)
    scheduler.schedule()
    for turn in range(len(tests)):
        for process in processes:
            if turn < len(process.sent):
                scheduler.mark_test_complete(process, process.sent[turn])
    sglang, vllm = ({folders[number] for number in process.sent} for process in processes)
    assert (sglang, vllm) == ({"backends/sglang", "plugins"}, {"backends/vllm", "plugins"})
    assert sorted(processes[0].sent + processes[1].sent) == list(range(len(tests)))
