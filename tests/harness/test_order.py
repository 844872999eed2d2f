"""The order of tests: as written, or random and repeatable, and what a file shares is made once."""

import re

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
    order = re.findall(r"^(\w+\.py)::", run.output, re.M)
    assert len(files_of(order)) == len(FILES)
    assert files_of(order) != sorted(files_of(order))


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
    order = order_of(run_tests(["order"], "-v", **FILES))
    assert files_of(order) == sorted(files_of(order))
